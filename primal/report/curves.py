"""How training went: loss, objective of each layer, accuracy, epoch by epoch."""

import math
from collections.abc import Mapping
from dataclasses import replace

from primal.report.html import Html, tag
from primal.report.run import Run, as_number
from primal.report.svg import Axis, Line, figure, fit_axis, line_chart

COLOURS = {"train": "var(--a)", "validation": "var(--b)", "test": "var(--c)"}
LOG_FROM = 30  # the ratio of largest to smallest value from which a logarithmic axis tells more


def learning_curves(run: Run) -> Html | None:
    if not run.metrics:
        return None
    charts = [_loss(run), _objective(run), _score(run)]
    return tag("div", *charts, class_="charts")


def _loss(run: Run) -> Html | None:
    note = "cross-entropy" if run.classifies else "squared error, standardised"
    return _chart(run, "Loss", _sets(run, "loss"), f"{note}, mean of the cases")


def _score(run: Run) -> Html | None:
    if run.classifies:
        lines = _sets(run, "accuracy", {"train": "train/score"})
        return _chart(run, "Accuracy", lines, "share of the cases that are right", percent=True)
    if any(name.endswith("/error") for row in run.metrics for name in row):
        note = "root mean square, in the target's unit"
        return _chart(run, "Error", _sets(run, "error"), note)
    lines = [Line("train", _points(run, "train/score"), COLOURS["train"], label="train")]
    return _chart(run, "Error", lines, "mean absolute, in standard deviations")


def _objective(run: Run) -> Html | None:
    names = sorted(
        {n for row in run.metrics for n in row if n.startswith("train/ksvd/")},
        key=lambda name: (len(name), name),
    )
    lines = [
        Line(f"layer {name.rpartition('/')[2]}", _points(run, name), _ramp(i, len(names)))
        for i, name in enumerate(names)
    ]
    # More labels than lines of text fit beside the chart: the ends of the ramp say the rest.
    told = range(len(lines)) if len(lines) <= 10 else (0, len(lines) - 1)
    lines = [_labelled(line) if i in told else line for i, line in enumerate(lines)]
    if len(lines) < 2:
        lines = [Line("mean of the layers", _points(run, "train/ksvd"))]
    return _chart(run, "KSVD objective", lines, "J² of each primal layer", log=True)


def _chart(
    run: Run,
    title: str,
    lines: list[Line],
    note: str = "",
    *,
    percent: bool = False,
    log: bool = False,
) -> Html | None:
    values = [y for line in lines for _, y in line.points if math.isfinite(y)]
    if not values or (log and max(values) <= 0):
        return None
    positive = [value for value in values if value > 0]
    log = log or (not percent and min(values) > 0 and max(values) / min(values) > LOG_FROM)
    if log:  # zero has no place on a logarithmic axis
        lines = [_without_zeros(line) for line in lines]
    last = max(int(row["epoch"]) for row in run.metrics)
    x = Axis(1, last, whole=True) if last > 1 else Axis(0, 2, whole=True)
    y = fit_axis(positive if log else values, log=log, percent=percent)
    notes = [part for part in (note, "log scale" if log else "") if part]
    kept = _kept(run)
    picture = line_chart(
        f"{title} over epochs",
        lines,
        x,
        y,
        x_title="epoch",
        mark=None if kept is None else (kept, "kept"),
    )
    return figure(title, picture, ", ".join(notes) or None)


def _sets(run: Run, what: str, others: Mapping[str, str] | None = None) -> list[Line]:
    """Return a labelled line for each set that was measured."""
    lines = []
    for name, colour in COLOURS.items():
        points = _points(run, (others or {}).get(name, f"{name}/{what}"))
        if any(math.isfinite(y) for _, y in points):
            lines.append(Line(name, points, colour, label=name))
        elif math.isfinite(once := as_number(run.result.get("metrics", {}).get(f"{name}/{what}"))):
            end = float(run.metrics[-1]["epoch"])
            lines.append(Line(f"{name}, once", [(end, once)], colour, label=name))
    return lines


def _points(run: Run, name: str) -> list[tuple[float, float]]:
    return [(float(row["epoch"]), as_number(row.get(name))) for row in run.metrics]


def _kept(run: Run) -> float | None:
    """Return the epoch whose weights were kept, where one was chosen."""
    select = run.recipe.get("training", {}).get("select")
    if run.result.get("protocol") == "paper":
        select = f"test/{run.metric}"
    measured = [(as_number(row.get(select)), row["epoch"]) for row in run.metrics if select]
    measured = [(value, epoch) for value, epoch in measured if math.isfinite(value)]
    if not measured:
        return None
    lower = str(select).endswith(("loss", "error"))
    # The first of equals, as the training loop keeps it.
    return float(min(measured, key=lambda m: (m[0] if lower else -m[0], m[1]))[1])


def _labelled(line: Line) -> Line:
    return replace(line, label=line.name)


def _without_zeros(line: Line) -> Line:
    points = [(x, y if y > 0 else math.nan) for x, y in line.points]
    return replace(line, points=points)


def _ramp(i: int, count: int) -> str:
    if count <= 1:
        return "var(--a)"
    return f"color-mix(in srgb, var(--a), var(--b) {100 * i // (count - 1)}%)"
