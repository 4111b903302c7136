"""From series to tensors: what is fitted on the training cases alone and kept with the model."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from primal.data.series import SeriesSet, as_names
from primal.errors import DataError

Target = Literal["class", "value"]
FAR = 1e6  # standard deviations: what is further is taken for so far, and stays finite in float32


class Inputs(NamedTuple):
    """Series as a model reads them."""

    x: Tensor  # (cases, time, width), zero at padding
    lengths: Tensor  # (cases,)


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """Standardise channels, fill gaps, tell what was observed and when, number the classes."""

    mean: tuple[float, ...]  # per channel, over the training cases' observed values
    scale: tuple[float, ...]
    channel_names: tuple[str, ...] | None = None  # None: known by their order alone
    classes: tuple[str, ...] | None  # None: targets are numbers
    target_mean: float = 0.0
    target_scale: float = 1.0
    observed: bool = False
    """Values are missing in training: one more input per channel tells which are there."""
    gap: float | None = None
    """Median time from step to step, the unit of time; None: steps are regular."""
    max_length: int = 1

    @classmethod
    def fit(cls, train: SeriesSet, target: Target = "class") -> Preparation:
        if train.targets is None:
            raise DataError(
                f"{_file(train)}labels are required to train, got none; add a column label, or "
                "name yours with --data.columns.label, or add the labels y to an array."
            )
        stacked = np.concatenate(train.values).astype(np.float64)
        known = ~np.isnan(stacked)
        count = np.maximum(known.sum(axis=0), 1)
        mean = stacked.sum(axis=0, where=known) / count
        scale = np.sqrt(((stacked - mean) ** 2).sum(axis=0, where=known) / count)
        # What rounding leaves of a constant is not its spread.
        scale = np.where(scale > 1e-12 * np.abs(mean), scale, 1.0)
        classes, target_mean, target_scale = None, 0.0, 1.0
        if target == "class":
            classes = _classes(train, train.targets)
        else:
            numbers = _as_numbers(train, train.targets)
            target_mean, target_scale = float(numbers.mean()), float(numbers.std()) or 1.0
        return cls(
            mean=tuple(mean.tolist()),
            scale=tuple(scale.tolist()),
            channel_names=train.channel_names,
            classes=classes,
            target_mean=target_mean,
            target_scale=target_scale,
            observed=not known.all(),
            gap=None if train.times is None else _median_gap(train.times),
            max_length=train.max_length,
        )

    @property
    def width(self) -> int:
        """What a model's input is wide: channels, what was observed, and the time's two parts."""
        return len(self.mean) * (2 if self.observed else 1) + (0 if self.gap is None else 2)

    def check(self, data: SeriesSet) -> None:
        """Raise a DataError unless ``data`` has the channels, times and classes of training."""
        self._order(data)
        if (data.times is None) != (self.gap is None):
            raise DataError(
                f"{_file(data)}times are required, as in training, got none; add their column."
                if data.times is None
                else f"{_file(data)}no times are expected, as in training, got some; drop their "
                "column, or train with it."
            )
        if data.targets is not None:
            self.targets(data)

    def inputs(self, data: SeriesSet) -> Inputs:
        self.check(data)
        lengths = data.lengths
        values = np.concatenate(data.values).astype(np.float64)[:, self._order(data)]
        values = (values - np.asarray(self.mean)) / np.asarray(self.scale)
        values = values.clip(-FAR, FAR)  # NaN stays
        times = None if data.times is None else np.concatenate(data.times).astype(np.float64)
        missing = np.isnan(values)
        parts = [_filled(values, missing, times, lengths) if missing.any() else values]
        if self.observed:
            parts.append(~missing)
        if times is not None and self.gap is not None:
            # Differences before float32: seconds since 1970 do not fit into it.
            starts = np.cumsum(lengths) - lengths
            elapsed = (times - np.repeat(times[starts], lengths)) / self.gap
            gaps = np.diff(times, prepend=times[0]) / self.gap
            gaps[starts] = 0.0
            parts += [np.log1p(elapsed)[:, None], np.log1p(gaps)[:, None]]
        x = np.zeros((len(data), data.max_length, self.width), dtype=np.float32)
        x[np.arange(data.max_length) < lengths[:, None]] = np.concatenate(parts, axis=1)
        return Inputs(torch.from_numpy(x), torch.from_numpy(lengths))

    def targets(self, data: SeriesSet) -> Tensor:  # (cases,) int64 classes or float32 numbers
        if data.targets is None:
            raise DataError(
                f"{_file(data)}labels are required to measure, got none; add them as in training."
            )
        if self.classes is None:
            numbers = _as_numbers(data, data.targets)
            return torch.from_numpy((numbers - self.target_mean) / self.target_scale).float()
        names, known = as_names(data.targets), np.array(self.classes)
        index = np.searchsorted(known, names).clip(max=len(known) - 1)
        unknown = np.flatnonzero(known[index] != names)
        if len(unknown):
            raise DataError(
                f"{data.where(unknown[0])}: a class of training is required, "
                f"{_some(self.classes)}, got {str(names[unknown[0]])!r}; correct the label, or "
                "train with such cases."
            )
        return torch.from_numpy(index)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Preparation:
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in fields.items()
        }
        return cls(**values)

    def _order(self, data: SeriesSet) -> list[int]:
        """Return where each channel of training stands in ``data``."""
        if self.channel_names is None or data.channel_names is None:
            if data.channels != len(self.mean):
                raise DataError(
                    f"{_file(data)}{len(self.mean)} channels are required, as in training, got "
                    f"{data.channels}; give those."
                )
            return list(range(data.channels))
        places = {name: place for place, name in enumerate(data.channel_names)}
        absent = [name for name in self.channel_names if name not in places]
        others = [name for name in data.channel_names if name not in self.channel_names]
        if absent or others:
            without = f", without {_some(absent)}" if absent else ""
            instead = f", with {_some(others)}" if others else ""
            raise DataError(
                f"{_file(data)}the {len(self.mean)} channels of training are required, got "
                f"{data.channels}{without}{instead}; rename, add or drop columns."
            )
        return [places[name] for name in self.channel_names]


def _classes(train: SeriesSet, targets: np.ndarray) -> tuple[str, ...]:
    classes = tuple(np.unique(as_names(targets)).tolist())
    if len(classes) < 2:
        raise DataError(
            f"{_file(train)}at least two classes are required to train a classifier, got only "
            f"{classes[0]!r}; give cases of another."
        )
    return classes


def _as_numbers(data: SeriesSet, targets: np.ndarray) -> np.ndarray:
    try:
        return targets.astype(np.float64)
    except ValueError as error:
        raise DataError(
            f"{_file(data)}numbers are required as labels of a regression ({error}); correct them, "
            "or train a classifier, --data.target class."
        ) from None


def _median_gap(times: tuple[np.ndarray, ...]) -> float:
    gaps = np.concatenate([np.diff(one) for one in times])
    return float(np.median(gaps)) if len(gaps) else 1.0


def _filled(
    values: np.ndarray,  # (steps of all cases, channels)
    missing: np.ndarray,
    times: np.ndarray | None,
    lengths: np.ndarray,
) -> np.ndarray:
    """Draw straight lines over gaps, the nearest value before the first and after the last.

    A channel of which a case has nothing is zero there, its mean.
    """
    steps = np.arange(len(values))[:, None]
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)[:, None]
    ends = starts + np.repeat(lengths, lengths)[:, None]
    before = np.maximum.accumulate(np.where(missing, -1, steps))
    after = np.minimum.accumulate(np.where(missing, len(values), steps)[::-1])[::-1]
    has_before, has_after = before >= starts, after < ends
    nowhere = ~(has_before | has_after)
    before, after = (
        np.where(nowhere, steps, np.where(has_before, before, after)),
        np.where(nowhere, steps, np.where(has_after, after, before)),
    )
    at = steps[:, 0] if times is None else times
    left, right = (np.take_along_axis(values, place, axis=0) for place in (before, after))
    span = at[after] - at[before]
    part = (at[:, None] - at[before]) / np.where(span == 0, 1, span)
    return np.where(nowhere, 0.0, left + part * (right - left))


def _file(data: SeriesSet) -> str:
    return f"{data.source}: " if data.source else ""


def _some(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
