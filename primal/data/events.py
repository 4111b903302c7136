"""Sequences of events, each a kind and a time: Stack Overflow's badges, and the phase task.

The task is always the next event's kind, given its time and the events before it.
"""

from __future__ import annotations

import lzma
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from primal.errors import DataError

STACKOVERFLOW_KINDS = 22
WHERE = "https://github.com/dunan/NeuralPointProcess (data/real/so)"
DAY = 86400.0


@dataclass(frozen=True)
class EventSet:
    """Sequences in memory. Times are float64 and never fall."""

    kinds: tuple[np.ndarray, ...]  # (events,) int64 each, 0 ... count - 1
    times: tuple[np.ndarray, ...]  # (events,) float64 each
    names: tuple[str, ...]
    count: int  # of kinds there are

    def __post_init__(self) -> None:
        if not len(self.kinds) == len(self.times) == len(self.names):
            raise DataError(
                "each sequence needs its kinds, its times and its name, got "
                f"{len(self.kinds)}, {len(self.times)} and {len(self.names)} of them."
            )
        for name, kinds, times in zip(self.names, self.kinds, self.times, strict=True):
            _check(name, kinds, times, self.count)

    def __len__(self) -> int:
        return len(self.kinds)

    def __add__(self, other: EventSet) -> EventSet:
        return EventSet(
            self.kinds + other.kinds, self.times + other.times, self.names + other.names, self.count
        )

    def subset(self, sequences: Iterable[int]) -> EventSet:
        chosen = list(sequences)
        return EventSet(
            tuple(self.kinds[i] for i in chosen),
            tuple(self.times[i] for i in chosen),
            tuple(self.names[i] for i in chosen),
            self.count,
        )


class EventSplits(NamedTuple):
    """One data set, divided by sequence."""

    train: EventSet
    test: EventSet


class Windows(NamedTuple):
    """Pieces of sequences, padded at the end: token n is an event, its target the one after it."""

    kinds: Tensor  # (W, N) int64
    times: Tensor  # (W, N) float64
    asked: Tensor  # (W, N) float64, when the target happens
    targets: Tensor  # (W, N) int64
    lengths: Tensor  # (W,) int64
    counted: Tensor  # (W, N) bool: every target of a sequence is counted in one window
    sequence: Tensor  # (W,) int64, which sequence it was cut from
    start: Tensor  # (W,) int64, and where


def split(data: EventSet, fraction: float, seed: int) -> tuple[EventSet, EventSet]:
    """Divide the sequences into what to train on and what to validate on."""
    order = np.random.default_rng(seed).permutation(len(data))
    held_out = round(fraction * len(data))
    return data.subset(sorted(order[held_out:])), data.subset(sorted(order[:held_out]))


def windows(data: EventSet, longest: int, stride: int | None = None) -> Windows:
    """Cut sequences into windows of at most ``longest`` events, starting ``stride`` apart.

    The first window of a sequence counts all its targets, a later one those that no earlier one
    held: with a stride of half the length they have seen at least half a window of events.
    """
    stride = max(1, longest // 2) if stride is None else stride
    cuts = []  # (sequence, start, end, first counted)
    for i, kinds in enumerate(data.kinds):
        inputs, start, counted = len(kinds) - 1, 0, 0
        while counted < inputs:
            end = min(start + longest, inputs)
            cuts.append((i, start, end, counted))
            start, counted = start + stride, end
    if not cuts:
        raise DataError("the next event needs a sequence of two events or more; there is none.")
    size = max(end - start for _, start, end, _ in cuts)
    kinds, targets = torch.zeros(2, len(cuts), size, dtype=torch.int64)
    times, asked = torch.zeros(2, len(cuts), size, dtype=torch.float64)
    is_counted = torch.zeros(len(cuts), size, dtype=torch.bool)
    for row, (i, start, end, first) in enumerate(cuts):
        here, after = slice(start, end), slice(start + 1, end + 1)
        kinds[row, : end - start] = torch.from_numpy(data.kinds[i][here])
        targets[row, : end - start] = torch.from_numpy(data.kinds[i][after])
        times[row, : end - start] = torch.from_numpy(data.times[i][here])
        asked[row, : end - start] = torch.from_numpy(data.times[i][after])
        is_counted[row, first - start : end - start] = True
    table = torch.tensor(cuts)
    lengths = table[:, 2] - table[:, 1]
    return Windows(kinds, times, asked, targets, lengths, is_counted, table[:, 0], table[:, 1])


# --- the phase task ------------------------------------------------------------------------------


def phase(
    sequences: int,
    events: int,
    seed: int,
    *,
    period: float = 7.0,
    gap: float = 2.0,
    kinds: int = 2,
) -> EventSet:
    """Draw events whose kind is the part of a hidden clock's period in which they happen.

    Gaps are exponential with mean ``gap``, the clock's start is unknown, and times count from each
    sequence's first event: only the kinds of other events, and the time since, tell the phase.
    """
    random = np.random.default_rng(seed)
    started = random.uniform(0, period, (sequences, 1))
    times = np.cumsum(random.exponential(gap, (sequences, events)), axis=1)
    marks = ((started + times) % period * (kinds / period)).astype(np.int64)
    names = tuple(map(str, range(sequences)))
    return EventSet(tuple(marks), tuple(times - times[:, :1]), names, kinds)


def kernel_vote(data: EventSet, period: float) -> np.ndarray:  # (sequences,) of kinds
    """Predict each last event by the vote of those before it, with the period known.

    An event at lag τ moves by τ turns of the clock: its kind, taken as an angle, votes for the kind
    that lies there.
    """
    votes = []
    for kinds, times in zip(data.kinds, data.times, strict=True):
        angle = 2 * np.pi * ((kinds[:-1] + 0.5) / data.count + (times[-1] - times[:-1]) / period)
        towards = np.angle(np.exp(1j * angle).sum()) / (2 * np.pi) % 1
        votes.append(int(towards * data.count))
    return np.array(votes)


# --- rules to compare with -----------------------------------------------------------------------


def unigram(train: EventSet) -> np.ndarray:  # (count,)
    """Return how often each kind is a target, that is any event but a first; plus one each."""
    seen = np.bincount(np.concatenate([k[1:] for k in train.kinds]), minlength=train.count) + 1.0
    return np.asarray(seen / seen.sum())


def markov(train: EventSet) -> np.ndarray:  # (count, count)
    """Return how often each kind (column) follows another (row).

    Each row counts one event more, spread as ``unigram``: a kind that nothing followed is left with
    that, and no probability is zero.
    """
    follows = np.zeros((train.count, train.count))
    for kinds in train.kinds:
        np.add.at(follows, (kinds[:-1], kinds[1:]), 1)
    follows += unigram(train)
    return np.asarray(follows / follows.sum(axis=1, keepdims=True))


# --- Stack Overflow ------------------------------------------------------------------------------


def stackoverflow(root: str | Path | None = None) -> EventSplits:
    """Load the badges of Stack Overflow's users: 22 kinds, times in days.

    The published folds overlap: some users stand in the training and in the test file, and some
    twice in the training file. Training keeps each user once, and none that is tested.
    """
    folder = _folder(root)
    test = read_events(folder, "test", STACKOVERFLOW_KINDS)
    train = read_events(folder, "train", STACKOVERFLOW_KINDS)
    seen = {_key(test, i) for i in range(len(test))}
    kept = []
    for i in range(len(train)):
        key = _key(train, i)
        if key not in seen:
            seen.add(key)
            kept.append(i)
    return EventSplits(train.subset(kept), test)


def read_events(folder: Path, part: str, count: int) -> EventSet:
    """Read event-PART.txt and time-PART.txt (or .txt.xz): a sequence a line, kinds from 1."""
    event_file, time_file = _find(folder, f"event-{part}"), _find(folder, f"time-{part}")
    events, seconds = _lines(event_file), _lines(time_file)
    if len(events) != len(seconds):
        raise DataError(
            f"{event_file} has {len(events)} lines and {time_file} {len(seconds)}; a sequence is "
            "one line in each."
        )
    all_kinds, all_times = [], []
    for row, (one, other) in enumerate(zip(events, seconds, strict=True), start=1):
        kinds, times = _numbers(event_file, row, one), _numbers(time_file, row, other)
        if len(kinds) != len(times):
            raise DataError(
                f"line {row} has {len(kinds)} events in {event_file} and {len(times)} times in "
                f"{time_file}; give each event one time."
            )
        wrong = [k for k in kinds if not (k.is_integer() and 1 <= k <= count)]
        if wrong:
            raise DataError(
                f"{event_file}, line {row}: kinds must be 1 to {count}, got {wrong[0]:g}."
            )
        if (np.diff(times) < 0).any():
            at = int(np.argmax(np.diff(times) < 0)) + 2
            raise DataError(
                f"{time_file}, line {row}: time {at} is before the one in front of it; sort the "
                "events of a sequence by time."
            )
        all_kinds.append(kinds.astype(np.int64) - 1)
        all_times.append(times / DAY)
    names = tuple(f"{part}-{row}" for row in range(1, len(events) + 1))
    return EventSet(tuple(all_kinds), tuple(all_times), names, count)


def _check(name: str, kinds: np.ndarray, times: np.ndarray, count: int) -> None:
    if kinds.dtype != np.int64 or times.dtype != np.float64 or kinds.shape != times.shape:
        raise DataError(
            f"sequence {name} needs int64 kinds and as many float64 times, got {kinds.dtype} "
            f"{kinds.shape} and {times.dtype} {times.shape}; convert them with .astype."
        )
    if len(kinds) and not 0 <= kinds.min() <= kinds.max() < count:
        raise DataError(
            f"sequence {name} has kinds from {kinds.min()} to {kinds.max()}; number them from 0 to "
            f"{count - 1}, or raise count."
        )
    if not np.isfinite(times).all() or (np.diff(times) < 0).any():
        raise DataError(
            f"sequence {name} has times that fall or are no numbers; sort its events by time."
        )


def _numbers(file: Path, row: int, line: str) -> np.ndarray:
    try:
        numbers = np.array(line.split(), dtype=np.float64)
    except ValueError as error:
        raise DataError(f"{file}, line {row}: numbers are required ({error}).") from None
    if not len(numbers) or not np.isfinite(numbers).all():
        what = "a value that is no finite number" if len(numbers) else "no event"
        raise DataError(f"{file}, line {row}: it holds {what}; repair or drop the sequence.")
    return numbers


def _lines(file: Path) -> list[str]:
    try:
        if file.suffix == ".xz":
            with lzma.open(file, "rt") as opened:
                return opened.read().splitlines()
        return file.read_text().splitlines()
    except (OSError, EOFError, UnicodeDecodeError, lzma.LZMAError) as error:
        raise DataError(f"{file} cannot be read ({error}); get it anew from {WHERE}.") from None


def _find(folder: Path, stem: str) -> Path:
    for suffix in (".txt", ".txt.xz"):
        if (folder / (stem + suffix)).is_file():
            return folder / (stem + suffix)
    raise DataError(
        f"{stem}.txt is not in {folder}; get a fold of Stack Overflow's badges from {WHERE} and "
        "name its files event-train.txt, time-train.txt, event-test.txt and time-test.txt."
    )


def _folder(root: str | Path | None) -> Path:
    given = root or os.environ.get("PRIMAL_DATA")
    if not given:
        raise DataError(
            "the folder of Stack Overflow's badges is required; give the one that holds "
            f"events/stackoverflow as --data.root or PRIMAL_DATA. The files are at {WHERE}."
        )
    inner = Path(given).expanduser() / "events" / "stackoverflow"
    return inner if inner.is_dir() else Path(given).expanduser()


def _key(data: EventSet, sequence: int) -> bytes:
    return data.kinds[sequence].tobytes() + data.times[sequence].tobytes()
