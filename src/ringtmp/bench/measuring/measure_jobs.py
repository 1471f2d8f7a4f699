"""Perform a plan: measure what has not been measured, record what fails, keep everything at once.

What a job printed and left is turned into a result by `reading.py`; what the results mean is the experiment's business.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from ringtmp.bench.measuring import machine_facts, read_output, run_command
from ringtmp.bench.measuring.jobs import PYTHON, Job, digest
from ringtmp.bench.measuring.machine_facts import Environment
from ringtmp.bench.measuring.measurement_files import SCHEMA, Measurement, Outcome, Store
from ringtmp.errors import RingError

#: Of what a failed command said, its last characters.
ERROR_CHARACTERS = 3000
#: A lab's master prints the line for the other devices. Measurements are meant to be passed on.
_TOKEN = re.compile(r"rt1\.\S+")


#: Why a job need not be measured, given what was; None: it must be.
Needless = Callable[[Job, Sequence[Measurement]], str | None]


class Watcher(Protocol):
    """Someone who looks on: a progress bar, or nobody."""

    def begin(self, repeat: int, job: Job) -> None: ...
    def done(self, measurement: Measurement, reused: bool) -> None: ...
    def left_out(self, job: Job, why: str) -> None: ...


def perform(
    plan: Sequence[tuple[int, Job]], store: Store, environment: Environment, limit_s: float, watcher: Watcher,
    needless: Needless = lambda job, found: None,
) -> Iterator[Measurement]:  # fmt: skip
    """One measurement per entry of the plan. A measured one on disk is taken as it is; a failed one is tried again. What
    the measurements so far make `needless` is left out."""
    found: list[Measurement] = []
    for repeat, job in plan:
        known = store.load(job, repeat, digest(job, environment))
        reused = known is not None and known.outcome == "measured"
        if not reused and (why := needless(job, found)):
            watcher.left_out(job, why)
            continue
        if known is None or not reused:
            watcher.begin(repeat, job)
            known = measure(job, repeat, environment, limit_s)
            store.save(known)
        watcher.done(known, reused)
        found.append(known)
        yield known


def measure(job: Job, repeat: int, environment: Environment, limit_s: float) -> Measurement:
    """Never raises for what the command does; only the user or a full disk ends a bench."""
    at = datetime.now(UTC).isoformat(timespec="seconds")
    with tempfile.TemporaryDirectory(prefix="rtbench-") as name:
        folder = Path(name)
        for file, text in job.files.items():
            (folder / file).write_text(text)
        command = [sys.executable if word == PYTHON else word for word in job.command]
        meter = machine_facts.Meter()
        processors = machine_facts.processors(job.processors) if job.processors else ()
        finished = run_command.run(command, folder, processors, limit_s)
        stolen_s = meter.stolen_s()
        result, error = None, None
        if finished.timed_out:
            error = f"did not finish within {limit_s:g} s\n{_last_words(finished.err)}"
        elif finished.code:
            error = f"exit code {finished.code}\n{_last_words(finished.err)}"
        else:
            try:
                result = read_output.read(job, finished.out, folder)
            except RingError as problem:
                error = f"{problem}\n{_last_words(finished.err)}"
    outcome: Outcome = "measured" if result else "timed out" if finished.timed_out else "failed"
    return Measurement(
        schema=SCHEMA, job=job, repeat=repeat, digest=digest(job, environment), environment=environment, at=at,
        wall_s=finished.wall_s, load_before=meter.load_before, busy_before=meter.busy_before, stolen_s=stolen_s,
        outcome=outcome, error=error, result=result,
    )  # fmt: skip


def _last_words(err: str) -> str:
    return _TOKEN.sub("rt1.…", err).strip()[-ERROR_CHARACTERS:]
