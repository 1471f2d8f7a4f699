"""The command line: in a process of its own, where the claim is about processes, and in this one, where torch is loaded."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

from ringtmp import cli

CLI = [sys.executable, "-m", "ringtmp"]
#: Dropout, BatchNorm, AdamW, clipping and a schedule, all of which remember something.
REMEMBERING = (
    "--model", "mine.py:model", "--optimizer", "adamw", "--clip-norm", 1, "--lr-schedule", "cosine:warmup=5", "--json",
    "--quiet",
)  # fmt: skip


def remembering_model(width: int) -> str:
    """The text of mine.py."""
    return f"""
from torch import nn

def model():
    yield nn.Sequential(nn.Flatten(), nn.Linear(64, {width}), nn.BatchNorm1d({width}))
    for _ in range(4):
        yield nn.Sequential(nn.Linear({width}, {width}), nn.BatchNorm1d({width}), nn.ReLU(), nn.Dropout(0.2))
    yield nn.Linear({width}, 10)
"""


def ringtmp(
    *args: object, cwd: Path, code: int = 0, timeout: float = 100, **options: Any
) -> subprocess.CompletedProcess[str]:
    """To its end, in a process of its own."""
    done = subprocess.run(
        [*CLI, *map(str, args)], cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False, **options
    )
    return _checked(done, code)


def here(*args: object, cwd: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    """The same without a new process for the master: three seconds of loading torch and its exporter less."""
    out, err, ended = io.StringIO(), io.StringIO(), 0
    with contextlib.chdir(cwd), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            with mock.patch.object(sys, "argv", ["ringtmp", *map(str, args)]):
                cli.main()
        except SystemExit as end:
            ended = int(end.code or 0)
    return _checked(subprocess.CompletedProcess(args, ended, out.getvalue(), err.getvalue()), code)


def _checked(done: subprocess.CompletedProcess[str], code: int) -> subprocess.CompletedProcess[str]:
    assert done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def begin(*args: object, cwd: Path) -> subprocess.Popen[str]:
    """A process to watch and to disturb; a session of its own, as in a terminal of its own."""
    return subprocess.Popen(
        [*CLI, *map(str, args)],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for_step(run: Path, step: int, process: subprocess.Popen[str], limit_s: float = 100) -> None:
    """Until the run's events tell of this step."""
    limit = time.monotonic() + limit_s
    while time.monotonic() < limit:
        if process.poll() is not None:
            said = [each.read_text() for each in run.parent.glob("master.err")]
            said += [pipe.read() for pipe in (process.stdout, process.stderr) if pipe is not None]
            raise AssertionError(f"ended too early with code {process.returncode}: {said}")
        log = run / "events.jsonl"
        if log.exists() and b'"type":"step","at"' in (content := log.read_bytes()):
            steps = [line for line in content.splitlines() if line.startswith(b'{"type":"step"')]
            if len(steps) > step:
                return
        time.sleep(0.05)
    raise AssertionError(f"no step {step} within {limit_s:.0f} seconds")


def workers_of(process: subprocess.Popen[str]) -> dict[int, psutil.Process]:
    """Children in the order they were started: node 1, 2, ..."""
    children = sorted(psutil.Process(process.pid).children(), key=lambda child: child.pid)
    return {index + 1: child for index, child in enumerate(children)}


def assert_all_gone(processes: list[psutil.Process]) -> None:
    _gone, alive = psutil.wait_procs(processes, timeout=20)  # a moment, but for a machine with much else to do
    assert not alive, f"orphans: {alive}"
