"""The page beside a run: `ringtmp watch` in a process of its own, which ends a moment after the run.

It holds nothing but its standard input, which closes when the run's process is gone, however that ends. A session of its
own: Ctrl-C is for the run.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ringtmp.errors import UsageError

#: After the run has ended: its last events are read and told, then viewers are told that this is all.
READ_S, GOODBYE_S = 1.5, 2.0
START_LIMIT_S = 30.0


@contextmanager
def page_beside(run: Path, options: list[str], tell: Callable[[str], None]) -> Iterator[None]:
    """Serves the page of a run that is about to begin. UsageError, before anything else starts, where it cannot."""
    process = subprocess.Popen(
        [sys.executable, "-m", "ringtmp", "watch", str(run), "--beside", *options],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        lines = _first_lines(process)
        if lines is None:
            said = process.stderr.read().strip().removeprefix("ringtmp: ")
            raise UsageError(said or f"the page did not start within {START_LIMIT_S:.0f} s")
        for line in lines:
            tell(line)
        yield
    finally:
        with contextlib.suppress(OSError):
            process.stdin.close()
        process.stdout.close()
        process.stderr.close()


def _first_lines(process: subprocess.Popen[str]) -> list[str] | None:
    """What it prints up to an empty line; None: it ended, or took too long."""
    assert process.stdout is not None
    killer = threading.Timer(START_LIMIT_S, process.kill)
    killer.start()
    lines: list[str] = []
    try:
        for line in process.stdout:
            if not line.strip():
                return lines
            lines.append(line.rstrip("\n"))
        return None
    finally:
        killer.cancel()


class Ending:
    """Whether the process that started this one is gone, and for how long."""

    def __init__(self) -> None:
        self._since: float | None = None
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            descriptor = sys.stdin.fileno()  # itself: who holds the lock of its buffer crashes an interpreter that ends
            while os.read(descriptor, 4096):
                pass
        self._since = time.monotonic()

    @property
    def seconds(self) -> float | None:
        return None if self._since is None else time.monotonic() - self._since
