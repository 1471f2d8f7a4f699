"""Run one command under a time limit, in a session of its own, and leave nothing of it behind on any way out."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

import ringtmp
from ringtmp.system.end_with_parent import tied
from ringtmp.system.signals import WISHES, on_signals

#: A lab lets its master end the step and save, then takes down its networks; who takes longer is ended by force.
STOP_LIMIT_S = 60.0
#: In the environment of a command and of all it starts, whatever session they are in and whoever their parent is by then.
MARK = "RINGTMP_BENCH_MARK"
#: How a line of one of a lab's devices begins.
_DEVICE = re.compile(r"[a-z0-9][a-z0-9-]*: ringtmp node: ")
_KEPT = ("RINGTMP_CONFIG", "RINGTMP_WATTS", "RINGTMP_METER")


@dataclass(frozen=True)
class Finished:
    code: int
    out: str
    err: str
    wall_s: float
    timed_out: bool


def run(command: Sequence[str], folder: Path, processors: Sequence[int], limit_s: float) -> Finished:
    """`processors` are those it may use; empty means all. Output goes through files: nobody has to empty a pipe."""
    out, err = folder / "stdout", folder / "stderr"
    mark = secrets.token_hex(8)
    began = time.monotonic()
    with out.open("wb") as out_file, err.open("wb") as err_file, _placed_on(processors):
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=out_file,
            stderr=err_file,
            env=_environment(mark),
            start_new_session=True,  # Ctrl-C reaches the bench alone, which then ends the whole group
        )
    timed_out = False
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        timed_out = True
    finally:
        wall_s = time.monotonic() - began
        _stop(process, mark)
    return Finished(
        process.returncode, out.read_text(errors="replace"), err.read_text(errors="replace"), wall_s, timed_out
    )


def last_line(said: str | None, most: int = 300) -> str:
    """What a command said last, which is why it failed; what a lab's devices say after its master is none of it."""
    lines = [line.strip() for line in (said or "").splitlines() if line.strip()]
    own = [line for line in lines if not _DEVICE.match(line)]
    return (own or lines)[-1][:most] if lines else "nothing was said"


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP end a bench as Ctrl-C does."""

    def interrupt(number: int, frame: object) -> None:
        os.write(2, b"\nringtmp bench: stopping what runs, up to a minute\n")  # safe in a handler, unlike print
        raise KeyboardInterrupt

    with on_signals(interrupt):
        yield


def marked(mark: str) -> list[psutil.Process]:
    """Living processes that come from the command with this mark."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark:
                found.append(process)
    return found


def _of_group(group: int, found: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Those who have heard what the group was told."""
    heard = []
    for each in found:
        with contextlib.suppress(OSError):
            if os.getpgid(each.pid) == group:
                heard.append(each)
    return heard


def _stop(process: subprocess.Popen[bytes], mark: str) -> None:
    """Everything that carries the mark is gone when it returns. Signals wait meanwhile."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, WISHES)
    try:
        if process.poll() is None:
            _signal_group(process.pid, signal.SIGTERM)
            limit = time.monotonic() + STOP_LIMIT_S
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_LIMIT_S)
            # The one that was started may be gone at once, and the lab it had started still be taking its networks down.
            psutil.wait_procs(_of_group(process.pid, marked(mark)), timeout=max(0.0, limit - time.monotonic()))
        _signal_group(process.pid, signal.SIGKILL)
        process.wait()
        # Again until none is left: one may have been starting another while we looked.
        limit = time.monotonic() + STOP_LIMIT_S
        while (left := marked(mark)) and time.monotonic() < limit:
            for each in left:
                with contextlib.suppress(psutil.Error):
                    each.kill()
            psutil.wait_procs(left, timeout=1.0)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _environment(mark: str) -> dict[str, str]:
    """Without any other RINGTMP_…: a setting from the caller's environment would be part of no record; but for the folder of
    keys, by which devices that joined know their master, and what this device draws, which the record tells. And with
    this very package on the path: a command runs in another folder, where a relative path would lead elsewhere."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("RINGTMP_") or key in _KEPT}
    paths = [str(Path(ringtmp.__file__).resolve().parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return tied(kept | {MARK: mark, "PYTHONPATH": os.pathsep.join(paths)})


@contextlib.contextmanager
def _placed_on(processors: Sequence[int]) -> Iterator[None]:
    """A process started inside inherits these processors; this thread has its own back afterwards."""
    if not processors or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, processors)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
