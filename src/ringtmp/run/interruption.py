"""Ctrl-C, SIGTERM and a closed terminal, as a question that a run asks itself between two steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from ringtmp.system.signals import on_signals


class Interruption:
    """Whether the user wants to stop. Once armed, the first signal asks and the second insists."""

    def __init__(self) -> None:
        self.armed = False
        self.asked = False
        self.deaf = False  # the run is being ended already

    def __call__(self) -> bool:
        return self.asked

    def handle(self, number: int, frame: FrameType | None) -> None:
        # A shell that goes sends its own, and the terminal another: nobody insists.
        if self.deaf or (self.asked and number == signal.SIGHUP):
            return
        again, self.asked = self.asked, True  # also where something swallows what is raised here
        if not self.armed or again:
            raise KeyboardInterrupt


@contextmanager
def interruptible() -> Iterator[Interruption]:
    """Ctrl-C, SIGTERM and a closed terminal become a question while the ring trains. Only the main thread may ask for
    signals."""
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    with on_signals(interruption.handle):
        yield interruption
