"""Tables as people read them: in a terminal and in Markdown."""

from collections.abc import Sequence
from statistics import mean, stdev
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import rich.table


class Table(NamedTuple):
    """A titled table; a cell without a value is empty."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]
    notes: tuple[str, ...] = ()

    def markdown(self) -> str:
        """Return the table in Markdown, its notes below.

        >>> print(Table("Sums", ("of", "is"), [("1 + 1", "2")]).markdown())
        ## Sums
        <BLANKLINE>
        | of | is |
        |---|---|
        | 1 + 1 | 2 |
        """
        lines = [f"| {' | '.join(row)} |" for row in (self.header, *self.rows)]
        lines.insert(1, "|" + "---|" * len(self.header))
        notes = ["", *(f"- {note}" for note in self.notes)] if self.notes else []
        return "\n".join([f"## {self.title}", "", *lines, *notes])

    def screen(self) -> "rich.table.Table":
        from rich import box
        from rich.table import Table as Screen

        made = Screen(title=self.title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
        for i, name in enumerate(self.header):
            made.add_column(name, justify="right" if i else "left", overflow="fold")
        for row in self.rows:
            made.add_row(*row, style="bold" if row[0].startswith("average") else "")
        made.caption = "\n".join(self.notes)
        made.caption_justify = "left"
        return made


def percent(values: Sequence[float]) -> str:
    """Return mean ± standard deviation of fractions, in percent, and how many there are.

    >>> percent([0.98, 0.99]), percent([0.5]), percent([])
    ('98.5 ± 0.7 (2)', '50.0 (1)', '')
    """
    if not values:
        return ""
    spread = f" ± {100 * stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * mean(values):.1f}{spread} ({len(values)})"
