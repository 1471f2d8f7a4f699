"""End what a runner has started, in such a way that a lab can take its networks down."""

from __future__ import annotations

import subprocess

STOP_LIMIT_S = 50.0  # a bench that stops a runner gives it a minute


def end(process: subprocess.Popen[bytes]) -> None:
    """Gone when it returns, with what it has said taken in."""
    process.terminate()
    try:
        process.communicate(timeout=STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
