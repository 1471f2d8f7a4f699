"""What to do when somebody wants this process to end."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

#: Ctrl-C, a wish of the system, a terminal that is closed.
WISHES = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def on_signals(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """`handle` them meanwhile, but for a closed terminal where that was to be ignored (nohup)."""
    wishes = [each for each in WISHES if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN]
    before = {each: signal.signal(each, handle) for each in wishes}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
