"""The result, large, beside what others report; and in a sentence how it was measured."""

import math

from primal.report.html import Html, tag
from primal.report.run import Run, as_number
from primal.report.svg import Axis, fit_axis

PROTOCOLS = {
    "honest": "the test set was used once, after training, and for no choice.",
    "paper": (
        "the epoch with the best test result is reported, as in the paper: an optimistic number, "
        "since the test set chose the epoch."
    ),
}
OURS = "This run"


def outcome(run: Run) -> Html:
    value = as_number(run.result.get("value"))
    if math.isnan(value):
        return tag("p", _without_number(run), class_="lead")
    number = tag(
        "div",
        tag("p", str(run.result.get("metric", run.metric)).replace("/", " "), class_="metric"),
        tag("p", run.show(value), class_="big"),
        *_beneath(run),
        tag("p", _how(run), class_="lead"),
        class_="number",
    )
    return tag("div", number, _comparisons(run, value), class_="result")


def _without_number(run: Run) -> str:
    epochs = run.metrics[-1]["epoch"] if run.metrics else 0
    if run.result:
        return f"{_trained(run)}There was nothing to measure on, so there is no result to show."
    of = run.recipe.get("training", {}).get("epochs")
    stands = f" It stands after epoch {epochs}{f' of {of}' if of else ''}." if epochs else ""
    return f"This run has not finished.{stands} Go on with --resume auto."


def _beneath(run: Run) -> list[Html]:
    lines = []
    predictions = run.predictions
    if run.metric == "accuracy" and predictions is not None:
        low, high = wilson(predictions.right, len(predictions))
        told = f"{predictions.right} of {len(predictions)} test cases"
        lines.append(tag("p", f"{told}; 95 % interval {100 * low:.1f} to {100 * high:.1f} %"))
    rest = [
        f"{name.replace('/r2', ' R²').replace('/', ' ')} {number:.4g}"
        for name, given in run.result.get("metrics", {}).items()
        if name != run.result.get("metric") and not math.isnan(number := as_number(given))
    ]
    if run.metric == "error":
        lines.append(tag("p", "root mean square, in the unit of the target"))
    if rest:
        lines.append(tag("p", " · ".join(rest)))
    return lines


def wilson(right: int, cases: int) -> tuple[float, float]:
    """Return the 95 % interval of a share (Wilson's, which holds near 0 and 1 too)."""
    z2 = 1.96**2
    centre = (right + z2 / 2) / (cases + z2)
    spread = 1.96 / (cases + z2) * math.sqrt(right * (cases - right) / cases + z2 / 4)
    return max(0.0, centre - spread), min(1.0, centre + spread)


def _comparisons(run: Run, value: float) -> Html | None:
    rows = [
        (str(other["who"]), number, str(other.get("note") or ""))
        for other in run.result.get("comparisons", [])
        if not math.isnan(number := as_number(other.get("value")))
    ]
    if not rows:
        return None
    rows.append((OURS, value, _protocol(run)))
    higher = run.metric == "accuracy"
    rows.sort(key=lambda row: -row[1] if higher else row[1])
    axis = fit_axis([number for _, number, _ in rows], percent=higher, steps=3)
    notes: dict[str, list[str]] = {}
    for who, _, note in rows:
        notes.setdefault(note, []).append(who)
    return tag(
        "div",
        tag("p", f"Beside others ({'higher' if higher else 'lower'} is better)", class_="metric"),
        tag(
            "ol", *(_comparison(run, *row[:2], axis) for row in rows), _ends(axis), class_="others"
        ),
        *(
            tag("p", tag("b", ", ".join(who)), f": {n}.", class_="note")
            for n, who in notes.items()
            if n
        ),
    )


def _comparison(run: Run, who: str, value: float, axis: Axis) -> Html:
    dot = tag("i", style=f"left:{100 * axis.at(value):.1f}%")
    line = (tag("span", who), tag("span", dot, class_="track"), tag("b", run.show(value)))
    return tag("li", *line, class_="ours" if who == OURS else None)


def _ends(axis: Axis) -> Html:
    ends = tag(
        "span", *(tag("small", axis.text(end)) for end in (axis.low, axis.high)), class_="ends"
    )
    return tag("li", tag("span"), ends, tag("span"), class_="scale", aria_hidden="true")


def _protocol(run: Run) -> str:
    protocol = run.result.get("protocol")
    return f"{protocol} protocol" if protocol else ""


def _how(run: Run) -> str:
    protocol = run.result.get("protocol", "")
    said = PROTOCOLS.get(protocol)
    return _trained(run) + (f"Protocol “{protocol}”: {said}" if said else "")


def _trained(run: Run) -> str:
    seconds = as_number(run.result.get("seconds"))
    if math.isnan(seconds):
        return ""
    if not run.metrics:
        return f"Fitted in {duration(seconds)}. "
    epochs = run.metrics[-1]["epoch"]
    return f"Trained for {epochs} epoch{'s' * (epochs != 1)} in {duration(seconds)}. "


def duration(seconds: float) -> str:
    """Write a time as people say it.

    >>> duration(8.88), duration(75), duration(8000)
    ('8.9 s', '1 min 15 s', '2 h 13 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
