"""Ctrl-C and SIGTERM: noted, so that a run can finish its step, save, and end."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from primal.training import distributed


class Interrupted(Exception):
    """Ctrl-C or SIGTERM came; the state is saved."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Signals:
    """Which signal came last; a second Ctrl-C ends the run at once."""

    received: int | None = None

    @contextmanager
    def noted(self) -> Iterator[None]:
        try:
            before = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # only the main thread may listen
            before = {}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        # torchrun passes on what its processes got already: there, more than one says no more.
        if number == self.received == signal.SIGINT and distributed.size() == 1:
            raise KeyboardInterrupt
        self.received = number
