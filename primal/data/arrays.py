"""numpy files, .npy and .npz, read some cases at a time; nothing in them is ever unpickled."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import IO

import numpy as np

from primal.data.series import SeriesSet, as_names
from primal.errors import DataError

SAVE = "save it with np.savez(path, X=X, y=y)"


def read_arrays(path: Path, cases: int) -> Iterator[SeriesSet]:
    """Read .npy, X (cases, channels, time), or .npz of X and, optional, y and lengths (cases,)."""
    try:
        if path.suffix.lower() == ".npy":
            with path.open("rb") as file:
                yield from _sets(path, file, None, None, cases)
            return
        with zipfile.ZipFile(path) as archive:
            names = [name[:-4] for name in archive.namelist() if name.endswith(".npy")]
            if "X" not in names:
                raise DataError(
                    f"{path} needs an array X (cases, channels, time), got "
                    f"{', '.join(names) or 'none'}; {SAVE}."
                )
            labels, lengths = (
                _read_whole(path, archive, name) if name in names else None
                for name in ("y", "lengths")
            )
            with archive.open("X.npy") as file:
                yield from _sets(path, file, labels, lengths, cases)
    except (EOFError, OSError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}; save or copy it again.") from None


def _sets(
    path: Path,
    file: IO[bytes],
    labels: np.ndarray | None,
    lengths: np.ndarray | None,
    cases: int,
) -> Iterator[SeriesSet]:
    shape, transposed, dtype = _header(path, "X", file)
    if len(shape) != 3 or dtype.kind not in "iuf":
        raise DataError(
            f"{path}: X must be numbers (cases, channels, time), got {dtype} {shape}; "
            "a univariate set needs X[:, None, :]."
        )
    count, channels, longest = shape
    if count and not (channels and longest):
        raise DataError(f"{path}: X {shape} has empty cases; give each a channel and a time step.")
    names = None if labels is None else as_names(labels)
    _check_sides(path, names, lengths, count, longest)
    chunks = _rows(path, file, shape, dtype, cases)
    if transposed:  # in Fortran's order the cases do not follow each other: all are read at once
        whole = next(_rows(path, file, shape[::-1], dtype, longest)).transpose()
        chunks = (whole[start : start + cases] for start in range(0, count, cases))
    start = 0
    for chunk in chunks:
        stop = start + len(chunk)
        if dtype not in (np.float32, np.float64):
            chunk = chunk.astype(np.float64)  # noqa: PLW2901
        ends = [longest] * len(chunk) if lengths is None else lengths[start:stop].tolist()
        yield SeriesSet(
            tuple(one.T[:end] for one, end in zip(chunk, ends, strict=True)),
            None if names is None else names[start:stop],
            tuple(str(case) for case in range(start, stop)),
            source=str(path),
        )
        start = stop


def _header(path: Path, name: str, file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Return shape, whether in Fortran's order, and type; refuse Python objects."""
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0
        shape, transposed, dtype = (
            read if version == (1, 0) else np.lib.format.read_array_header_2_0
        )(file)
    except ValueError as error:
        raise DataError(f"{path}: {name} is no numpy array ({error}); {SAVE}.") from None
    if dtype.hasobject:
        raise DataError(
            f"{path}: {name} holds Python objects, which are never unpickled; save numbers, and "
            "labels as y.astype(str)."
        )
    return shape, transposed, dtype


def _read_whole(path: Path, archive: zipfile.ZipFile, name: str) -> np.ndarray:
    with archive.open(f"{name}.npy") as file:
        shape, _, dtype = _header(path, name, file)
        if len(shape) != 1:
            raise DataError(f"{path}: {name} must have the shape (cases,), got {shape}; {SAVE}.")
        parts = list(_rows(path, file, shape, dtype, max(shape[0], 1)))
        return parts[0] if parts else np.empty(shape, dtype)


def _rows(
    path: Path, file: IO[bytes], shape: tuple[int, ...], dtype: np.dtype, count: int
) -> Iterator[np.ndarray]:
    """Read ``count`` rows at a time."""
    size = prod(shape[1:]) * dtype.itemsize
    for start in range(0, shape[0], count):
        rows = min(count, shape[0] - start)
        content = file.read(rows * size)
        if len(content) != rows * size:
            raise DataError(f"{path} ends before its array does; save or copy it again.")
        yield np.frombuffer(content, dtype).reshape(rows, *shape[1:])


def _check_sides(
    path: Path,
    names: np.ndarray | None,
    lengths: np.ndarray | None,
    count: int,
    longest: int,
) -> None:
    for what, array in (("y", names), ("lengths", lengths)):
        if array is not None and len(array) != count:
            raise DataError(
                f"{path}: {what} needs one entry for each of {count} cases, got {len(array)}; "
                f"{SAVE} of the same cases."
            )
    if names is not None and np.isin(names, ("", "nan")).any():
        case = int(np.argmax(np.isin(names, ("", "nan"))))
        raise DataError(f"{path}, case {case} has no label; fill it in, or save X alone.")
    if lengths is None:
        return
    if lengths.dtype.kind not in "iu":
        raise DataError(f"{path}: lengths must be integers, got {lengths.dtype}; convert them.")
    wrong = np.flatnonzero((lengths < 1) | (lengths > longest))
    if len(wrong):
        raise DataError(
            f"{path}, case {wrong[0]}: a length of 1 to {longest} is required, got "
            f"{lengths[wrong[0]]}; correct lengths, or drop the case."
        )
