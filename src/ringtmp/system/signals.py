"""What to do when somebody wants this process to end."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

#: The exit code.
INTERRUPTED = 130
#: Ctrl-C, a wish of the system, a terminal that is closed.
WISHES = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def on_signals(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """`handle` them meanwhile, but for a closed terminal where that was to be ignored (nohup)."""
    wishes = [each for each in WISHES if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN]
    with _handled(wishes, handle):
        yield


@contextmanager
def _handled(wishes: Sequence[int], handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = {each: signal.signal(each, handle) for each in wishes}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@contextmanager
def held(nothing_started: bool) -> Iterator[None]:
    """Around large imports, in which nothing may be raised: modules would stay half made, and some of torch's code swallows
    whatever comes. Where nothing has been started, the process leaves at once; elsewhere a wish is granted when the import
    is done, and a second one at once."""
    wishes: list[int] = []
    if threading.current_thread() is threading.main_thread():  # no other may ask for signals
        wishes = [each for each in WISHES if callable(signal.getsignal(each))]
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if nothing_started or noted:
            os.write(2, b"ringtmp: interrupted\n")
            os._exit(INTERRUPTED)
        noted.append(number)

    with _handled(wishes, note):
        yield
    for number in noted:
        signal.raise_signal(number)
