"""Ends this process when the one that started it is gone, however it went: for who starts commands and may be killed.

Nobody's command ends with its shell unless it was asked to: `nohup ringtmp train &` goes on. Who asks puts its own number
into the environment of what it starts, and starts it from a thread that lives as long as itself.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping

#: The number of the parent. Read once, by the process it was meant for; what that one starts has a parent of its own.
VARIABLE = "RINGTMP_END_WITH"
_PR_SET_PDEATHSIG = 1


def tied(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a command that is to end with this process."""
    return {**environment, VARIABLE: str(os.getpid())}


def end_with_parent() -> None:
    """If it was asked for, this process gets a SIGTERM when its parent ends, and does what it does for any other."""
    wanted = os.environ.pop(VARIABLE, "")
    if not wanted.isdigit() or sys.platform != "linux":
        return
    if os.getppid() == int(wanted):
        signal_at_parents_end(signal.SIGTERM)
    if os.getppid() != int(wanted) and not _exists(int(wanted)):  # it went before we asked
        os.kill(os.getpid(), signal.SIGTERM)


def signal_at_parents_end(number: int) -> None:
    """Only Linux has this. Of a parent with threads, it is the end of the one that started this process that counts."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number))


def _exists(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
