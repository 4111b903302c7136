"""UEA .ts files, through aeon's reader: one line a case, "channel:channel:...:label"."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from primal.data.lines import read_lines
from primal.data.series import SeriesSet
from primal.errors import DataError

Load = Callable[[str], tuple[list[np.ndarray], np.ndarray]]


def read_ts(path: Path, cases: int) -> Iterator[SeriesSet]:
    """Read ``cases`` cases at a time."""
    load = _aeon_reader()
    lines = enumerate(read_lines(path), 1)
    labelled = _read_header(path, (line for _, line in lines))
    data = ((row, line.strip()) for row, line in lines if line.strip())
    channels, count = None, 0
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder, "part.ts")
        while chunk := list(islice(data, cases)):
            rows, texts = zip(*chunk, strict=True)
            labels = None
            if labelled:
                pairs = [_cut_label(path, row, text) for row, text in chunk]
                texts, labels = zip(*pairs, strict=True)
            channels = channels or _channels(texts[0])
            for row, text in zip(rows, texts, strict=True):
                if _channels(text) != channels:
                    raise DataError(
                        f"{path}, row {row}: {channels} channels are required, as in the case "
                        f"before it, got {_channels(text)}; every case needs the same channels."
                    )
            yield SeriesSet(
                _parse(path, part, load, rows, texts),
                None if labels is None else np.array(labels),
                tuple(str(count + i) for i in range(len(rows))),
                source=str(path),
                rows=rows,
            )
            count += len(rows)


def _aeon_reader() -> Load:
    try:
        from aeon.datasets import load_from_ts_file
    except ImportError:
        raise DataError(
            ".ts files are read by aeon, which is not installed: "
            "pip install 'primal-attention[timeseries]'."
        ) from None
    return load_from_ts_file


def _read_header(path: Path, lines: Iterator[str]) -> bool:
    """Read up to @data, and return whether a label ends each line."""
    flags = {"@classlabel": True, "@targetlabel": False, "@timestamps": False}
    for line in lines:
        tag, *rest = line.lower().split() or [""]
        if tag == "@data":
            break
        if tag in flags:
            flags[tag] = rest[:1] == ["true"]
    else:
        raise DataError(f"{path} needs a line @data before its cases, got none; give a .ts file.")
    if flags["@timestamps"]:
        # aeon drops the sign of negative numbers and every integer of such files.
        raise DataError(
            f"{path} has @timeStamps true, which is not supported; give a CSV file with the "
            "columns case, time, label and one for each channel."
        )
    return flags["@classlabel"] or flags["@targetlabel"]


def _cut_label(path: Path, row: int, line: str) -> tuple[str, str]:
    """Cut the label off by hand: aeon's reader changes its letters."""
    values, colon, label = line.rpartition(":")
    label = label.strip()
    if not colon or "," in label:
        raise DataError(
            f"{path}, row {row}: the line must end in a colon and the label; add them, or write "
            "@classLabel false above if there are no labels."
        )
    if label in ("", "?"):
        raise DataError(
            f"{path}, row {row}: the case has no label; fill it in, or write @classLabel false "
            "above and leave out all labels of a file to predict."
        )
    return values, label


def _channels(values: str) -> int:
    return values.count(":") + 1


def _parse(
    path: Path, part: Path, load: Load, rows: tuple[int, ...], texts: tuple[str, ...]
) -> tuple[np.ndarray, ...]:
    header = "@equalLength false\n@univariate false\n@classLabel false\n@data\n"
    part.write_text(header + "".join(f"{text}\n" for text in texts), encoding="utf-8")
    try:
        series, _ = load(str(part))
    except Exception as error:  # aeon raises OSError, ValueError, IndexError, ...
        for row, text in zip(rows, texts, strict=True):
            _explain(f"{path}, row {row}", text)
        message = " ".join(str(error).split())
        raise DataError(
            f"{path}, rows {rows[0]} to {rows[-1]}: aeon cannot read them ({message}); correct "
            "them."
        ) from None
    return tuple(np.ascontiguousarray(one.T) for one in series)


def _explain(where: str, text: str) -> None:
    """Raise an error with what is wrong with a case, if it is this one."""
    length = None
    for number, channel in enumerate(text.split(":"), 1):
        if not channel.strip():
            raise DataError(f"{where}: channel {number} is empty; give it values, or drop the case.")
        cells = [cell.strip() for cell in channel.split(",")]
        for place, cell in enumerate(cells, 1):
            try:
                float(cell.replace("?", "nan"))
            except ValueError:
                raise DataError(
                    f"{where}, channel {number}, step {place}: a number is required, got {cell!r}; "
                    "correct it, or write ? if it is missing."
                ) from None
        length = length or len(cells)
        if len(cells) != length:
            raise DataError(
                f"{where}: channel {number} needs {length} values, as channel 1 has, got "
                f"{len(cells)}; write ? for a missing one."
            )
