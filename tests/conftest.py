"""What every test finds: a seed, one thread, the optional data or a reason to skip."""

import os
from pathlib import Path

# Before torch is imported: tests run in several processes at once, and share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before a kernel is imported

ROOT = Path(__file__).parents[1]

# No deadline: a first call allocates or compiles and says nothing about speed. On CI the examples
# are always the same, so that a change is judged by what it changed.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


class Everywhere:
    """Fixtures for the doctests in primal/ too, which this file's own do not reach."""

    @pytest.fixture(autouse=True)
    def seed(self) -> None:
        torch.manual_seed(0)

    @pytest.fixture(autouse=True)
    def names(self, doctest_namespace: dict[str, object]) -> None:
        import primal

        doctest_namespace.update(torch=torch, primal=primal)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Everywhere())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU, and there is none"))


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of optional data beside the checkout; without it the test is skipped."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip("needs the optional data in ../shared, and there is none")
    return folder
