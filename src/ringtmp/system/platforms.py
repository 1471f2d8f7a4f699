"""Where RingTMP runs. Imports nothing, so that the answer comes before anything that is missing elsewhere."""

from __future__ import annotations

import sys

from ringtmp.errors import UsageError


def require_supported() -> None:
    if sys.platform not in ("linux", "darwin"):
        raise UsageError(f"RingTMP runs on Linux and macOS; this is {sys.platform}: on Windows, use WSL 2")
