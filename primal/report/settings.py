"""What the number depends on: the recipe with every setting, and where it ran."""

from collections.abc import Iterator, Mapping
from typing import Any

from primal.report.html import Html, tag
from primal.report.run import Run


def recipe(run: Run) -> Html | None:
    return _table("Every setting of the recipe", run.recipe)


def environment(run: Run) -> Html | None:
    return _table("Machine and versions", run.environment)


def _table(title: str, content: Mapping[str, Any]) -> Html | None:
    rows = [
        tag("tr", tag("th", name, scope="row"), tag("td", _told(value)))
        for name, value in flat(content)
    ]
    if not rows:
        return None
    table = tag("div", tag("table", tag("tbody", *rows), class_="settings"), class_="scroll")
    return tag("details", tag("summary", title), table)


def flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every setting with its dotted name, as the command line takes it.

    >>> dict(flat({"seed": 0, "model": {"width": 64, "layers": [1, 2]}}))
    {'seed': 0, 'model.width': 64, 'model.layers': [1, 2]}
    """
    for name, value in content.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + str(name), value


def _told(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(_told(each) for each in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "–" if value is None else str(value)
