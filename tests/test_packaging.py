"""What is shipped: a pure wheel with the package alone, and the dependencies it really has."""

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from importlib.metadata import packages_distributions
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", *command, str(ROOT)], check=True)
    (built,) = folder.iterdir()
    return built


def test_the_wheel_is_pure_python(wheel):
    assert wheel.name == f"primal_attention-{PROJECT['version']}-py3-none-any.whl"


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    shipped = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    package = {path.relative_to(ROOT).as_posix() for path in (ROOT / "primal").rglob("*.py")}
    assert shipped == package | {"primal/py.typed", "primal/report/style.css"}


def test_dependencies_are_what_is_imported():
    base = _distributions(PROJECT["dependencies"])
    extras = _distributions(chain(*PROJECT["optional-dependencies"].values()))
    shown = _imported_distributions("primal", "examples")
    everywhere = shown | _imported_distributions("benchmarks", "tests")
    assert base <= shown, f"nothing imports {sorted(base - shown)}"
    assert everywhere <= base | extras, f"undeclared: {sorted(everywhere - base - extras)}"


def test_every_dependency_has_one_exact_version():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)
    assert len(_distributions(pins)) == len(pins)
    wanted = chain(PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    assert _distributions(wanted) - _distributions([PROJECT["name"]]) <= _distributions(pins)


def _distributions(requirements: Iterable[str]) -> set[str]:
    """Return the names in ``requirements``, spelt as an index spells them."""
    names = (re.split(r"[^\w.-]", requirement)[0] for requirement in requirements)
    return {re.sub(r"[-_.]+", "-", name).lower() for name in names}


def _imported_distributions(*folders: str) -> set[str]:
    """Return the distributions that files under ``folders`` import, anywhere in their code."""
    modules = set()
    for path in chain(*((ROOT / folder).rglob("*.py") for folder in folders)):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                modules.add(node.module.split(".")[0])
    known = packages_distributions()
    foreign = modules - sys.stdlib_module_names - {"primal", "tests"}
    return _distributions(name for module in foreign for name in known.get(module, [module]))
