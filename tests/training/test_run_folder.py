"""A run's folder: one writer at a time, files that are whole or absent, errors with a remedy."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from primal.training.run_folder import FolderError, RunFolder

ROOT = Path(__file__).parents[2]
HOLD = """
import sys, time
from pathlib import Path
from primal.training.run_folder import RunFolder
with RunFolder(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_run_is_refused_until_the_first_dies(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout.readline() == "held\n"
        with (
            pytest.raises(FolderError, match=r"another run is writing to .*; wait for it, or give"),
            RunFolder(tmp_path),
        ):
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
    with RunFolder(tmp_path):  # its lock died with it
        pass


def test_a_second_run_of_the_same_process_is_refused(tmp_path):
    with RunFolder(tmp_path / "new" / "run"):
        with pytest.raises(FolderError, match=r"another run"), RunFolder(tmp_path / "new" / "run"):
            pass
        with pytest.raises(FolderError, match=r"another run"), RunFolder(tmp_path / "new" / "run"):
            pass  # a refused one takes no lock away


@pytest.mark.parametrize("place", ["file/run", "file"])
def test_a_place_that_cannot_be_a_folder_is_named(tmp_path, place):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(FolderError, match=rf"{place} cannot be written .*; give another --folder"),
        RunFolder(tmp_path / place),
    ):
        pass


def test_a_folder_without_the_right_to_write_is_named(tmp_path, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "open", refuse)  # root may write anywhere
    with (
        pytest.raises(FolderError, match=r"Permission denied.*; give another"),
        RunFolder(tmp_path),
    ):
        pass


def test_metrics_end_where_a_killed_run_did(tmp_path):
    with RunFolder(tmp_path) as folder:
        assert folder.metrics() == []
        folder.write_metrics([{"epoch": 1}, {"epoch": 2}])
        folder.append_metrics({"epoch": 3})
        assert [row["epoch"] for row in folder.metrics()] == [1, 2, 3]
        with (folder / RunFolder.METRICS).open("a") as lines:
            lines.write('{"epoch": ')
        assert [row["epoch"] for row in folder.metrics()] == [1, 2, 3]


@pytest.mark.parametrize("refused", ["write_text", "replace"])
def test_a_file_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch, refused):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with RunFolder(tmp_path) as folder:
        folder.write_json("a.json", {"x": 1})
        with monkeypatch.context() as patched:
            patched.setattr(Path, refused, refuse)
            with pytest.raises(FolderError, match=r"a.json could not be written \(.*No space left"):
                folder.write_json("a.json", {"x": 2})
        assert (folder / "a.json").read_text() == '{\n "x": 1\n}\n'
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "a.json"]
