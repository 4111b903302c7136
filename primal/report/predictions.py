"""What was predicted for what: confusion matrix and scores per class, or predicted against true."""

import math
from collections import Counter

from primal.report.html import Html, join, tag
from primal.report.run import Predictions, Run
from primal.report.svg import figure, fit_axis, matrix, scatter

POINTS = 1500  # more would only lie on each other
NATURAL = (12, 30)  # classes between which a matrix scrolls on a phone rather than shrinks
LONG = 16  # rows from which a table scrolls, and the classes in most need of a look stand first


def predictions(run: Run) -> Html | None:
    if run.predictions is None:
        return None
    return _classes(run.predictions) if run.predictions.classes else _numbers(run.predictions)


def _classes(found: Predictions) -> Html:
    from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

    names = list(found.classes)
    # A label that training never saw is right to show: it can only be wrong.
    names += sorted(set(found.labels) - set(names))
    counts = confusion_matrix(found.labels, found.predicted, labels=names).tolist()
    *scores, cases = precision_recall_fscore_support(
        found.labels, found.predicted, labels=names, zero_division=0.0
    )
    rows = list(zip(names, *(s.tolist() for s in scores), cases.tolist(), strict=True))
    note = f"{len(found)} test cases; the shade is the share of the row, blue where right"
    picture = matrix("Confusion matrix", counts, names, row_title="label", column_title="predicted")
    drawn = tag(
        "div", picture, class_="scroll natural" if NATURAL[0] < len(names) <= NATURAL[1] else None
    )
    return tag(
        "div",
        tag("div", figure("Confusion matrix", drawn, note), _confused(found), class_="grow"),
        _scores(rows),
        class_="beside",
    )


def _confused(found: Predictions) -> Html | None:
    pairs = Counter(
        (a, b) for a, b in zip(found.labels, found.predicted, strict=True) if a != b
    ).most_common(3)
    if not pairs:
        return tag("p", "Every test case was predicted right.")
    told = [
        join(tag("b", a), " taken for ", tag("b", b), f" ({n} time{'s' * (n > 1)})")
        for (a, b), n in pairs
    ]
    separated = [piece for one in told for piece in (", ", one)][1:]
    return tag("p", "Most often: ", *separated, ".")


def _scores(rows: list[tuple[str, float, float, float, int]]) -> Html:
    long = len(rows) > LONG
    if long:
        rows = sorted(rows, key=lambda row: row[3])
    seen = [row[1:4] for row in rows if row[4]]
    mean = [sum(column) / len(seen) for column in zip(*seen, strict=True)]
    heads = ("class", "precision", "recall", "F1", "cases")
    lines = [
        tag("tr", tag("th", name, scope="row"), *map(_score, shares), tag("td", cases))
        for name, *shares, cases in rows
    ]
    total = sum(row[4] for row in rows)
    foot = tag("tr", tag("th", "mean", scope="row"), *map(_score, mean), tag("td", total))
    table = tag(
        "table",
        tag("thead", tag("tr", *(tag("th", head, scope="col") for head in heads))),
        tag("tbody", *lines),
        tag("tfoot", foot),
        class_="numbers scores",
    )
    note = f"per cent; {len(rows)} classes, lowest F1 first" if long else "per cent"
    return figure("Per class", tag("div", table, class_="scroll tall" if long else "scroll"), note)


def _score(share: float) -> Html:
    return tag("td", f"{100 * share:.1f}", style=f"--share:{100 * share:.0f}%")


def _numbers(found: Predictions) -> Html | None:
    pairs = [pair for pair in found.numbers() if all(map(math.isfinite, pair))]
    if not pairs:
        return None
    shown = pairs[:: math.ceil(len(pairs) / POINTS)]
    told = f"{len(pairs)} test cases, on the dashed line where they are right"
    drawn = f"{len(shown)} of them drawn" if len(shown) < len(pairs) else None
    axis = fit_axis([number for pair in pairs for number in pair])
    against = scatter(
        "Predicted against true values",
        shown,
        axis,
        axis,
        ((axis.low, axis.low), (axis.high, axis.high)),
        x_title="true value",
        y_title="predicted value",
    )
    x, y = fit_axis(p for _, p in pairs), fit_axis([p - true for true, p in pairs], zero=True)
    residuals = scatter(
        "Residuals against predicted values",
        [(p, p - true) for true, p in shown],
        x,
        y,
        ((x.low, 0.0), (x.high, 0.0)),
        x_title="predicted value",
        y_title="predicted − true",
    )
    note = "what is left over; a slope or a bend is what the model missed"
    return tag(
        "div",
        figure("Predicted against true", against, "; ".join(filter(None, (told, drawn)))),
        figure("Residuals", residuals, note),
        figure("Errors", _errors([p - true for true, p in pairs]), "in the unit of the target"),
        class_="charts",
    )


def _errors(errors: list[float]) -> Html:
    size = sorted(map(abs, errors))
    facts = (
        ("root mean square error", math.sqrt(sum(e * e for e in errors) / len(errors))),
        ("mean absolute error", sum(size) / len(size)),
        ("median absolute error", size[len(size) // 2]),
        ("largest absolute error", size[-1]),
        ("mean error (bias)", sum(errors) / len(errors)),
    )
    rows = [tag("tr", tag("th", name, scope="row"), tag("td", f"{v:.4g}")) for name, v in facts]
    return tag("div", tag("table", tag("tbody", *rows), class_="numbers"), class_="scroll")
