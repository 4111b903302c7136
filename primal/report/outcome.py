"""The result, large, beside what others report; and in a sentence how it was measured."""

import math

from primal.report.html import Html, join, tag
from primal.report.run import Run, as_number
from primal.report.svg import Axis, fit_axis

PROTOCOLS = {
    "honest": "The test set was used once, after training, and for no choice.",
    "paper": (
        "The epoch with the best test result is reported, as in the paper: an optimistic number, "
        "since the test set chose the epoch."
    ),
}


def outcome(run: Run) -> Html | None:
    if not run.result:
        return tag("p", "This run has not finished: there is no result yet.", class_="lead")
    value, what = as_number(run.result.get("value")), run.result.get("metric", run.metric)
    number = tag(
        "div",
        tag("p", str(what).replace("/", " "), class_="metric"),
        tag("p", run.show(value), class_="big"),
        *_beneath(run),
        class_="number",
    )
    return join(
        tag("div", number, _comparisons(run, value), class_="result"),
        tag("p", _how(run), class_="lead"),
    )


def _beneath(run: Run) -> list[Html]:
    lines = []
    predictions = run.predictions
    if run.metric == "accuracy" and predictions is not None:
        low, high = wilson(predictions.right, len(predictions))
        told = f"{predictions.right} of {len(predictions)} test cases"
        lines.append(tag("p", f"{told}; 95 % interval {100 * low:.1f} to {100 * high:.1f} %"))
    others = {
        name: as_number(number)
        for name, number in run.result.get("metrics", {}).items()
        if name != run.result.get("metric")
    }
    rest = [f"{n.replace('/', ' ')} {v:.4g}" for n, v in others.items() if not math.isnan(v)]
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
    given = run.result.get("comparisons", [])
    rows = [(str(o["who"]), as_number(o["value"]), str(o.get("note") or "")) for o in given]
    rows = [row for row in rows if not math.isnan(row[1])]
    if not rows:
        return None
    if not math.isnan(value):
        rows.append(("This run", value, _protocol(run)))
    lower_is_better = run.metric != "accuracy"
    rows.sort(key=lambda row: row[1] if lower_is_better else -row[1])
    axis = fit_axis([number for _, number, _ in rows], percent=run.metric == "accuracy")
    lines = [_comparison(run, *row, axis) for row in rows]
    better = "lower is better" if lower_is_better else "higher is better"
    ends = tag("li", tag("span"), _ends(axis), tag("span"), class_="scale")
    head = tag("p", f"Beside others ({better})", class_="metric")
    return tag("div", head, tag("ol", *lines, ends, class_="others"))


def _comparison(run: Run, who: str, value: float, note: str, axis: Axis) -> Html:
    ours = who == "This run"
    dot = tag("i", style=f"left:{100 * axis.at(value):.1f}%")
    return tag(
        "li",
        tag("span", who, tag("small", note) if note else None),
        tag("span", dot, class_="track"),
        tag("b", run.show(value)),
        class_="ours" if ours else None,
    )


def _ends(axis: Axis) -> Html:
    ends = (tag("small", axis.text(end)) for end in (axis.low, axis.high))
    return tag("span", *ends, class_="ends")


def _protocol(run: Run) -> str:
    protocol = run.result.get("protocol")
    return f"{protocol} protocol" if protocol else ""


def _how(run: Run) -> str:
    trained = ""
    epochs = run.metrics[-1]["epoch"] if run.metrics else None
    seconds = as_number(run.result.get("seconds"))
    if not math.isnan(seconds):
        trained = f"Fitted in {duration(seconds)}"
        if epochs:
            trained = f"Trained for {epochs} epoch{'s' * (epochs != 1)} in {duration(seconds)}"
        trained += ". "
    protocol = run.result.get("protocol", "")
    said = PROTOCOLS.get(protocol, f"Protocol: {protocol}." if protocol else "")
    return trained + (f"Protocol “{protocol}”: {said}" if protocol in PROTOCOLS else said)


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
