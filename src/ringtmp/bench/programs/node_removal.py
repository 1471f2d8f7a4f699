"""Start a training, take a node away at a step, see what happens; the outcome is a result, whatever it is.

    process   one compute process is killed; a fresh one may take its place
    device    everything on one device of a lab is killed, for good
    pause     everything on one device is stopped, and goes on some seconds later
    master    the master is killed, and the run resumed

The master's clock is this process's clock, so events and the moment of removal are on one time line.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import msgspec
import psutil

from ringtmp.bench.measuring.measurement_files import Result
from ringtmp.bench.measuring.read_output import RUN
from ringtmp.bench.measuring.run_command import MARK, last_line
from ringtmp.bench.programs.end_started_processes import end
from ringtmp.errors import RingError
from ringtmp.metrics import events
from ringtmp.metrics.fold_events import Part, parts_of
from ringtmp.metrics.summary import of_parts
from ringtmp.system.end_with_parent import end_with_parent, tied

LOOK_S = 0.02
#: No run here needs longer to reach the step; the bench has a limit of its own above this.
STEP_LIMIT_S = 300.0
END_LIMIT_S = 600.0


class Removal(msgspec.Struct, frozen=True):
    words: tuple[str, ...]  # of ringtmp
    what: Literal["process", "device", "pause", "master"]
    node: int  # by its number in the run
    step: int
    pause_s: float = 0.0
    device: str = ""  # empty: the one the node is on


def main() -> None:
    end_with_parent()  # and what is started here with this
    removal = msgspec.json.decode(sys.argv[1], type=Removal)
    sys.stdout.write(msgspec.json.encode(perform(removal, Path(RUN))).decode() + "\n")


def perform(removal: Removal, run: Path) -> Result:
    process = _start(removal.words)
    removed_at: float | None = None
    try:
        if _reaches(process, run / "events.jsonl", removal.step):
            removed_at = _remove(removal, process, run)
            if removal.what == "master":
                process.wait(END_LIMIT_S)
                process = _start(("train", "--resume", str(run), "--json", "--quiet"))
        try:
            _, err = process.communicate(timeout=END_LIMIT_S)
        except subprocess.TimeoutExpired:  # it hangs: an answer as any other
            end(process)
            err = f"did not finish within {END_LIMIT_S:g} s".encode()
    finally:
        if process.poll() is None:
            end(process)
    parts = parts_of(events.read(run / "events.jsonl"))
    step_s = tuple(each.wall_s for part in parts for each in part.steps)
    return Result(step_s, describe(parts, removed_at, process.returncode, err.decode(errors="replace")))


def describe(parts: Sequence[Part], removed_at: float | None, code: int, err: str) -> dict[str, Any]:
    """What the run's events say of it. Pure. Times in seconds from the removal."""
    summary = of_parts(parts, "") if parts else None
    facts: dict[str, Any] = {
        "code": code,
        "outcome": summary.outcome if summary else "never began",
        "error": None if code == 0 else last_line(err),
        "accuracy": summary.accuracy if summary else None,
        "weights_sha256": summary.weights_sha256 if summary else None,
        "steps": summary.steps if summary else 0,
        "nodes": summary.nodes if summary else 0,
        "removed": removed_at is not None,
    }
    if removed_at is None:
        return facts
    done = [each for part in parts for each in part.every_step]
    before = [event for event in done if event.at <= removed_at]
    facts["timeline"] = [(event.at - removed_at, event.step) for event in done]
    losses = [each for part in parts for each in part.recoveries if each.at > removed_at and each.lost]
    starts = [part.started for part in parts if part.started.at > removed_at]
    reached = max((event.step for event in before), default=-1) + 1
    if losses:
        laid_out = losses[0].at
        facts |= {"notice_s": max(0.0, laid_out - losses[0].seconds - removed_at), "repeated": losses[0].repeated}
        facts["source"] = losses[0].source
    elif starts:
        laid_out = starts[0].at
        facts |= {"notice_s": None, "repeated": max(0, reached - starts[0].first_step), "source": "checkpoint"}
    else:  # nobody noticed: it went on without, or never again
        laid_out = removed_at
        facts |= {"notice_s": None, "repeated": 0, "source": "nothing"}
    ends = [event.at for event in done]
    again = [at for at in ends if at > laid_out]
    # The longest time without the end of a step, of those that end after the removal.
    gap = max(((b - a, b) for a, b in pairwise(ends) if b > removed_at), default=None)
    facts["pause_s"] = gap[0] if gap else None
    if not losses and not starts and gap:  # it stumbled there, if anywhere
        again = [gap[1]]
    facts["again_s"] = min(again) - removed_at if again else None
    return facts


def _start(words: tuple[str, ...]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", "ringtmp", *words]
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=tied(os.environ)
    )


def _reaches(process: subprocess.Popen[bytes], log: Path, step: int) -> bool:
    """Wait for the end of a step; False if the run ends before it."""
    limit = time.monotonic() + STEP_LIMIT_S
    while process.poll() is None and time.monotonic() < limit:
        if log.exists() and any(isinstance(each, events.StepDone) and each.step >= step for each in events.read(log)):
            return True
        time.sleep(LOOK_S)
    return False


def _remove(removal: Removal, process: subprocess.Popen[bytes], run: Path) -> float:
    targets = _targets(removal, process, run)
    if not targets:
        raise RingError(f"found no process or device of node {removal.node} to remove")
    at = time.monotonic()
    for target in targets:
        with contextlib.suppress(psutil.Error):
            target.suspend() if removal.what == "pause" else target.kill()
    if removal.what == "pause":
        time.sleep(removal.pause_s)
        for target in targets:
            with contextlib.suppress(psutil.Error):
                target.resume()
    return at


def _targets(removal: Removal, process: subprocess.Popen[bytes], run: Path) -> list[psutil.Process]:
    if removal.what == "master":
        return [psutil.Process(process.pid)]
    if removal.what == "process":
        return [_process(removal.node, run)]
    # Which device a node is on is the order of joining; its process knows.
    device = removal.device or _process(removal.node, run).environ()["RINGTMP_DEVICE"]
    found = []
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            environment = each.environ()
            mine = environment.get(MARK) == os.environ.get(MARK)
            if mine and environment.get("RINGTMP_DEVICE") == device:
                found.append(each)
    return found


def _process(node: int, run: Path) -> psutil.Process:
    started = [each for each in events.read(run / "events.jsonl") if isinstance(each, events.NodeStarted)]
    return psutil.Process(next(each.pid for each in reversed(started) if each.node == node))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    main()
