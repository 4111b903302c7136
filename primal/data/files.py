"""People's own files as series: UEA .ts, numpy arrays, long-format CSV and Parquet tables.

Everything is read some cases at a time, so that a file may be larger than memory; ``read`` joins
them. What is wrong with a file is said in one line: the file, the row, the remedy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from primal.data.arrays import read_arrays
from primal.data.series import SeriesSet, join
from primal.data.tables import Columns, ScatteredError, read_table
from primal.data.ts import read_ts
from primal.errors import DataError

SUFFIXES = (
    *(".ts", ".ts.gz", ".ts.xz", ".npz", ".npy"),
    *(".csv", ".csv.gz", ".csv.xz", ".parquet"),
)
CASES = 1024  # read at a time
LARGEST = float(np.finfo(np.float32).max)  # models compute in float32


def read(path: str | Path, columns: Columns | None = None, *, numeric: bool = False) -> SeriesSet:
    """Read a whole file; ``numeric`` targets are numbers to regress on, not class names."""
    try:
        return join(list(_chunks(Path(path), columns or Columns(), numeric, CASES)))
    except ScatteredError:  # a log, its cases side by side
        return join(list(_chunks(Path(path), columns or Columns(), numeric, CASES, gather=True)))


def read_chunks(
    path: str | Path, columns: Columns | None = None, *, numeric: bool = False, cases: int = CASES
) -> Iterator[SeriesSet]:
    """Read a file, at most ``cases`` cases at a time."""
    return _chunks(Path(path), columns or Columns(), numeric, cases)


def _chunks(
    path: Path, columns: Columns, numeric: bool, cases: int, *, gather: bool = False
) -> Iterator[SeriesSet]:
    name = path.name.lower()
    if not path.is_file():
        raise DataError(f"{path} is no file; check the path.")
    if not name.endswith(SUFFIXES):
        raise DataError(f"{path} must end in one of {', '.join(SUFFIXES)}; convert or rename it.")
    if name.endswith((".ts", ".ts.gz", ".ts.xz")):
        chunks = read_ts(path, cases)
    elif name.endswith((".npz", ".npy")):
        chunks = read_arrays(path, cases)
    else:
        chunks = read_table(path, columns, cases, gather=gather)
    empty = True
    for chunk in chunks:
        empty = False
        _check(chunk)
        yield replace(chunk, targets=_numbers(chunk)) if numeric else chunk
    if empty:
        raise DataError(f"{path} has no case; give a file with at least one.")


def _check(data: SeriesSet) -> None:
    stacked = np.concatenate(data.values)
    starts = np.cumsum(data.lengths) - data.lengths
    wrong = np.flatnonzero((np.abs(stacked) > LARGEST).any(axis=1))
    if len(wrong):
        case = int(np.searchsorted(starts, wrong[0], side="right")) - 1
        raise DataError(
            f"{data.where(case)}, step {wrong[0] - starts[case] + 1}: finite numbers are required, "
            f"got one beyond {LARGEST:.2g}; correct it, or leave it empty if it is missing."
        )
    known = np.add.reduceat(~np.isnan(stacked).all(axis=1), starts)
    if not known.all():
        raise DataError(
            f"{data.where(int(np.argmin(known)))}: at least one value is required, got none, all "
            "are missing; drop the case."
        )


def _numbers(data: SeriesSet) -> np.ndarray | None:
    if data.targets is None:
        return None
    numbers = np.empty(len(data))
    for case, label in enumerate(data.targets):
        try:
            numbers[case] = float(label)
        except ValueError:
            numbers[case] = np.nan
        if not np.isfinite(numbers[case]):
            raise DataError(
                f"{data.where(case)}: a number is required as label, got {str(label)!r}; correct "
                "it, or train a classifier, --data.target class."
            )
    return numbers
