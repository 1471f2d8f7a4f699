"""A limit on one piece of work: a graph that does not end costs its compute process, not the device and not the ring.

Nothing can stop a kernel from outside its thread. So a second thread looks at the clock and ends the process, with a
sentence that its parent passes on. The agent, a process of its own, answers all the while.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

#: No honest microbatch takes this long: the master gives a silent node up long before.
WORK_LIMIT_S = 900.0
#: The exit code of a process that was ended by its own watchdog.
TOO_LONG = 124


class Watchdog:
    """`with watchdog:` around each piece of work. `where` says in which step, for the sentence."""

    def __init__(self, where: Callable[[], int], limit_s: float = WORK_LIMIT_S) -> None:
        self._where = where
        self._limit_s = limit_s
        self._since: float | None = None
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def __enter__(self) -> None:
        self._since = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._since = None

    def _watch(self) -> None:
        while True:
            time.sleep(min(1.0, self._limit_s / 4))
            since = self._since
            if since is not None and time.monotonic() - since > self._limit_s:
                print(
                    f"step {self._where()}: one piece of work took longer than {self._limit_s:g} s, so its graph "
                    "probably never ends; stopping this process",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(TOO_LONG)
