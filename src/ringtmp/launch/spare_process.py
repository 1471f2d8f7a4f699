"""A compute process kept ready for the place of one that dies: it has loaded torch, which takes longer than all the rest
of healing, and waits for its orders.

It takes no part in a plan's memory forecast because it gives way: none is started unless several times its size is free,
and it ends when memory becomes short. Its parent's end is its own: what it waits for is a line from its parent's pipe.
"""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from ringtmp.errors import UsageError
from ringtmp.launch.compute_process import LOADED, SPARE, Orders
from ringtmp.launch.start_process import give, is_stopped, let_go, make_room_for, start
from ringtmp.plan.memory_forecast import PROCESS_BYTES
from ringtmp.system.resources import machine_free_bytes

#: Of training: a short run needs none, and loading one beside it slows its steps; nor does a run that loses nodes faster
#: than they load.
AFTER_S = 5.0
LOOK_EVERY_S = 1.0
#: After one that something ended, the next; then twice as long.
AGAIN_S = 30.0
#: So many times its size must be free before it is started, and once its size for it to stay.
ROOM = 4


class Spare:
    """At most one process. Whoever has it must `mind` it now and then, and `end` it."""

    def __init__(
        self, threads: int, free_bytes: Callable[[], int] = machine_free_bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._threads = threads
        self._free_bytes = free_bytes
        self._clock = clock
        self._child: subprocess.Popen[bytes] | None = None
        self._due: float | None = None  # nobody has minded it yet
        self._pause_s = AGAIN_S
        self._loaded = False

    @property
    def loaded(self) -> bool:
        """Whether there is one that only has to be told its orders."""
        if self._child is None or not _fit(self._child):
            return False
        if not self._loaded:
            assert self._child.stdout is not None
            with contextlib.suppress(BlockingIOError):
                self._loaded = bool(os.read(self._child.stdout.fileno(), len(LOADED)))
        return self._loaded

    def hurry(self) -> None:
        """One is needed, as soon as it has loaded."""
        if self._child is not None and not _fit(self._child):
            self.end()
        if self._child is None:
            self._start()

    def _start(self) -> None:
        self._due = self._clock() + LOOK_EVERY_S
        try:
            self._child, self._loaded = start(None, self._threads, False, SPARE), False
        except UsageError:  # the run does not depend on it
            self._due = math.inf
            return
        assert self._child.stdout is not None
        os.set_blocking(self._child.stdout.fileno(), False)

    def mind(self) -> None:
        """Start one when it is time and there is room; let it go when there is not. The first call begins the wait."""
        now = self._clock()
        if self._due is None:
            self._due = now + AFTER_S
        if now < self._due:
            return
        self._due = now + LOOK_EVERY_S
        if self._child is None:
            if self._free_bytes() >= ROOM * PROCESS_BYTES:
                self._start()
        elif not _fit(self._child):  # something ended or stopped it, and may again
            self.end()
            self._due, self._pause_s = now + self._pause_s, 2 * self._pause_s
        elif self._free_bytes() < PROCESS_BYTES:
            self.end()

    def take(self, orders: Orders, log: Path) -> subprocess.Popen[bytes] | None:
        """The process, with its orders; from here on it is the caller's, and writes to `log`. None: there is none."""
        self._due = None
        if self._child is None or not _fit(self._child):
            self.end()
            return None
        child, self._child = self._child, None
        assert child.stdout is not None
        child.stdout.close()
        make_room_for(log)
        give(child, msgspec.structs.replace(orders, log=str(log)))
        return child

    def end(self) -> None:
        """It has nothing to save, and while it loads it does not listen."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait()
            let_go(child)
            assert child.stdout is not None
            child.stdout.close()


def _fit(child: subprocess.Popen[bytes]) -> bool:
    """Whether it could take orders. One that is stopped would be noticed only after the limit, as a second loss."""
    return child.poll() is None and not is_stopped(child.pid)
