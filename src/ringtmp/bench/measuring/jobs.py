"""What is to be measured, as data, and in which order. Pure."""

from __future__ import annotations

import hashlib
import random
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from ringtmp.bench.analysis.intervals import Centre
from ringtmp.bench.measuring.machine_facts import Environment

#: Stands for the interpreter in a command, so that a record names no path of one machine.
PYTHON = "python"


class Job(msgspec.Struct, frozen=True):
    """One thing to measure, whole: with the environment it decides the digest of a measurement."""

    experiment: str
    workload: str
    setting: str
    case: str
    command: tuple[str, ...]  # run in a fresh folder; PYTHON stands for the interpreter
    files: dict[str, str]  # what lies in that folder before: name -> text
    #: How to read what it leaves: a run directory, with every step of every node; a peer's line of JSON; or
    #: a line that is a result already.
    output: Literal["run", "peer", "told"]
    batch_size: int
    warm_up: int  # first steps that do not count
    centre: Centre = "median"
    processors: int = 0  # how many it may use; 0: all
    group: str = "ours"  # ours, peer or base
    options: dict[str, int | str] = {}  # what was chosen for this case, for tables

    @property
    def name(self) -> str:
        return f"{self.workload} {self.setting} {self.case}"

    @property
    def file_stem(self) -> str:
        return re.sub(r"[^a-zA-Z0-9=.]+", "-", f"{self.experiment}.{self.workload}.{self.setting}.{self.case}")

    @property
    def text(self) -> str:
        return shlex.join(self.command)


def digest(job: Job, environment: Environment) -> str:
    return hashlib.sha256(msgspec.json.encode((job, environment), order="sorted")).hexdigest()


def interleaved(jobs: Sequence[Job], repeats: int, seed: int) -> list[tuple[int, Job]]:
    """Round by round, each in an order of its own: a slow quarter of an hour hits every case alike, and none is always
    measured after the same other.

        repeat 0   b a c
        repeat 1   c a b
    """
    plan = []
    for repeat in range(repeats):
        order = list(jobs)
        random.Random(f"{seed} {repeat}").shuffle(order)
        plan += [(repeat, job) for job in order]
    return plan


def time_left_s(took_s: Mapping[str, Sequence[float]], waiting: Sequence[str]) -> float | None:
    """A job takes what it took before, on average; one never seen takes what jobs take. None before the first."""
    every = [each for times in took_s.values() for each in times]
    if not every:
        return None
    mean = sum(every) / len(every)
    return sum(sum(took_s[name]) / len(took_s[name]) if took_s.get(name) else mean for name in waiting)
