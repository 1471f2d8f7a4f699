"""Measurements on disk: one JSON file each, whole or not there, with everything needed to repeat it."""

from __future__ import annotations

import fcntl
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from ringtmp.bench.measuring.jobs import Job
from ringtmp.bench.measuring.machine_facts import Environment
from ringtmp.bench.measuring.run_command import last_line
from ringtmp.bench.measuring.run_record import Record, from_facts
from ringtmp.errors import RingError, UsageError
from ringtmp.report.page_content import Skipped
from ringtmp.system.files import write_atomic

SCHEMA = 1
Outcome = Literal["measured", "failed", "timed out"]


class Result(msgspec.Struct, frozen=True):
    """What a job gave: seconds per counted step, and whatever else it said of itself."""

    step_s: tuple[float, ...]
    facts: dict[str, Any] = {}


class Measurement(msgspec.Struct, frozen=True):
    schema: int
    job: Job
    repeat: int
    digest: str
    environment: Environment
    at: str  # when it began, UTC
    wall_s: float  # start-up and end included
    load_before: float  # of the last minute, over the whole machine; the measurement before counts, too
    busy_before: float  # share of all processors that others used in the half second before
    stolen_s: float | None  # CPU time the hypervisor gave to others meanwhile
    outcome: Outcome
    error: str | None
    result: Result | None

    @property
    def stolen_share(self) -> float:
        """Of all the CPU time there was."""
        return (self.stolen_s or 0.0) / max(1e-9, self.wall_s * self.environment.cores)


class Store:
    """A folder of measurements, used by one bench at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._measurements = folder / "measurements"
        try:
            self._measurements.mkdir(parents=True, exist_ok=True)
            self._lock = (folder / ".lock").open("w")
        except OSError as error:
            raise UsageError(f"--out {folder} cannot be used: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise UsageError(f"another bench is writing to {folder}: wait for it, or choose another --out") from error

    def close(self) -> None:
        self._lock.close()

    def path(self, job: Job, repeat: int) -> Path:
        return self._measurements / f"{job.file_stem}.{repeat}.json"

    def load(self, job: Job, repeat: int, digest: str) -> Measurement | None:
        """None if there is none, if it is damaged, or if it is of another job or environment."""
        try:
            found = msgspec.json.decode(self.path(job, repeat).read_bytes(), type=Measurement)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return None
        same = found.schema == SCHEMA and found.digest == digest and found.repeat == repeat
        # A runner's result is whole without steps: how large a model may be has none.
        counted = found.result is not None and (found.result.step_s or found.job.output == "told")
        whole = bool(counted) if found.outcome == "measured" else True
        return found if same and whole else None

    def save(self, measurement: Measurement) -> None:
        path = self.path(measurement.job, measurement.repeat)
        try:
            write_atomic(path, msgspec.json.format(msgspec.json.encode(measurement)) + b"\n")
        except OSError as error:
            raise RingError(
                f"{path} cannot be written: {error.strerror}; what was measured before is kept, and the same command "
                "goes on from there"
            ) from error


class Measured:
    """Measurements by what they measured."""

    def __init__(self, measurements: Sequence[Measurement]) -> None:
        self._by_stem: dict[str, list[Measurement]] = {}
        self._records: dict[str, list[Record]] = {}  # several sections ask for the same
        for each in measurements:
            self._by_stem.setdefault(each.job.file_stem, []).append(each)

    def every(self, job: Job) -> list[Measurement]:
        """Its repeats, failed ones too."""
        return self._by_stem.get(job.file_stem, [])

    def results(self, job: Job) -> list[Result]:
        """Of the repeats that were measured."""
        return [each.result for each in self.every(job) if each.result is not None]

    def records(self, job: Job) -> list[Record]:
        if job.file_stem not in self._records:
            self._records[job.file_stem] = [from_facts(each.facts) for each in self.results(job)]
        return self._records[job.file_stem]

    def facts(self, job: Job) -> list[Mapping[str, object]]:
        return [each.facts for each in self.results(job)]

    def missing(self, jobs: Iterable[Job]) -> tuple[Skipped, ...]:
        """Those with a problem, and which."""
        return tuple(Skipped(each.name, why) for each in jobs if (why := self.problem(each)))

    def problem(self, job: Job) -> str | None:
        """Why there is nothing to see, or less than there should be."""
        known = self.every(job)
        failed = [each for each in known if each.result is None]
        if not known:
            return "not measured: the bench was interrupted before it"
        if not failed:
            return None
        why = f"{failed[0].outcome}: {last_line(failed[0].error)}"
        return why if len(failed) == len(known) else f"{len(failed)} of {len(known)} repeats are missing, {why}"
