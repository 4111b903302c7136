"""Labelled series of any length, sampled regularly or not: what the time-series models read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class SeriesSet:
    """Cases in memory. NaN is a missing value; without ``times`` the steps are 0, 1, 2, ..."""

    values: tuple[np.ndarray, ...]  # (time, channels) each
    targets: np.ndarray | None  # (cases,) of class names or of numbers; None if unknown
    names: tuple[str, ...]
    times: tuple[np.ndarray, ...] | None = None  # (time,) each, increasing, float64

    def __post_init__(self) -> None:
        others = [self.names, self.targets, self.times]
        lengths = {len(self.values), *(len(other) for other in others if other is not None)}
        if len(lengths) != 1:
            raise ValueError(
                f"a SeriesSet needs as many names, targets and times as cases: {lengths}."
            )

    def __len__(self) -> int:
        return len(self.values)

    @property
    def channels(self) -> int:
        return self.values[0].shape[1]

    @property
    def max_length(self) -> int:
        return max(len(values) for values in self.values)

    def subset(self, cases: Iterable[int]) -> SeriesSet:
        chosen = list(cases)
        return SeriesSet(
            tuple(self.values[i] for i in chosen),
            None if self.targets is None else self.targets[chosen],
            tuple(self.names[i] for i in chosen),
            None if self.times is None else tuple(self.times[i] for i in chosen),
        )


@dataclass(frozen=True)
class Splits:
    """One data set, divided. ``test`` is None for data that comes without one."""

    train: SeriesSet
    test: SeriesSet | None


def join(parts: Sequence[SeriesSet]) -> SeriesSet:
    """Put several sets into one."""
    first = parts[0]
    return SeriesSet(
        tuple(values for part in parts for values in part.values),
        None if first.targets is None else np.concatenate([part.targets for part in parts]),
        tuple(name for part in parts for name in part.names),
        None if first.times is None else tuple(t for part in parts for t in part.times or ()),
    )


def split(
    data: SeriesSet, fraction: float, seed: int, *, by_class: bool
) -> tuple[SeriesSet, SeriesSet]:
    """Divide into what to train on and what to validate on; ``by_class`` keeps the classes' shares.

    Every class keeps at least one case to train on.
    """
    generator = np.random.default_rng(seed)
    groups = [np.arange(len(data))]
    if by_class and data.targets is not None:
        groups = [np.flatnonzero(data.targets == name) for name in np.unique(data.targets)]
    held_out: list[int] = []
    # Rounded over the whole, not class by class: many small classes still give up their share.
    owed = 0.0
    for group in groups:
        owed += fraction * len(group)
        count = min(round(owed), len(group) - 1)
        owed -= count
        held_out += generator.permutation(group)[:count].tolist()
    chosen = set(held_out)
    return data.subset(i for i in range(len(data)) if i not in chosen), data.subset(
        sorted(held_out)
    )
