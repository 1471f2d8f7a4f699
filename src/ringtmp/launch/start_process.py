"""Starting and ending a compute process: orders go in by its standard input, and closing that is the sign to go."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import msgspec
import psutil

from ringtmp import untrusted
from ringtmp.errors import UsageError
from ringtmp.launch.compute_process import LEAVE, SPARE, Orders

STOP_LIMIT_S = 3.0
#: While a process is ending.
LOOK_EVERY_S = 0.2


def spawn(orders: Orders, log: Path) -> subprocess.Popen[bytes]:
    """A compute process that has its orders. Over TCP its first line of output is awaited."""
    child = start(log, orders.threads, orders.secure)
    give(child, orders)
    return child


def start(log: Path | None, threads: int, secure: bool, *words: str) -> subprocess.Popen[bytes]:
    """One that waits for orders; a session of its own, so that Ctrl-C reaches its parent alone."""
    environment = dict(os.environ, OMP_NUM_THREADS=str(threads), PYTHONUNBUFFERED="1")
    environment.pop("RINGTMP_TOKEN", None)  # the agent's business alone
    try:
        with _opened(log) as file:
            return subprocess.Popen(
                # -P: the user's folder is not on the path, so no file of theirs can be imported by accident.
                [sys.executable, "-P", "-m", "ringtmp.launch.compute_process", *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if secure or SPARE in words else file,
                stderr=file,
                env=environment,
                start_new_session=True,
            )
    except OSError as error:
        raise UsageError(f"cannot start a compute process: {error.strerror}") from error


def _opened(log: Path | None) -> IO[bytes]:
    """Its folder is made again if somebody removed it. A log that cannot be written costs the log, not the run."""
    if log is not None:
        with contextlib.suppress(OSError):
            return make_room_for(log).open("ab")
    return open(os.devnull, "ab")


def make_room_for(log: Path) -> Path:
    with contextlib.suppress(OSError):
        log.parent.mkdir(parents=True, exist_ok=True)
    return log


def give(child: subprocess.Popen[bytes], orders: Orders) -> None:
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has died: whoever looks after it will see
        child.stdin.write(msgspec.json.encode(orders) + b"\n")
        child.stdin.flush()


def let_go(child: subprocess.Popen[bytes]) -> None:
    """The sign to go; several can be told before the first is waited for."""
    assert child.stdin is not None
    with contextlib.suppress(OSError):
        child.stdin.close()


def ask_to_leave_snapshots(child: subprocess.Popen[bytes]) -> None:
    """In its folder, when it ends: another process will take its place."""
    assert child.stdin is not None
    with contextlib.suppress(OSError):
        child.stdin.write(LEAVE)
        child.stdin.flush()


def end(
    child: subprocess.Popen[bytes], limit_s: float = STOP_LIMIT_S, meanwhile: Callable[[], None] = lambda: None
) -> None:
    """Gone when it returns, willing or not. `meanwhile` is called several times a second."""
    let_go(child)
    limit = time.monotonic() + limit_s
    while child.poll() is None and (left_s := limit - time.monotonic()) > 0:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(min(left_s, LOOK_EVERY_S))
        meanwhile()
    if child.poll() is None:
        child.kill()
        child.wait()
    if child.stdout is not None:
        child.stdout.close()


def is_stopped(pid: int) -> bool:
    """Whether somebody stopped it (SIGSTOP, Ctrl-Z, a debugger)."""
    try:
        return bool(psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP))
    except psutil.Error:
        return False


def signal_name(number: int) -> str:
    """SIGKILL, or a number where Python has no name for it, as for real-time signals."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def by_whom(number: int) -> str:
    """Who may have sent a signal that killed a process, for the line that tells of its end."""
    return " (by someone, or by the system because memory ran out)" if number == signal.SIGKILL else ""


def last_words(log: Path | None) -> str:
    """The last line a process wrote, for the error that tells of its end."""
    try:
        lines = log.read_text(errors="replace").strip().splitlines() if log is not None else []
    except OSError:
        return ""
    return untrusted.line(lines[-1], 300) if lines else ""
