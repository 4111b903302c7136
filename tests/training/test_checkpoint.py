"""Checkpoints: what is read is what was written, or is refused; nothing is ever unpickled."""

import ast
import errno
import math
import os
import pickle
import resource
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from primal.training import checkpoint
from primal.training.checkpoint import CheckpointError, load, save
from primal.training.run_folder import FolderError, RunFolder
from tests.training.toy import run, toy

ROOT = Path(__file__).parents[2]
TENSORS = {
    "matrix": torch.arange(6.0).view(2, 3),
    "view": torch.arange(6.0).view(2, 3).T[1:],  # neither contiguous nor alone in its memory
    "number": torch.tensor(3),
    "empty": torch.zeros(0, 4),
    "half": torch.tensor([1.5, math.inf], dtype=torch.bfloat16),
    "mask": torch.tensor([True, False]),
}
STATE = {"epoch": 3, "rows": [{"loss": 0.1, "best": None, "r2": math.inf}]}


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "some.safetensors"
    save(path, TENSORS, STATE)
    return path


def test_what_is_read_is_what_was_written(written):
    tensors, state = load(written)
    assert state == STATE
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor)
    assert [path.name for path in written.parent.iterdir()] == [written.name]


def test_what_is_read_does_not_change_with_the_file(written):
    tensors, _ = load(written)
    written.write_bytes(bytes(len(written.read_bytes())))
    assert torch.equal(tensors["matrix"], TENSORS["matrix"])


@pytest.mark.parametrize("part", [0.0, 0.001, 0.3, 0.9, 0.999])
def test_a_truncated_file_is_refused(written, part):
    content = written.read_bytes()
    written.write_bytes(content[: int(part * len(content))])
    with pytest.raises(CheckpointError, match=r"some.safetensors is damaged, .*; restore it from"):
        load(written)


def test_any_byte_that_changed_is_noticed(written):
    """In the header's numbers and names, in the state, in the tensors."""
    content = written.read_bytes()
    for place in range(0, len(content), 7):
        spoilt = bytearray(content)
        spoilt[place] ^= 1
        written.write_bytes(spoilt)
        with pytest.raises(CheckpointError, match=r"some.safetensors") as caught:
            load(written)
        assert "; restore it" in str(caught.value) or "; give the folder" in str(caught.value)


def test_a_foreign_file_is_refused(tmp_path):
    path = tmp_path / "foreign.safetensors"
    save_file({"a": torch.zeros(2)}, path)
    with pytest.raises(CheckpointError, match=r"foreign.safetensors was not written by this"):
        load(path)


def test_a_pickle_is_refused_and_not_run(tmp_path):
    class Harm:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "harm",)

    path = tmp_path / "pickle.safetensors"
    path.write_bytes(pickle.dumps(Harm()))
    with pytest.raises(CheckpointError, match=r"pickle.safetensors is damaged"):
        load(path)
    torch.save({"a": torch.zeros(1), "b": Harm()}, path)
    with pytest.raises(CheckpointError, match=r"pickle.safetensors is damaged"):
        load(path)
    assert not (tmp_path / "harm").exists()


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"none does not exist; give the folder of a run"):
        load(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"damaged, it cannot be read"):
        load(tmp_path)


def test_nothing_in_the_package_unpickles():
    banned = {"pickle", "cPickle", "dill", "joblib", "cloudpickle", "shelve", "marshal"}
    for path in (ROOT / "primal").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) != ("torch", "load"), path
                if (node.value.id, node.attr) == ("np", "load"):
                    assert "allow_pickle=True" not in path.read_text(), path
            assert not banned & {module.split(".")[0] for module in modules}, path


# --- no room, no right ---------------------------------------------------------------------------


def assert_kept(path: Path) -> None:
    """The one from before is whole, and nothing lies beside it."""
    assert load(path)[1] == STATE
    assert not list(path.parent.glob("*.part"))


BIG = {"big": torch.zeros(100_000)}


def test_a_file_system_that_is_full_keeps_the_last_good_one(tmp_path):
    if os.name != "posix" or os.geteuid() != 0:
        pytest.skip("needs the right to mount a file system")
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        path = tmp_path / "some.safetensors"
        save(path, TENSORS, STATE)
        with pytest.raises(CheckpointError, match=r"could not be written .*os error 28.*is kept"):
            save(path, BIG, {})
        assert_kept(path)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_write_that_fails_halfway_keeps_the_last_good_one(written):
    """The system refuses files above a size, in the middle of writing one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(CheckpointError, match=r"could not be written .*some.safetensors, is"):
            save(written, BIG, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert_kept(written)


@pytest.mark.parametrize("refused", ["_flush", "replace"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EIO])
def test_whatever_the_system_refuses_keeps_the_last_good_one(written, monkeypatch, refused, number):
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    where: Any = checkpoint if refused == "_flush" else Path
    with monkeypatch.context() as patched:
        patched.setattr(where, refused, refuse)
        with pytest.raises(CheckpointError, match=os.strerror(number)) as caught:
            save(written, BIG, {})
    assert "make room or give another folder, then resume" in str(caught.value)
    assert_kept(written)


def test_a_folder_that_has_gone_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"gone/some could not be .*there is none before it"):
        save(tmp_path / "gone" / "some", TENSORS, STATE)


@pytest.mark.parametrize("count", [1, 2, 9])
def test_a_run_whose_disk_fills_up_ends_and_resumes(tmp_path, monkeypatch, count):
    """From any checkpoint on; what was saved before is where it goes on from."""
    left = count

    def fill(tensors: dict[str, Tensor], text: str) -> str:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return checksum(tensors, text)

    checksum = checkpoint._checksum
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "_checksum", fill)
        with pytest.raises(CheckpointError, match=r"No space left on device.*is kept; make room"):
            run(tmp_path)
    counted: list[int] = []
    rows, weights = run(tmp_path, toy(before_step=counted.append), resume=True)
    assert len(counted) == 12 - count + (count > 4)  # the fifth follows an epoch
    expected_rows, expected = run(None)
    assert rows == expected_rows
    for name, tensor in expected.items():
        assert torch.equal(weights[name], tensor)


def test_a_disk_too_full_for_metrics_keeps_the_checkpoint(tmp_path, monkeypatch):
    opened = Path.open

    def refuse(path: Path, mode: str = "r", **options: Any) -> Any:
        if mode == "a":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return opened(path, mode, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", refuse)
        with pytest.raises(FolderError, match=r"metrics.jsonl could not be written \(.*No space"):
            run(tmp_path)
    _, state = load(tmp_path / RunFolder.CHECKPOINT)
    assert (state["epoch"], state["position"]) == (1, 4)
    assert run(tmp_path, resume=True)[0] == run(None)[0]
