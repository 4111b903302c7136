"""numpy files, .npy and .npz, read some cases at a time; nothing in them is ever unpickled.

A .npz holds X (cases, channels, time) and, each optional, y, names and lengths (cases,). NaN is a
missing value. Series of unequal length end in NaN, or lengths says where they end.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from math import prod
from pathlib import Path
from tokenize import TokenError
from typing import IO, NamedTuple

import numpy as np

from primal.data.series import SeriesSet, as_names
from primal.errors import DataError

SAVE = "save it with np.savez(path, X=X, y=y)"
NUMBERS = 2**22  # read at a time: a few long cases, or many short ones


class _Sides(NamedTuple):
    """What a .npz may say of each case, beside its series."""

    y: np.ndarray | None = None
    names: np.ndarray | None = None
    lengths: np.ndarray | None = None


def save(data: SeriesSet, path: str | Path) -> None:
    """Write a .npz from which the same values, labels, names and lengths are read.

    Channels are known by their order alone.
    """
    if data.times is not None:
        raise ValueError(
            "a .npz holds series of regular steps, got some with times; write CSV or Parquet."
        )
    dtype = np.result_type(np.float32, *{values.dtype for values in data.values})
    stacked = np.full((len(data), data.channels, data.max_length), np.nan, dtype)
    for case, values in enumerate(data.values):
        stacked[case, :, : len(values)] = values.T
    sides = {"names": np.array(data.names), "lengths": data.lengths}
    if data.targets is not None:
        numeric = data.targets.dtype.kind in "iuf"
        sides["y"] = data.targets if numeric else data.targets.astype(str)
    np.savez_compressed(path, X=stacked, **sides)  # type: ignore[arg-type]


def read_arrays(path: Path, cases: int) -> Iterator[SeriesSet]:
    """Read at most ``cases`` cases at a time; a .npy is X alone."""
    try:
        if path.suffix.lower() == ".npy":
            with path.open("rb") as file:
                yield from _sets(path, file, _Sides(), cases)
            return
        with zipfile.ZipFile(path) as archive:
            names = [name[:-4] for name in archive.namelist() if name.endswith(".npy")]
            if "X" not in names:
                raise DataError(
                    f"{path} needs an array X (cases, channels, time), got "
                    f"{', '.join(names) or 'none'}; {SAVE}."
                )
            sides = _Sides(
                *(
                    _read_whole(path, archive, name) if name in names else None
                    for name in _Sides._fields
                )
            )
            with archive.open("X.npy") as file:
                yield from _sets(path, file, sides, cases)
    # A RuntimeError is zipfile's word for an archive that is locked, or packed in a foreign way.
    except (EOFError, OSError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        what = str(error)[:100]  # zipfile's may quote half the file
        raise DataError(f"{path} cannot be read: {what}; save or copy it again.") from None


def _sets(path: Path, file: IO[bytes], sides: _Sides, cases: int) -> Iterator[SeriesSet]:
    shape, transposed, dtype = _header(path, "X", file)
    if len(shape) != 3 or dtype.kind not in "iuf":
        raise DataError(
            f"{path}: X must be numbers (cases, channels, time), got {dtype} {shape}; "
            "a univariate set needs X[:, None, :]."
        )
    count, channels, longest = shape
    if not count:
        return
    if not (channels and longest):
        raise DataError(f"{path}: X {shape} has empty cases; give each a channel and a time step.")
    _check_sides(path, sides, count, longest)
    labels = None if sides.y is None else _labels(path, sides.y)
    cases = max(1, min(cases, NUMBERS // (channels * longest)))
    chunks: Iterator[np.ndarray]
    if transposed:  # in Fortran's order the cases do not follow each other: all are read at once
        whole = next(_rows(path, file, shape[::-1], dtype, longest)).transpose()
        chunks = iter([whole[start : start + cases] for start in range(0, count, cases)])
    else:
        chunks = _rows(path, file, shape, dtype, cases)
    stop = 0
    for chunk in chunks:
        start, stop = stop, stop + len(chunk)
        if dtype not in (np.float32, np.float64):
            chunk = chunk.astype(np.float64)  # noqa: PLW2901
        ends = _ends(chunk) if sides.lengths is None else sides.lengths[start:stop]
        yield SeriesSet(
            tuple(one.T[:end] for one, end in zip(chunk, ends.tolist(), strict=True)),
            None if labels is None else labels[start:stop],
            tuple(map(str, range(start, stop)))
            if sides.names is None
            else tuple(as_names(sides.names[start:stop]).tolist()),
            source=str(path),
        )


def _ends(chunk: np.ndarray) -> np.ndarray:  # (cases, channels, time) -> (cases,)
    """Return where nothing but NaN follows; a case of nothing else is left whole."""
    known = ~np.isnan(chunk).all(axis=1)
    return chunk.shape[2] - known[:, ::-1].argmax(axis=1)


def _header(path: Path, name: str, file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Return shape, whether in Fortran's order, and type; refuse Python objects."""
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0
        shape, transposed, dtype = (
            read if version == (1, 0) else np.lib.format.read_array_header_2_0
        )(file)
        if min(shape, default=1) < 0:
            raise ValueError(f"its shape is {shape}")
    # numpy parses the header as a Python literal, with all that can be wrong with one.
    except (SyntaxError, TokenError, TypeError, ValueError) as error:
        what = " ".join(str(error).split())[:100]
        raise DataError(f"{path}: {name} is no numpy array ({what}); {SAVE}.") from None
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


def _labels(path: Path, y: np.ndarray) -> np.ndarray:
    labels = as_names(y)
    absent = np.isin(labels, ("", "nan"))
    if absent.any():
        case = int(np.argmax(absent))
        raise DataError(f"{path}, case {case} has no label; fill it in, or save X alone.")
    return labels


def _check_sides(path: Path, sides: _Sides, count: int, longest: int) -> None:
    for what, array in sides._asdict().items():
        if array is not None and len(array) != count:
            raise DataError(
                f"{path}: {what} needs one entry for each of {count} cases, got {len(array)}; "
                f"{SAVE} of the same cases."
            )
    lengths = sides.lengths
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
