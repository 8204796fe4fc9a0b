"""SIGTERM and Ctrl-C: at once where a step can be given up, later where state and position would part.

While tasks are played an interrupt ends the step under way.  From the moment in which the step's trajectories are
complete to the one in which its state, metrics and position agree again, it waits: what is saved then is a whole step.
A second Ctrl-C leaves at once, without saving.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


class Preempted(KeyboardInterrupt):
    """SIGTERM: the step under way is given up, the state after the last whole step is saved."""


class Interrupts:
    """Handlers of both signals for the time of a `with` block; `hold` and `let` bound what may not be cut short."""

    def __init__(self) -> None:
        self.pending: type[KeyboardInterrupt] | None = None
        self._held = 0
        self._before: dict[int, Any] = {}
        self.told: Callable[[], None] = lambda: None  # called as soon as a signal comes

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._received)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _received(self, number: int, _: Any) -> None:
        if number == signal.SIGINT and self.pending is KeyboardInterrupt:
            os._exit(130)
        self.pending = Preempted if number == signal.SIGTERM else KeyboardInterrupt
        self.told()
        if not self._held:
            raise self.pending

    def hold(self) -> None:
        """From here on an interrupt waits."""
        self._held += 1

    def let(self) -> None:
        """An interrupt that waited is raised now."""
        self._held = max(0, self._held - 1)
        if self.pending is not None and not self._held:
            raise self.pending

    @contextlib.contextmanager
    def as_themselves(self) -> Iterator[None]:
        """An interrupt that a library turned into an error of its own (jax does, in the middle of tracing) is raised
        as what it was."""
        try:
            yield
        except Exception as error:
            if self.pending is None or self._held:
                raise
            raise self.pending from error

    def done(self) -> None:
        """The interrupt is being dealt with: what comes now waits."""
        self._held += 1
