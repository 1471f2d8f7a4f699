"""Starting and ending a compute process: orders go in by its standard input, and closing that is the sign to go."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil

from ringtmp.errors import UsageError
from ringtmp.launch.compute import Orders

STOP_LIMIT_S = 3.0


def spawn(orders: Orders, log: Path) -> subprocess.Popen[bytes]:
    """A session of its own, so that Ctrl-C reaches its parent alone. Over TCP its first line of output is awaited."""
    environment = dict(os.environ, OMP_NUM_THREADS=str(orders.threads), PYTHONUNBUFFERED="1")
    environment.pop("RINGTMP_TOKEN", None)  # the agent's business alone
    try:
        with log.open("ab") as file:
            child = subprocess.Popen(
                # -P: the user's folder is not on the path, so no file of theirs can be imported by accident.
                [sys.executable, "-P", "-m", "ringtmp.launch.compute"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if orders.secure else file,
                stderr=file,
                env=environment,
                start_new_session=True,
            )
    except OSError as error:
        raise UsageError(f"cannot start a process for node {orders.node}: {error.strerror}") from error
    assert child.stdin is not None
    child.stdin.write(msgspec.json.encode(orders) + b"\n")
    child.stdin.flush()
    return child


def let_go(child: subprocess.Popen[bytes]) -> None:
    """The sign to go; several can be told before the first is waited for."""
    assert child.stdin is not None
    with contextlib.suppress(OSError):
        child.stdin.close()


def end(child: subprocess.Popen[bytes]) -> None:
    """Gone when it returns, willing or not."""
    let_go(child)
    try:
        child.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
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


def last_words(log: Path | None) -> str:
    """The last line a process wrote, for the error that tells of its end."""
    try:
        lines = log.read_text(errors="replace").strip().splitlines() if log is not None else []
    except OSError:
        return ""
    return lines[-1][:300] if lines else ""
