"""What was predicted for what: confusion matrix and scores per class, or predicted against true."""

import math
from collections import Counter

from primal.report.html import Html, join, tag
from primal.report.run import Predictions, Run
from primal.report.svg import figure, fit_axis, matrix, scatter

POINTS = 1500  # more would only lie on each other
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
    note = f"{len(found)} test cases; shades are shares of a row"
    picture = matrix("Confusion matrix", counts, names, row_title="label", column_title="predicted")
    return tag(
        "div",
        tag("div", figure("Confusion matrix", picture, note), _confused(found), class_="grow"),
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
        class_="numbers",
    )
    note = f"{len(rows)} classes, lowest F1 first" if long else None
    return figure("Per class", tag("div", table, class_="scroll tall" if long else "scroll"), note)


def _score(share: float) -> Html:
    return tag("td", f"{100 * share:.1f}", style=f"--share:{100 * share:.0f}%")


def _numbers(found: Predictions) -> Html | None:
    true, predicted = found.numbers()
    pairs = [p for p in zip(true, predicted, strict=True) if all(map(math.isfinite, p))]
    if not pairs:
        return None
    shown = pairs[:: math.ceil(len(pairs) / POINTS)]
    axis = fit_axis([number for pair in pairs for number in pair])
    picture = scatter(
        "Predicted against true", shown, axis, x_title="true value", y_title="predicted"
    )
    told = f"{len(pairs)} test cases"
    told += f", {len(shown)} of them drawn" if len(shown) < len(pairs) else ""
    errors = [b - a for a, b in pairs]
    size = sorted(map(abs, errors))
    facts = (
        ("root mean square error", math.sqrt(sum(e * e for e in errors) / len(errors))),
        ("mean absolute error", sum(size) / len(size)),
        ("median absolute error", size[len(size) // 2]),
        ("largest absolute error", size[-1]),
        ("mean error (bias)", sum(errors) / len(errors)),
    )
    rows = [tag("tr", tag("th", name, scope="row"), tag("td", f"{v:.4g}")) for name, v in facts]
    table = tag("table", tag("tbody", *rows), class_="numbers")
    return tag(
        "div",
        tag("div", figure("Predicted against true", picture, told), class_="grow"),
        figure("Errors", tag("div", table, class_="scroll")),
        class_="beside",
    )
