"""Long-format tables, CSV and Parquet: one row for a case and a time, one column for a channel."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from primal.data.lines import read_lines
from primal.data.series import SeriesSet, as_names
from primal.errors import DataError

if TYPE_CHECKING:
    import pandas as pd

MISSING = ["", "?", "NA", "N/A", "n/a", "NaN", "nan", "null", "NULL", "None"]
CELLS = 2**17  # read at a time


@dataclass(frozen=True, kw_only=True)
class Columns:
    """What the columns of a table are; all others are channels."""

    case: str = "case"
    time: str = "time"
    """Numbers or dates. Optional in the file: without it the rows of a case are one step apart."""
    label: str = "label"
    """Optional in a file to predict."""


class ScatteredError(DataError):
    """The rows of a case do not follow each other, but have times to sort them by."""


def read_table(
    path: Path, columns: Columns, cases: int, *, gather: bool = False
) -> Iterator[SeriesSet]:
    """Read at most ``cases`` cases at a time; the rows of each are sorted by time.

    They follow each other too, unless ``gather``, which takes the whole table into memory.
    """
    _require_pandas(path)
    import pandas as pd

    table = _Table(path, columns)
    frames = _parquet_frames(table) if path.suffix.lower() == ".parquet" else _csv_frames(table)
    if gather:
        frames = _gathered(table, frames)
    held: list[pd.DataFrame] = []  # of a case that may go on in the next frame
    last = None
    for frame in frames:
        names = _text(frame[columns.case])
        frame[columns.case] = names
        starts = np.flatnonzero(names != np.r_[[last], names[:-1]])
        last = names[-1]
        if len(starts):
            yield from table.sets(pd.concat([*held, frame.iloc[: starts[-1]]]), cases)
            held, frame = [], frame.iloc[starts[-1] :]  # noqa: PLW2901
        held.append(frame)
    if held:
        yield from table.sets(pd.concat(held), cases)


def _require_pandas(path: Path) -> None:
    try:
        import pandas  # noqa: F401
    except ImportError:
        raise DataError(
            f"{path}: tables are read by pandas, which is not installed: "
            "pip install 'primal-attention[timeseries]'."
        ) from None


# --- frames: some rows, indexed by the line or row where an editor shows them ---------------------


def _csv_frames(table: _Table) -> Iterator[pd.DataFrame]:
    import pandas as pd

    path, lines = table.path, enumerate(read_lines(table.path), 1)
    row, header = next(lines, (1, ""))
    names = [name.strip() for name in _cells(path, row, header)]
    table.set_names(names)
    text = {table.columns.case: str, table.columns.label: str}
    while chunk := list(islice(lines, max(1, CELLS // len(names)))):
        # Lines of nothing but commas, as spreadsheets leave them, are no rows.
        filled = [(row, line) for row, line in chunk if line.strip(" ,\t\r\n")]
        for row, line in filled:
            if line.count(",") != len(names) - 1 or '"' in line or "\r" in line.rstrip("\r\n"):
                _check_width(path, row, line, len(names))
        if not filled:
            continue
        frame = pd.read_csv(
            io.StringIO("".join(line for _, line in filled)),
            header=None,
            names=names,
            index_col=False,
            dtype={name: kind for name, kind in text.items() if name in names},
            keep_default_na=False,
            na_values=dict.fromkeys(table.channels, MISSING),
            skipinitialspace=True,
            low_memory=False,
        )
        frame.index = pd.Index([row for row, _ in filled])
        yield frame


def _check_width(path: Path, row: int, line: str, width: int) -> None:
    given = len(_cells(path, row, line))
    if given != width:
        raise DataError(
            f"{path}, row {row}: {width} cells are required, as in row 1, got {given}; leave a "
            "cell empty between its commas if it is missing."
        )


def _cells(path: Path, row: int, line: str) -> list[str]:
    if line.count('"') % 2:
        raise DataError(f"{path}, row {row}: a quotation mark is not closed; close or remove it.")
    try:
        return next(csv.reader([line], skipinitialspace=True), [])
    except csv.Error as error:
        raise DataError(f"{path}, row {row} is no CSV ({error}); export the table again.") from None


def _parquet_frames(table: _Table) -> Iterator[pd.DataFrame]:
    import pandas as pd

    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(
            f"{table.path}: Parquet is read by pyarrow, which is not installed: "
            "pip install 'primal-attention[timeseries]'."
        ) from None
    try:
        # Otherwise arrow reads whole row groups ahead, each easily a million rows.
        reading = {"pre_buffer": False, "buffer_size": 2**20}
        with pyarrow.parquet.ParquetFile(table.path, **reading) as file:
            # What pandas kept as an index is no channel.
            names = [n for n in file.schema_arrow.names if not n.startswith("__index_level_")]
            table.set_names(names)
            row = 1
            for batch in file.iter_batches(max(1, CELLS // len(names)), columns=names):
                frame = pyarrow.Table.from_batches([batch]).to_pandas(ignore_metadata=True)
                frame.index = pd.RangeIndex(row, row + len(frame))
                row += len(frame)
                yield frame
    except DataError:
        raise
    # A ValueError is one of what pandas wrote beside the table: broken JSON, or no UTF-8.
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        message = " ".join(str(error).split())
        raise DataError(
            f"{table.path} is no readable Parquet ({message}); save it again."
        ) from None


def _gathered(table: _Table, frames: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
    """Put each case's rows together, in the order of the file."""
    import pandas as pd

    frame = pd.concat(list(frames))
    codes, _ = pd.factorize(_text(frame[table.columns.case]))
    yield frame.iloc[np.argsort(codes, kind="stable")]


# --- from frames to cases -------------------------------------------------------------------------


class _Table:
    """A file's columns, and what is known of it so far."""

    def __init__(self, path: Path, columns: Columns) -> None:
        self.path, self.columns = path, columns
        self.channels: list[str] = []
        self.timed = self.labelled = False
        self.seen: set[str] = set()
        self.dated: bool | None = None

    def set_names(self, names: Sequence[str]) -> None:
        given = ", ".join(map(repr, names))
        case, time, label = self.columns.case, self.columns.time, self.columns.label
        other = next((mark for mark in ";\t|" if len(names) == 1 and mark in names[0]), None)
        if other is not None:
            raise DataError(
                f"{self.path}, row 1: commas are required between columns, got {other!r}; export "
                "the table again with commas, and points in its numbers."
            )
        if case not in names:
            raise DataError(
                f"{self.path}, row 1: a column {case!r} that says which case a row belongs to is "
                f"required, got {given or 'nothing'}; name yours with --data.columns.case."
            )
        for place, name in enumerate(names, 1):
            if not name:
                raise DataError(
                    f"{self.path}, row 1: column {place} needs a name, got none; name it, or drop "
                    "it (pandas writes no row numbers with index=False)."
                )
            if name in names[: place - 1]:
                raise DataError(
                    f"{self.path}, row 1: each column needs its own name, got {name!r} twice; "
                    "rename or drop one."
                )
        self.timed, self.labelled = time in names, label in names
        self.channels = [name for name in names if name not in (case, time, label)]
        if not self.channels:
            raise DataError(
                f"{self.path}, row 1: at least one column of values is required, got {given}; add "
                "one for each channel."
            )

    def sets(self, frame: pd.DataFrame, cases: int) -> Iterator[SeriesSet]:
        """Cut whole cases out of a frame and check them."""
        if frame.empty:
            return
        names = frame[self.columns.case].to_numpy()
        starts = np.flatnonzero(names != np.r_[[None], names[:-1]])
        rows = frame.index.to_numpy()[starts].tolist()
        self._check_cases(rows, names[starts])
        values = np.stack([self._numbers(frame[name]) for name in self.channels], axis=1)
        times, labels = self._times(frame, starts), self._labels(frame, starts)
        ends = [*starts[1:], len(frame)]
        for first in range(0, len(starts), cases):
            part = slice(first, first + cases)
            pieces = [slice(*piece) for piece in zip(starts[part], ends[part], strict=True)]
            yield SeriesSet(
                tuple(values[piece] for piece in pieces),
                None if labels is None else labels[part],
                tuple(names[starts[part]]),
                None if times is None else tuple(times[piece] for piece in pieces),
                channel_names=tuple(self.channels),
                source=str(self.path),
                rows=tuple(rows[part]),
            )

    def _check_cases(self, rows: list[int], names: np.ndarray) -> None:
        for row, name in zip(rows, names, strict=True):
            if not name:
                raise DataError(
                    f"{self.path}, row {row}: a case is required, got an empty cell; fill in "
                    f"{self.columns.case!r}."
                )
            if name in self.seen:
                case, time = self.columns.case, self.columns.time
                # Without times these may as well be two cases of one name.
                kind, then = (ScatteredError, f", then {time!r}") if self.timed else (DataError, "")
                raise kind(
                    f"{self.path}, row {row}: the rows of a case must follow each other, got more "
                    f"of case {name}; sort by {case!r}{then}, or give each case its own name."
                )
            self.seen.add(name)

    def _numbers(self, column: pd.Series, *, optional: bool = True) -> np.ndarray:
        """Convert a column to numbers, its missing cells to NaN; the first wrong cell is named."""
        import pandas as pd

        if pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_bool_dtype(column):
            found = column.to_numpy(dtype=np.float64, na_value=np.nan)
            absent = np.isnan(found)
        else:
            text = column.astype(str).str.strip()
            absent = (text.isin(MISSING) | column.isna()).to_numpy()
            found = pd.to_numeric(text, errors="coerce").to_numpy(dtype=np.float64)
        wrong = ~np.isfinite(found) & ~(absent & optional)
        if wrong.any():
            remedy = ", or leave it empty if it is missing" if optional else ""
            if column.name in self.channels:
                remedy += f"; if {column.name!r} is no channel, drop it"
                if not self.labelled:
                    remedy += ", or if it is the label, name it with --data.columns.label"
            raise self._wrong_cell(column, wrong, "a finite number", f"correct it{remedy}")
        return found

    def _wrong_cell(
        self, column: pd.Series, wrong: np.ndarray, required: str, remedy: str
    ) -> DataError:
        place = int(np.argmax(wrong))
        return DataError(
            f"{self.path}, row {column.index[place]}, column {column.name!r}: {required} is "
            f"required, got {str(column.iloc[place])!r}; {remedy}."
        )

    def _times(self, frame: pd.DataFrame, starts: np.ndarray) -> np.ndarray | None:
        if not self.timed:
            return None
        column = frame[self.columns.time]
        if self.dated is None:
            self.dated = _is_date(column.iloc[0])  # the first cell says what all are
        if self.dated:
            times = self._seconds(column, starts)
        else:
            times = self._numbers(column, optional=False)
        gaps = np.diff(times, prepend=-np.inf)
        gaps[starts] = np.inf
        if (gaps <= 0).any():
            place = int(np.argmax(gaps <= 0))
            twice = gaps[place] == 0
            given = "twice" if twice else f"after {column.iloc[place - 1]}"
            raise DataError(
                f"{self.path}, row {frame.index[place]}: the times of a case must increase, got "
                f"{column.iloc[place]} {given} in case {frame[self.columns.case].iloc[place]}; "
                + ("keep one of the two rows." if twice else "sort each case by time.")
            )
        return times

    def _seconds(self, column: pd.Series, starts: np.ndarray) -> np.ndarray:
        """Return the seconds since each case began: a date's own would be rounded."""
        import pandas as pd

        dates = pd.to_datetime(column, errors="coerce", format="ISO8601", utc=True)
        wrong = dates.isna().to_numpy()
        if wrong.any():
            raise self._wrong_cell(
                column, wrong, "a date", "write it as 2026-01-31 or 2026-01-31 23:59:59.5"
            )
        moments = dates.dt.tz_localize(None).to_numpy()
        begun = np.repeat(moments[starts], np.diff([*starts, len(moments)]))
        return (moments - begun) / np.timedelta64(1, "s")

    def _labels(self, frame: pd.DataFrame, starts: np.ndarray) -> np.ndarray | None:
        if not self.labelled:
            return None
        labels = _text(frame[self.columns.label])
        of_case = np.repeat(labels[starts], np.diff([*starts, len(frame)]))
        wrong = labels != of_case
        if wrong.any():
            place = int(np.argmax(wrong))
            raise DataError(
                f"{self.path}, row {frame.index[place]}: a case has one label, got "
                f"{of_case[place]!r} and {labels[place]!r} in case "
                f"{frame[self.columns.case].iloc[place]}; write the same in each of its rows."
            )
        absent = np.isin(labels[starts], ["", "?"])
        if absent.any():
            place = starts[np.argmax(absent)]
            raise DataError(
                f"{self.path}, row {frame.index[place]}: case "
                f"{frame[self.columns.case].iloc[place]} has no label; fill in "
                f"{self.columns.label!r}, or drop the column from a file to predict."
            )
        return labels[starts].astype(str)


def _text(column: pd.Series) -> np.ndarray:  # of str, "" where there is nothing
    import pandas as pd

    codes, found = pd.factorize(column)  # converts each name once
    names = [name.strip() for name in as_names(np.asarray(found)).tolist()]
    return np.array([*names, ""], dtype=object)[codes]


def _is_date(cell: Any) -> bool:
    import pandas as pd

    try:
        float(cell)
    except (TypeError, ValueError):
        return bool(pd.notna(pd.to_datetime(str(cell), errors="coerce", format="ISO8601")))
    return False
