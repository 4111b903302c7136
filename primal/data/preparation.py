"""From series to tensors: what is fitted on the training cases alone and kept with the model."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from primal.data.series import SeriesSet
from primal.errors import DataError

Target = Literal["class", "value"]


class Inputs(NamedTuple):
    """Series as a model reads them."""

    x: Tensor  # (cases, time, width), zero at padding
    lengths: Tensor  # (cases,)


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """Standardise channels, fill gaps, tell what was observed and when, number the classes."""

    mean: tuple[float, ...]  # per channel, over the training cases' observed values
    scale: tuple[float, ...]
    classes: tuple[str, ...] | None  # None: targets are numbers
    target_mean: float = 0.0
    target_scale: float = 1.0
    observed: bool = False  # values are missing in training: one more input per channel says which
    gap: float | None = None  # median time from step to step; None: steps are regular
    max_length: int = 1

    @classmethod
    def fit(cls, train: SeriesSet, target: Target = "class") -> Preparation:
        if train.targets is None:
            raise DataError("the training cases have no labels; give a file with a label column.")
        stacked = np.concatenate(train.values).astype(np.float64)
        with np.errstate(all="ignore"):
            counts = np.isfinite(stacked).sum(axis=0)
            mean = np.nansum(stacked, axis=0) / np.maximum(counts, 1)
            scale = np.sqrt(np.nansum((stacked - mean) ** 2, axis=0) / np.maximum(counts, 1))
        classes, target_mean, target_scale = None, 0.0, 1.0
        if target == "class":
            classes = tuple(np.unique(train.targets).tolist())
            if len(classes) < 2:
                raise DataError(
                    f"the training cases are all of one class, {classes[0]!r}; a classifier needs "
                    "at least two."
                )
        else:
            numbers = train.targets.astype(np.float64)
            target_mean, target_scale = float(numbers.mean()), float(numbers.std()) or 1.0
        gap = None
        if train.times is not None:
            gaps = [np.diff(times) for times in train.times if len(times) > 1]
            gap = float(np.median(np.concatenate(gaps))) if gaps else 1.0
        return cls(
            mean=tuple(mean.tolist()),
            scale=tuple(
                np.where(scale > 1e-8 * np.maximum(1.0, np.abs(mean)), scale, 1.0).tolist()
            ),
            classes=classes,
            target_mean=target_mean,
            target_scale=target_scale,
            observed=bool(np.isnan(stacked).any()),
            gap=gap,
            max_length=train.max_length,
        )

    @property
    def width(self) -> int:
        """What a model's input is wide: channels, what was observed, and the time's two parts."""
        return len(self.mean) * (2 if self.observed else 1) + (0 if self.gap is None else 2)

    def inputs(self, data: SeriesSet) -> Inputs:
        if data.channels != len(self.mean):
            raise DataError(
                f"{len(self.mean)} channels are required, as in training, got {data.channels}; "
                "give the same channels in the same order."
            )
        if (data.times is None) != (self.gap is None):
            raise DataError(
                "times are required, as in training, got a file without; add its time column."
                if self.gap is not None
                else "the model was trained without times, got a file with; drop its time column."
            )
        lengths = torch.tensor([len(values) for values in data.values])
        x = np.zeros((len(data), int(lengths.max()), self.width), dtype=np.float32)
        mean, scale = np.asarray(self.mean), np.asarray(self.scale)
        for i, values in enumerate(data.values):
            parts = [_filled((values - mean) / scale)]
            if self.observed:
                parts.append(np.isfinite(values))
            if data.times is not None and self.gap is not None:
                # Differences before float32: seconds since 1970 do not fit into it.
                elapsed = (data.times[i] - data.times[i][0]) / self.gap
                parts.append(np.log1p(elapsed)[:, None])
                parts.append(np.log1p(np.diff(elapsed, prepend=0.0))[:, None])
            x[i, : len(values)] = np.concatenate(parts, axis=1)
        return Inputs(torch.from_numpy(x), lengths)

    def targets(self, data: SeriesSet) -> Tensor:  # (cases,) int64 classes or float32 numbers
        if data.targets is None:
            raise DataError("labels are required to measure, got none; add a label column.")
        if self.classes is None:
            numbers = data.targets.astype(np.float64)
            return torch.from_numpy((numbers - self.target_mean) / self.target_scale).float()
        index = {name: i for i, name in enumerate(self.classes)}
        for case, name in zip(data.names, data.targets, strict=True):
            if name not in index:
                raise DataError(
                    f"case {case} is of class {name!r}, which training did not show; known are "
                    f"{', '.join(self.classes)}; correct the label, or train with such cases."
                )
        return torch.tensor([index[name] for name in data.targets])

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Preparation:
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})


def _filled(values: np.ndarray) -> np.ndarray:  # (time, channels)
    """Draw straight lines over gaps, the nearest value before the first and after the last."""
    missing = np.isnan(values)
    if not missing.any():
        return values
    values, steps = values.copy(), np.arange(len(values))
    for channel in np.flatnonzero(missing.any(axis=0)):
        known = ~missing[:, channel]
        values[:, channel] = (
            np.interp(steps, steps[known], values[known, channel]) if known.any() else 0.0
        )
    return values
