"""The cases the model was most wrong about, drawn: the quickest way to see what it misses."""

import math
from collections.abc import Sequence
from typing import Any

from primal.report.html import Html, join, tag
from primal.report.run import Run, as_number
from primal.report.svg import Line, Point, shorten, sparkline, thin_out

CASES, CHANNELS, POINTS = 12, 12, 700  # points of a case: what keeps the page light
COLOURS = ("var(--a)", "var(--b)", "var(--c)")


def mistakes(run: Run) -> Html | None:
    shown = run.mistakes[:CASES]
    if not shown:
        return None
    by = "Largest errors first" if not run.classifies else "Surest first"
    drawn = "each channel drawn on its own scale" if _several(shown) else ""
    note = "; ".join(
        part for part in (f"{by}: what the label says → what was predicted", drawn) if part
    )
    return join(tag("p", note + "."), tag("div", *(_card(case) for case in shown), class_="cards"))


def _several(cases: list[dict[str, Any]]) -> bool:
    return any(len(case.get("values") or ()) > 1 for case in cases)


def _card(case: dict[str, Any]) -> Html:
    sure = as_number(case.get("probability"))
    title = tag(
        "p",
        tag("b", shorten(str(case["label"]), 40)),
        " → ",
        tag("b", shorten(str(case["predicted"]), 40), class_="wrong"),
        None if math.isnan(sure) else tag("span", f" {100 * sure:.0f} %"),
    )
    channels, of = _channels(case), len(case.get("values") or ())
    told = f"case {shorten(str(case['case']), 40)}"
    told += f", {len(channels)} of {of} channels" if len(channels) < of else ""
    picture = sparkline(told, channels) if channels else None
    return tag("article", title, picture, tag("small", told))


def _channels(case: dict[str, Any]) -> list[Line]:
    """Return the channels that move most, each scaled by its own mean and deviation."""
    values = case.get("values") or []
    times = case.get("times") or list(range(max(map(len, values), default=0)))
    scaled = [(i, _scaled([as_number(v) for v in channel])) for i, channel in enumerate(values)]
    moving = [(i, channel) for i, channel in scaled if any(map(math.isfinite, channel))]
    moving = moving[:CHANNELS]
    limit = max(40, POINTS // max(1, len(moving)))
    return [
        Line(
            f"channel {i + 1}",
            thin_out(_points(times, channel), limit),
            COLOURS[n % len(COLOURS)],
            thin=len(moving) > len(COLOURS),
        )
        for n, (i, channel) in enumerate(moving)
    ]


def _points(times: Sequence[float], channel: Sequence[float]) -> list[Point]:
    return [(float(t), v) for t, v in zip(times, channel, strict=False)]


def _scaled(channel: list[float]) -> list[float]:
    known = [v for v in channel if math.isfinite(v)]
    if not known:
        return channel
    mean = sum(known) / len(known)
    deviation = math.sqrt(sum((v - mean) ** 2 for v in known) / len(known))
    return [(v - mean) / (deviation or 1.0) for v in channel]
