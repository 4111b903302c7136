"""The folder of a run: one writer at a time, files that are whole or absent."""

import csv
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from primal.training import distributed


class FolderError(ValueError):
    """A folder a run cannot use."""


class RunFolder:
    """What a run writes. Held while open: a second run into the same folder is refused.

    Of torchrun's processes the first one holds and writes it.
    """

    RECIPE, METRICS, RESULT = "recipe.json", "metrics.jsonl", "result.json"
    CHECKPOINT, MODEL = "checkpoint.safetensors", "model.safetensors"
    ENVIRONMENT, PREDICTIONS, REPORT = "environment.json", "predictions.csv", "report.html"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[str] | None = None

    def __enter__(self) -> Self:
        if not distributed.is_first():
            return self
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / ".lock").open("w")
        except OSError as error:
            raise FolderError(
                f"the run folder {self.path} cannot be written ({error}); give another --folder."
            ) from None
        if not _locked(self._lock):
            self._lock.close()
            raise FolderError(
                f"another run is writing to {self.path}; wait for it, or give another --folder."
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._lock is not None:
            self._lock.close()  # which frees the lock, as the end of a killed process does

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        self.write_text(name, json.dumps(content, indent=1) + "\n")

    def write_text(self, name: str, text: str) -> None:
        temporary = self.path / (name + ".part")
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(self.path / name)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise self._unwritten(name, error) from None

    def write_metrics(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Begin the file of metrics anew, with the rows of the epochs that count."""
        self.write_text(self.METRICS, "".join(json.dumps(row) + "\n" for row in rows))

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        try:
            with (self.path / self.METRICS).open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(row) + "\n")
        except OSError as error:
            raise self._unwritten(self.METRICS, error) from None

    def metrics(self) -> list[dict[str, Any]]:
        path = self.path / self.METRICS
        if not path.exists():
            return []
        rows = []
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:  # a line that a killed run did not finish
                break
        return rows

    def _unwritten(self, name: str, error: OSError) -> FolderError:
        return FolderError(
            f"{self.path / name} could not be written ({error}); make room or give another "
            "--folder, then resume."
        )


@contextmanager
def csv_table(path: Path) -> Iterator[Any]:
    """Open a table that has its name only once it is whole."""
    temporary = path.with_name(path.name + ".part")
    try:
        with temporary.open("w", newline="") as opened:
            yield csv.writer(opened)
        temporary.replace(path)
    except OSError as error:
        raise FolderError(f"{path} could not be written ({error}); give another place.") from None
    finally:
        temporary.unlink(missing_ok=True)


def _locked(handle: IO[str]) -> bool:
    """Lock a file until it is closed; the system frees it when a process dies."""
    try:
        if os.name == "nt":
            import msvcrt

            msvcrt.locking(handle.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        else:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
