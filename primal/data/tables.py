"""Long-format tables, CSV and Parquet: one row for a case and a time, one column for a channel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from primal.data.series import SeriesSet
from primal.errors import DataError

if TYPE_CHECKING:
    import pandas as pd

MISSING = ("", "?", "NA", "N/A", "NaN", "nan", "null", "None")
ROWS = 2**17  # read at a time


@dataclass(frozen=True, kw_only=True)
class Columns:
    """What the columns of a table are; all others are channels."""

    case: str = "case"
    time: str = "time"
    """Numbers or dates. Optional in the file: without it the rows of a case are one step apart."""
    label: str = "label"
    """Optional in a file to predict."""


def read_table(path: Path, columns: Columns, cases: int) -> Iterator[SeriesSet]:
    """Read ``cases`` cases at a time; the rows of a case stand together, in order of time."""
    seen: set[str] = set()
    rest = None
    for frame in _frames(path):
        channels = _channels(path, list(frame.columns), columns)
        frame = frame if rest is None else _stack(rest, frame)
        starts = _starts(frame[columns.case])
        last = starts[-1]  # this case may go on in the next part of the file
        yield from _cases(path, frame.iloc[:last], columns, channels, seen, cases)
        rest = frame.iloc[last:]
    if rest is not None and len(rest):
        yield from _cases(path, rest, columns, channels, seen, cases)


def _frames(path: Path) -> Iterator[pd.DataFrame]:
    """Read some rows at a time, indexed by what an editor shows as their line or row."""
    try:
        import pandas as pd
    except ImportError:
        raise DataError(
            f"{path}: tables are read by pandas, which is not installed: "
            "pip install 'primal-attention[timeseries]'."
        ) from None
    if path.suffix == ".parquet":
        yield from _parquet_frames(path)
        return
    try:
        parts = pd.read_csv(
            path, dtype=str, keep_default_na=False, skipinitialspace=True, chunksize=ROWS
        )
        for part in parts:
            part.index = part.index + 2  # counted from 1, after the line of names
            yield part
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is no table that can be read: {error}.") from None


def _parquet_frames(path: Path) -> Iterator[pd.DataFrame]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(
            f"{path}: Parquet is read by pyarrow, which is not installed: pip install pyarrow."
        ) from None
    try:
        row = 1
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(ROWS):
            frame = batch.to_pandas()
            frame.index = range(row, row + len(frame))
            row += len(frame)
            yield frame
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{path} is no Parquet file that can be read: {error}.") from None


def _stack(first: pd.DataFrame, second: pd.DataFrame) -> pd.DataFrame:
    import pandas as pd

    return pd.concat([first, second])


def _channels(path: Path, names: list[str], columns: Columns) -> list[str]:
    if columns.case not in names:
        raise DataError(
            f"{path} needs a column {columns.case!r} that says which case a row belongs to, got "
            f"{', '.join(names)}; name it with --data.columns.case."
        )
    channels = [n for n in names if n not in (columns.case, columns.time, columns.label)]
    if not channels:
        raise DataError(f"{path} needs at least one column of values, got {', '.join(names)}.")
    return channels


def _starts(names: pd.Series) -> np.ndarray:
    values = names.to_numpy()
    return np.flatnonzero(np.r_[True, values[1:] != values[:-1]])


def _cases(
    path: Path,
    frame: pd.DataFrame,
    columns: Columns,
    channels: list[str],
    seen: set[str],
    cases: int,
) -> Iterator[SeriesSet]:
    """Cut whole cases out of a table and check them."""
    if frame.empty:
        return
    starts = _starts(frame[columns.case])
    rows, names = frame.index.to_numpy(), frame[columns.case].astype(str).to_numpy()[starts]
    for start, name in zip(starts, names, strict=True):
        if name in MISSING:
            raise DataError(f"{path}, row {rows[start]}: no case; fill in {columns.case!r}.")
        if name in seen:
            raise DataError(
                f"{path}, row {rows[start]}: case {name} begins again; sort the rows by "
                f"{columns.case!r}, then by {columns.time!r}."
            )
        seen.add(name)
    values = np.stack([_numbers(path, frame[c], missing=True) for c in channels], axis=1)
    times = _times(path, frame, columns, starts)
    labels = _labels(path, frame, columns, starts)
    ends = np.r_[starts[1:], len(frame)]
    pieces = [slice(a, b) for a, b in zip(starts, ends, strict=True)]
    for first in range(0, len(pieces), cases):
        chosen = pieces[first : first + cases]
        yield SeriesSet(
            tuple(values[piece].astype(np.float32) for piece in chosen),
            None if labels is None else labels[first : first + cases],
            tuple(names[first : first + cases].tolist()),
            None if times is None else tuple(times[piece] for piece in chosen),
        )


def _numbers(path: Path, column: pd.Series, *, missing: bool) -> np.ndarray:
    """Convert a column; the first cell that is no number is named."""
    import pandas as pd

    if pd.api.types.is_numeric_dtype(column):
        found = column.to_numpy(dtype=np.float64, na_value=np.nan)
        absent = np.isnan(found)
    else:
        text = column.astype(str).str.strip()
        absent = text.isin(MISSING).to_numpy() | column.isna().to_numpy()
        found = pd.to_numeric(text, errors="coerce").to_numpy(dtype=np.float64, copy=True)
    wrong = np.isnan(found) & ~absent
    if not missing:
        wrong |= absent
    if wrong.any():
        place = int(np.flatnonzero(wrong)[0])
        raise DataError(
            f"{path}, row {column.index[place]}, column {column.name!r}: a number is required, got "
            f"{column.iloc[place]!r}; correct it"
            + (", or leave it empty if it is missing." if missing else ".")
        )
    return found


def _times(
    path: Path, frame: pd.DataFrame, columns: Columns, starts: np.ndarray
) -> np.ndarray | None:
    import pandas as pd

    if columns.time not in frame:
        return None
    column: Any = frame[columns.time]
    if not pd.api.types.is_numeric_dtype(column):
        dates = pd.to_datetime(column, errors="coerce", format="ISO8601", utc=True)
        numeric = pd.to_numeric(column, errors="coerce")
        if numeric.isna().any() and dates.notna().all():
            column = (dates - pd.Timestamp(0, tz="UTC")) / pd.Timedelta(seconds=1)
            column.name = columns.time
    times = _numbers(path, column, missing=False)
    gaps = np.diff(times, prepend=-np.inf)
    gaps[starts] = np.inf
    if (gaps <= 0).any():
        place = int(np.flatnonzero(gaps <= 0)[0])
        fault = "twice" if gaps[place] == 0 else "out of order"
        raise DataError(
            f"{path}, row {frame.index[place]}: time {times[place]:g} of case "
            f"{frame[columns.case].iloc[place]} is there {fault}; "
            + ("keep one of the two rows." if gaps[place] == 0 else "sort each case by time.")
        )
    return times


def _labels(
    path: Path, frame: pd.DataFrame, columns: Columns, starts: np.ndarray
) -> np.ndarray | None:
    if columns.label not in frame:
        return None
    labels = frame[columns.label].astype(str).str.strip().to_numpy()
    of_case = np.repeat(labels[starts], np.diff(np.r_[starts, len(frame)]))
    if (labels != of_case).any():
        place = int(np.flatnonzero(labels != of_case)[0])
        raise DataError(
            f"{path}, row {frame.index[place]}: case {frame[columns.case].iloc[place]} has the "
            f"labels {of_case[place]!r} and {labels[place]!r}; a case has one."
        )
    if np.isin(labels[starts], MISSING).any():
        place = starts[int(np.flatnonzero(np.isin(labels[starts], MISSING))[0])]
        raise DataError(
            f"{path}, row {frame.index[place]}: case {frame[columns.case].iloc[place]} has no "
            f"label; fill in {columns.label!r}, or drop the column from a file to predict."
        )
    return labels[starts]
