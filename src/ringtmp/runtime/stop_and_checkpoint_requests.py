"""What somebody asks of a run while it goes on: empty files in its directory, at which the run looks about once a second.

requests/stop          save and end, as Ctrl-C does        requests/release-3   let the device of node 3 go
requests/checkpoint    save now, and go on                 requests/detail      record a step in full, while it is fresh

Whoever may write into the run's directory may ask; nobody else can.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from pathlib import Path

FOLDER = "requests"
STOP, CHECKPOINT, DETAIL = "stop", "checkpoint", "detail"
_RELEASE = re.compile(r"release-(\d{1,6})")
#: Between two looks, which is also how often a step is recorded in full.
PAUSE_S = 1.0
#: Viewers renew their wish for detail; one that is older is nobody's any more.
FRESH_S = 6.0


def release(node: int) -> str:
    return f"release-{node}"


def released(request: str) -> int | None:
    """The node that a request lets go; None: it is another request."""
    found = _RELEASE.fullmatch(request)
    return int(found[1]) if found else None


def ask(run: Path, request: str) -> None:
    """OSError where the directory cannot be written."""
    if request not in (STOP, CHECKPOINT, DETAIL) and released(request) is None:
        raise ValueError(request)
    folder = run / FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / request).touch(mode=0o600)


class Requests:
    """Those to one run. What was asked before it began is forgotten."""

    def __init__(self, run: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = run / FOLDER
        self._clock = clock
        self._looked = clock()
        self.wants_detail = False  # of the next step
        for file in self._found():
            self._take(file)

    def taken(self) -> list[str]:
        """What was asked since the last look, each once; nothing where that was a moment ago. Detail is not among them."""
        self.wants_detail = False
        now = self._clock()
        if now - self._looked < PAUSE_S:
            return []
        self._looked = now
        asked = []
        for file in self._found():
            if file.name == DETAIL:
                self.wants_detail = self._fresh(file)
            elif self._take(file) and (file.name in (STOP, CHECKPOINT) or released(file.name) is not None):
                asked.append(file.name)
        return asked

    def _found(self) -> list[Path]:
        try:
            return sorted(self._folder.iterdir())
        except OSError:  # nobody has ever asked
            return []

    def _fresh(self, file: Path) -> bool:
        try:
            return time.time() - file.stat().st_mtime < FRESH_S
        except OSError:
            return False

    def _take(self, file: Path) -> bool:
        with contextlib.suppress(OSError):
            file.unlink()
            return True
        return False
