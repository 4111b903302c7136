"""People's own files as series: UEA .ts, numpy arrays, long-format CSV and Parquet tables.

Everything is read in chunks of cases, so that a file may be larger than memory; ``read`` joins them.
What is wrong with a file is said in one line: the file, the row, the remedy.
"""

from __future__ import annotations

import lzma
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from primal.data.series import SeriesSet, join
from primal.data.tables import Columns, read_table
from primal.errors import DataError

SUFFIXES = (".ts", ".ts.xz", ".npz", ".npy", ".csv", ".csv.gz", ".csv.xz", ".parquet")


def read(path: str | Path, columns: Columns | None = None, *, numeric: bool = False) -> SeriesSet:
    """Read a whole file; ``numeric`` targets are numbers to regress on, not class names."""
    parts = list(read_chunks(path, columns, numeric=numeric, cases=2**30))
    if not parts:
        raise DataError(f"{path} holds no case; give a file with at least one.")
    return join(parts)


def read_chunks(
    path: str | Path, columns: Columns | None = None, *, numeric: bool = False, cases: int = 1024
) -> Iterator[SeriesSet]:
    """Read a file ``cases`` cases at a time."""
    path = Path(path)
    name = path.name.lower()
    if not path.exists():
        raise DataError(f"{path} does not exist; check the path.")
    if not name.endswith(SUFFIXES):
        raise DataError(f"{path} must end in one of {', '.join(SUFFIXES)}.")
    if ".ts" in path.suffixes:
        chunks = _read_ts(path, cases)
    elif name.endswith((".npz", ".npy")):
        chunks = _read_numpy(path, cases)
    else:
        chunks = read_table(path, columns or Columns(), cases)
    channels = None
    for chunk in chunks:
        channels = chunk.channels if channels is None else channels
        _check(path, chunk, channels)
        yield _with_numbers(path, chunk) if numeric else chunk


def _check(path: Path, data: SeriesSet, channels: int) -> None:
    for name, values in zip(data.names, data.values, strict=True):
        if values.shape[1] != channels:
            raise DataError(
                f"{path}, case {name}: {channels} channels are required, as in the cases before it, "
                f"got {values.shape[1]}; every case needs the same channels."
            )
        if not len(values):
            raise DataError(f"{path}, case {name} is empty; remove it or give it a time step.")
        if np.isinf(values).any():
            step = int(np.flatnonzero(np.isinf(values).any(axis=1))[0])
            raise DataError(
                f"{path}, case {name}, step {step}: an infinite value; leave it empty if it is missing."
            )
        if np.isnan(values).all():
            raise DataError(
                f"{path}, case {name} has no value at all, all are missing; remove the case."
            )


def _with_numbers(path: Path, data: SeriesSet) -> SeriesSet:
    if data.targets is None:
        return data
    try:
        targets = data.targets.astype(np.float64)
    except ValueError as error:
        raise DataError(
            f"{path}: a regression needs numbers as labels ({error}); "
            "correct them, or train a classifier with --data.target class."
        ) from None
    return SeriesSet(data.values, targets, data.names, data.times)


# --- .ts -----------------------------------------------------------------------------------------


def _read_ts(path: Path, cases: int) -> Iterator[SeriesSet]:
    """Hand aeon's reader the header and some lines at a time."""
    load = _aeon_reader()
    opened = lzma.open(path, "rt") if path.suffix == ".xz" else path.open()
    with opened as lines, tempfile.TemporaryDirectory() as folder:
        header = []
        for line in lines:
            header.append(line)
            if line.strip().lower() == "@data":
                break
        else:
            raise DataError(f"{path} has no @data line; give a UEA .ts file.")
        labelled = not any(
            line.lower().split()[:2] in (["@classlabel", "false"], ["@targetlabel", "false"])
            for line in header
            if line.strip()
        )
        count, first_line = 0, len(header) + 1
        data_lines = (line for line in lines if line.strip())
        while chunk := list(islice(data_lines, cases)):
            part = Path(folder, "part.ts")
            part.write_text("".join([*header, *chunk]))
            try:
                series, labels = load(str(part))
            except Exception as error:  # aeon raises OSError, ValueError, IndexError, ...
                raise DataError(
                    f"{path}, lines {first_line + count} to {first_line + count + len(chunk) - 1}: "
                    f"{_one_line(error)}; correct the file as its header says."
                ) from None
            yield SeriesSet(
                tuple(np.ascontiguousarray(np.asarray(one, np.float32).T) for one in series),
                np.asarray(labels).astype(str) if labelled else None,
                tuple(str(count + i) for i in range(len(series))),
            )
            count += len(series)


def _aeon_reader() -> Any:
    try:
        from aeon.datasets import load_from_ts_file
    except ImportError:
        raise DataError(
            ".ts files are read by aeon, which is not installed: "
            "pip install 'primal-attention[timeseries]'."
        ) from None

    def load(path: str) -> Any:
        series, labels = load_from_ts_file(path, return_type="auto")
        return series, labels

    return load


# --- numpy ---------------------------------------------------------------------------------------


def _read_numpy(path: Path, cases: int) -> Iterator[SeriesSet]:
    """Read .npy (cases, channels, time), or .npz of that as X with labels y and lengths, optional."""
    loaded = np.load(path, mmap_mode="r", allow_pickle=False)
    arrays = {"X": loaded} if isinstance(loaded, np.ndarray) else dict(loaded.items())
    if "X" not in arrays:
        raise DataError(
            f"{path} must hold an array X (cases, channels, time) and labels y, got "
            f"{sorted(arrays)}; save it with np.savez(path, X=..., y=...)."
        )
    series, labels, lengths = arrays["X"], arrays.get("y"), arrays.get("lengths")
    if series.ndim != 3 or not np.issubdtype(series.dtype, np.number):
        raise DataError(
            f"{path}: X must be numbers (cases, channels, time), got {series.dtype} {series.shape}; "
            "a univariate set needs X[:, None, :]."
        )
    for what, array in (("y", labels), ("lengths", lengths)):
        if array is not None and array.shape != series.shape[:1]:
            raise DataError(
                f"{path}: {what} must have one entry for each of {len(series)} cases, got "
                f"{array.shape}."
            )
    for start in range(0, len(series), cases):
        part = np.asarray(series[start : start + cases], dtype=np.float32).transpose(0, 2, 1)
        stop = start + len(part)
        ends = [part.shape[1]] * len(part) if lengths is None else lengths[start:stop].tolist()
        yield SeriesSet(
            tuple(values[:end] for values, end in zip(part, ends, strict=True)),
            None if labels is None else np.asarray(labels[start:stop]).astype(str),
            tuple(str(case) for case in range(start, stop)),
        )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
