"""Labelled series of any length, sampled regularly or not: what the time-series models read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from math import ceil
from typing import Any

import numpy as np

from primal.errors import DataError


@dataclass(frozen=True, eq=False)
class SeriesSet:
    """Cases in memory. NaN is a missing value; without ``times`` the steps are 0, 1, 2, ..."""

    values: tuple[np.ndarray, ...]  # (time, channels) each
    targets: np.ndarray | None  # (cases,) of class names or of numbers; None if unknown
    names: tuple[str, ...]
    times: tuple[np.ndarray, ...] | None = None  # (time,) each, increasing, float64
    channel_names: tuple[str, ...] | None = None  # of a table's columns
    source: str = ""  # the file
    rows: tuple[int, ...] | None = None  # where each case begins in the file

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in ("values", "targets", "names", *_OPTIONAL)}
        lengths = {name: len(value) for name, value in given.items() if value is not None}
        if len(set(lengths.values())) != 1:
            raise ValueError(
                f"a SeriesSet needs one of each for every case, got {lengths}; give as many."
            )

    def __len__(self) -> int:
        return len(self.values)

    @property
    def channels(self) -> int:
        return self.values[0].shape[1]

    @property
    def lengths(self) -> np.ndarray:  # (cases,)
        return np.array([len(values) for values in self.values])

    @property
    def max_length(self) -> int:
        return int(self.lengths.max())

    def where(self, case: int) -> str:
        """Say which case it is, and where an editor shows it."""
        row = None if self.rows is None else f"row {self.rows[case]}"
        return ", ".join(part for part in (self.source, row, f"case {self.names[case]}") if part)

    def subset(self, cases: Iterable[int]) -> SeriesSet:
        chosen = list(cases)
        picked: dict[str, Any] = {
            name: tuple(getattr(self, name)[i] for i in chosen)
            for name in ("values", "names", *_OPTIONAL)
            if getattr(self, name) is not None
        }
        targets = None if self.targets is None else self.targets[chosen]
        return replace(self, targets=targets, **picked)


_OPTIONAL = ("times", "rows")  # one of each for every case, where they are known


@dataclass(frozen=True)
class Splits:
    """One data set, divided. ``test`` is None for data that comes without one."""

    train: SeriesSet
    test: SeriesSet | None


def join(parts: Sequence[SeriesSet]) -> SeriesSet:
    """Put several sets of one kind into one."""
    first = parts[0]
    for field in fields(SeriesSet):
        known = {getattr(part, field.name) is None for part in parts}
        if len(known) > 1:
            raise ValueError(
                f"sets to join need the same parts, got {field.name} in some and not in others; "
                "join those that have them."
            )
    if len({part.channel_names for part in parts}) > 1:
        raise ValueError("sets to join need the same channels in the same order; rename them.")
    targets = [part.targets for part in parts if part.targets is not None]
    one_file = len({part.source for part in parts}) == 1

    def all_of(name: str) -> Any:
        if getattr(first, name) is None:
            return None
        return tuple(one for part in parts for one in getattr(part, name))

    return replace(
        first,
        values=all_of("values"),
        targets=np.concatenate(targets) if targets else None,
        names=all_of("names"),
        times=all_of("times"),
        source=first.source if one_file else "",
        rows=all_of("rows") if one_file else None,
    )


def split(
    data: SeriesSet, fraction: float, seed: int, *, by_class: bool
) -> tuple[SeriesSet, SeriesSet]:
    """Divide into what to train on and what to hold out; ``by_class`` keeps the classes' shares.

    Every class keeps at least one case to train on.
    """
    if not 0 < fraction < 1:
        raise ValueError(f"the part to hold out must lie between 0 and 1, got {fraction}; try 0.2.")
    generator = np.random.default_rng(seed)
    groups = [np.arange(len(data))]
    if by_class and data.targets is not None:
        groups = [np.flatnonzero(data.targets == name) for name in np.unique(data.targets)]
    held_out: list[int] = []
    # Rounded over the whole, not class by class: many small classes still give up their share.
    owed = 0.0
    for group in groups:
        share = fraction * len(group)
        owed += share
        count = min(round(owed), ceil(share), len(group) - 1)
        owed -= count
        held_out += generator.permutation(group)[:count].tolist()
    if not held_out:
        raise DataError(
            f"{len(data)} cases are too few to hold out {fraction:g} of them, with one of each "
            "class left to train on; give more cases, or hold out none."
        )
    chosen = set(held_out)
    kept = (i for i in range(len(data)) if i not in chosen)
    return data.subset(kept), data.subset(sorted(held_out))


def as_names(labels: np.ndarray) -> np.ndarray:
    """Write labels as text; 1.0 and 1 are the same class, "1"."""
    if labels.dtype.kind != "f":
        return labels.astype(str)
    return np.array([str(int(x)) if x.is_integer() else str(x) for x in labels.tolist()], str)
