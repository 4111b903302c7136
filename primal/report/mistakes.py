"""The cases the model was most wrong about, drawn: the quickest way to see what it misses."""

import math
from collections.abc import Sequence
from typing import Any

from primal.report.html import Html, join, tag
from primal.report.run import Run, as_number
from primal.report.svg import Line, lanes, shorten, thin_out

CASES, CHANNELS, POINTS = 12, 12, 900  # points of a case: what keeps the page light
RUG = 150  # observations from which marking each would be a bar


def mistakes(run: Run) -> Html | None:
    shown = run.mistakes[:CASES]
    if not shown:
        return None
    told = "What the label says → what was predicted, "
    told += (
        "with the probability given to it; surest first. " if run.classifies else "worst first. "
    )
    if any(len(_moving(case)) > 1 for case in shown):
        told += "Each channel has a lane of its own, the first on top, on its own scale. "
    if any(case.get("times") for case in shown):
        told += "Ticks under a series are the times of its observations. "
    if any(as_number(v) != as_number(v) for case in shown for c in _values(case) for v in c):
        told += "Gaps are missing values. "
    return join(tag("p", told.strip()), tag("div", *map(_card, shown), class_="cards"))


def _card(case: dict[str, Any]) -> Html:
    sure = as_number(case.get("probability"))
    title = tag(
        "p",
        tag("b", shorten(str(case["label"]), 40)),
        " → ",
        tag("b", shorten(str(case["predicted"]), 40), class_="wrong"),
        None if math.isnan(sure) else tag("span", f" {100 * sure:.0f} %"),
    )
    moving, of = _moving(case), len(_values(case))
    told = f"case {shorten(str(case['case']), 40)}"
    if len(moving) > CHANNELS:
        told += f", the first {CHANNELS} of {of} channels"
    return tag("article", title, *_picture(case, told), tag("small", told))


def _picture(case: dict[str, Any], told: str) -> list[Html]:
    channels, given = dict(list(_moving(case).items())[:CHANNELS]), case.get("times")
    if not channels:
        return []
    steps = max(map(len, channels.values()))
    times = [float(time) for time in given] if given else [float(i) for i in range(steps)]
    limit = max(60, POINTS // len(channels))
    lines = [
        Line(f"channel {i + 1}", thin_out(list(zip(times, channel, strict=False)), limit))
        for i, channel in channels.items()
    ]
    rug = times if given and len(times) <= RUG else ()
    return [lanes(f"{told}: the series over time", lines, rug), _axis(times, given)]


def _axis(times: Sequence[float], given: object) -> Html:
    low, high = (f"{time:.6g}".replace("-", "−") for time in (min(times), max(times)))
    ends = (low, "time" if given else "time step", high)
    return tag("div", *(tag("small", end) for end in ends), class_="ends")


def _values(case: dict[str, Any]) -> Sequence[Sequence[object]]:
    return case.get("values") or []


def _moving(case: dict[str, Any]) -> dict[int, list[float]]:
    """Return the channels that have a value anywhere, by their number."""
    channels = {i: [as_number(v) for v in channel] for i, channel in enumerate(_values(case))}
    return {i: channel for i, channel in channels.items() if any(map(math.isfinite, channel))}
