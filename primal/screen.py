"""What a person sees of a run: a live line in a terminal, plain lines elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, final

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from primal.training.loop import Shown

LINES = 10  # for a whole run, where there is no terminal
SHOWN = ("validation/accuracy", "validation/error", "test/accuracy")


@final
class Screen:
    """Shows epoch, loss, objective, accuracy, speed and the time left."""

    def __init__(self, *, shown: bool = True) -> None:
        self.console = Console(quiet=not shown, highlight=False)
        self._live = Live(console=self.console, refresh_per_second=8, transient=True)
        self._last: dict[str, float] = {}
        self._epochs = self._steps = 0

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.console.is_terminal:
            self._live.__exit__(kind, error, trace)

    def stage(self, what: str, epochs: int = 0) -> None:
        """Say what begins, and how many epochs it takes, if it is training."""
        self._epochs, self._last = epochs, {}
        if self.console.is_terminal:
            self._live.update(Text(""))
        self.console.print(f"[dim]{what}[/dim]")

    def step(self, epoch: int, step: int, steps: int, shown: Shown) -> None:
        if not self.console.is_terminal:
            return
        self._steps = steps
        self._show(
            (epoch - 1) * steps + step,
            f"epoch {epoch:>{len(str(self._epochs))}}/{self._epochs}",
            *described(shown.loss, shown.ksvd, shown.score),
            f"{shown.samples_per_second:,.0f} cases/s",
            f"{clock(shown.seconds_left)} left",
        )

    def epoch(self, row: dict[str, Any]) -> None:
        self._last = {name: value for name, value in row.items() if name in SHOWN}
        number, every = row["epoch"], max(1, self._epochs // LINES)
        last = number == self._epochs
        if last or not (self.console.is_terminal or number % every):
            parts = described(row["train/loss"], row["train/ksvd"], row["train/score"])
            measured = [f"{name} {value:.4f}" for name, value in self._last.items()]
            text = "  ".join([*parts, *measured, f"{row['seconds']:.1f} s"])
            if self.console.is_terminal:
                self._live.update(Text(""))
            self.console.print(f"epoch {number:>{len(str(self._epochs))}}/{self._epochs}  {text}")

    def _show(self, done: int, first: str, *others: str) -> None:
        line = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=self._epochs * self._steps, completed=done, width=20)
        measured = [f"{name} {value:.4f}" for name, value in self._last.items()]
        line.add_row(first, bar, *others, *measured)
        self._live.update(line)


def described(loss: float, objective: float, score: float) -> list[str]:
    return [f"loss {loss:.4f}", f"J² {objective:.1e}", f"train {score:.4f}"]


def clock(seconds: float) -> str:
    """Return hours, minutes and seconds.

    >>> clock(75.2)
    '1:15'
    """
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
