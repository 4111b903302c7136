"""The cases the model was most wrong about, drawn: the quickest way to see what it misses."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from primal.report.html import Html, join, tag
from primal.report.run import Run, as_number
from primal.report.svg import Line, lanes, shorten, thin_out

CASES, CHANNELS, POINTS = 12, 12, 1500  # points of a case: what keeps the page light
RUG = 150  # observations from which marking each would be a bar


class Case(NamedTuple):
    """A case to show."""

    told: dict[str, Any]  # its name, label, prediction
    values: NDArray[np.float64]  # (channels, steps), NaN where missing
    times: list[float] | None

    @property
    def moving(self) -> NDArray[np.intp]:
        """The channels that have a value anywhere."""
        return np.flatnonzero(np.isfinite(self.values).any(axis=1))


def mistakes(run: Run) -> Html | None:
    cases = [_read(case) for case in run.mistakes[:CASES]]
    if not cases:
        return None
    told = "What the label says → what was predicted, "
    told += (
        "with the probability given to it; surest first. " if run.classifies else "worst first. "
    )
    if any(len(case.moving) > 1 for case in cases):
        told += "Each channel has a lane of its own, the first on top, on its own scale. "
    if any(case.times for case in cases):
        told += "Ticks under a series are the times of its observations. "
    if any(np.isnan(case.values).any() for case in cases):
        told += "Gaps are missing values. "
    return join(tag("p", told.strip()), tag("div", *map(_card, cases), class_="cards"))


def _read(case: dict[str, Any]) -> Case:
    values = np.array(case.get("values") or np.empty((0, 0)), dtype=np.float64)
    values[~np.isfinite(values)] = np.nan
    return Case(case, values, case.get("times"))


def _card(case: Case) -> Html:
    sure = as_number(case.told.get("probability"))
    title = tag(
        "p",
        tag("b", shorten(str(case.told["label"]), 40)),
        " → ",
        tag("b", shorten(str(case.told["predicted"]), 40), class_="wrong"),
        None if math.isnan(sure) else tag("span", f" {100 * sure:.0f} %"),
    )
    told = f"case {shorten(str(case.told['case']), 40)}"
    if len(case.moving) > CHANNELS:
        told += f", the first {CHANNELS} of {len(case.values)} channels"
    return tag("article", title, *_picture(case, told), tag("small", told))


def _picture(case: Case, told: str) -> list[Html]:
    channels = case.moving[:CHANNELS].tolist()
    if not channels:
        return []
    times = case.times or [float(step) for step in range(case.values.shape[1])]
    limit = max(120, POINTS // len(channels))
    lines = [
        Line(
            f"channel {channel + 1}",
            thin_out(list(zip(times, case.values[channel].tolist(), strict=True)), limit),
        )
        for channel in channels
    ]
    rug = times if case.times and len(times) <= RUG else ()
    return [lanes(f"{told}: the series over time", lines, rug), _axis(case, times)]


def _axis(case: Case, times: Sequence[float]) -> Html:
    ends = (_told(min(times)), "time" if case.times else "time step", _told(max(times)))
    return tag("div", *(tag("small", end) for end in ends), class_="ends")


def _told(time: float) -> str:
    return (f"{time:.4g}" if abs(time) < 1000 else f"{time:.0f}").replace("-", "−")
