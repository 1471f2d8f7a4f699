"""Commands that scripts/measure_gpu.py starts: each ends within its limit, with all it has started."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

_TOKEN = re.compile(r"ringtmp node --join (rt1\.\S+)")


def run(words: list[str], cwd: Path, limit_s: float, **environment: str) -> tuple[str, str, str]:
    """Its output, why there is none, and what it said beside it. What it has started ends with it."""
    process = subprocess.Popen(
        words, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, **environment},
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        end(process)
        out, err = process.communicate()
        return "", f"no end within {limit_s:.0f} s: {err[-600:]}", err
    finally:
        end(process)
    if process.returncode == 0:
        return out, "", err
    return "", err[-800:] or f"exit status {process.returncode}", err


def end(process: subprocess.Popen[Any]) -> None:
    """With all it has started: torchrun's ranks have sessions of their own."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        found = psutil.Process(process.pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for each in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()


@contextlib.contextmanager
def started(words: list[str], cwd: Path, home: Path, **streams: Any) -> Iterator[subprocess.Popen[Any]]:
    """With a home of its own, as on a device of its own; ended with what it has started."""
    home.mkdir()
    process = subprocess.Popen(words, cwd=cwd, start_new_session=True, env={**os.environ, "HOME": str(home)}, **streams)
    try:
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        end(process)
        process.wait()


def free_port() -> int:
    """The next one is taken, too."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def awaited(said: Path, master: subprocess.Popen[Any], limit_s: float) -> str | None:
    limit = time.monotonic() + limit_s
    while time.monotonic() < limit and master.poll() is None:
        if found := _TOKEN.search(said.read_text()):
            return found[1]
        time.sleep(0.2)
    return None
