"""UEA .ts files: one line a case, "channel:channel:...:label", a channel's steps joined by commas.

Parsed here, to the numbers that aeon's reader gives: that one holds the whole file in memory, and
writes class names in small letters.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from primal.data.lines import read_lines
from primal.data.series import SeriesSet
from primal.errors import DataError

CHARACTERS = 2**20  # parsed at a time: a few long cases, or many short ones


class _Line(NamedTuple):
    row: int
    text: str


def read_ts(path: Path, cases: int) -> Iterator[SeriesSet]:
    """Read at most ``cases`` cases at a time."""
    lines = enumerate(read_lines(path), 1)
    labelled = _read_header(path, (line for _, line in lines))
    filled = (_Line(row, line.strip()) for row, line in lines if line.strip())
    channels, count = 0, 0
    for chunk in _chunks(filled, cases):
        values, labels = [], []
        for line in chunk:
            where = f"{path}, row {line.row}"
            text = line.text
            if labelled:
                text, label = _cut_label(where, text)
                labels.append(label)
            case = _parse(where, text)
            channels = channels or case.shape[1]
            if case.shape[1] != channels:
                raise DataError(
                    f"{where}: {channels} channels are required, as in the case before it, got "
                    f"{case.shape[1]}; every case needs the same channels."
                )
            values.append(case)
        yield SeriesSet(
            tuple(values),
            np.array(labels) if labelled else None,
            tuple(str(count + i) for i in range(len(values))),
            source=str(path),
            rows=tuple(line.row for line in chunk),
        )
        count += len(values)


def _chunks(lines: Iterator[_Line], cases: int) -> Iterator[list[_Line]]:
    chunk: list[_Line] = []
    characters = 0
    for line in lines:
        chunk.append(line)
        characters += len(line.text)
        if len(chunk) == cases or characters > CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def _read_header(path: Path, lines: Iterator[str]) -> bool:
    """Read up to @data, and return whether a label ends each line."""
    # aeon's reader, too, expects labels where the header is silent.
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
        raise DataError(
            f"{path} has @timeStamps true, which is not supported; give a CSV file with the "
            "columns case, time, label and one for each channel."
        )
    return flags["@classlabel"] or flags["@targetlabel"]


def _cut_label(where: str, line: str) -> tuple[str, str]:
    values, colon, label = line.rpartition(":")
    label = label.strip()
    if not colon or "," in label:
        raise DataError(
            f"{where}: the line must end in a colon and the label; add them, or write "
            "@classLabel false above if there are no labels."
        )
    if label in ("", "?"):
        raise DataError(
            f"{where}: the case has no label; fill it in, or write @classLabel false above and "
            "leave out all labels of a file to predict."
        )
    return values, label


def _parse(where: str, text: str) -> np.ndarray:  # (time, channels)
    channels = text.replace("?", "nan").split(":")
    try:
        steps = np.array([[float(cell) for cell in channel.split(",")] for channel in channels])
    except ValueError:  # not a number, or channels of different lengths
        raise _explained(where, text) from None
    return np.ascontiguousarray(steps.T)


def _explained(where: str, text: str) -> DataError:
    """Return what is wrong with a case that is no table of numbers."""
    length = None
    for number, channel in enumerate(text.split(":"), 1):
        if not channel.strip():
            return DataError(
                f"{where}: channel {number} is empty; give it values, or drop the case."
            )
        cells = channel.split(",")
        for place, cell in enumerate(cells, 1):
            try:
                float(cell.replace("?", "nan"))
            except ValueError:
                return DataError(
                    f"{where}, channel {number}, step {place}: a number is required, got {cell!r}; "
                    "correct it, or write ? if it is missing."
                )
        length = length or len(cells)
        if len(cells) != length:
            return DataError(
                f"{where}: channel {number} needs {length} values, as channel 1 has, got "
                f"{len(cells)}; write ? for a missing one."
            )
    raise AssertionError("a case of numbers in channels of one length is a table")
