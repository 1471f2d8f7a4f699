"""Real kills by seed: runs of local processes lose workers, spares and masters at moments drawn from a number, and end with the
bits of an undisturbed run, everyone lost named, nothing left behind.

Kills at named moments are in test_killed_at_named_moments.py.
"""

from __future__ import annotations

import functools
import json
import os
import random
import re
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from commands import assert_all_gone, begin, ringtmp
from ringtmp.metrics import events

STEPS = 240
RUNS = 120
#: The runs of `make long`; the others are for the night.
LONG = (0, 3)
#: A user's own module, which is cut into cells, with a skip, BatchNorm and dropout.
MODULE = """
import torch
from torch import nn

class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(64, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.norm, self.drop, self.head = nn.BatchNorm1d(32), nn.Dropout(0.2), nn.Linear(32, 10)

    def forward(self, x):
        x = torch.relu(self.first(torch.flatten(x, 1)))
        y = self.drop(torch.tanh(self.norm(self.second(x))))
        return self.head(torch.relu(self.third(y)) + x)

def model():
    torch.manual_seed(3)
    return Mine()
"""
WAYS = {
    "ring": "--nodes 3",
    "memory": "--nodes 4 --protect memory --set depth=8",
    "disk": "--nodes 4 --protect disk --set depth=8",
    "checkpoint": "--nodes 3 --protect checkpoint --checkpoint-every 40",
    "zero-bubble": "--nodes 3 --schedule zero-bubble --set dropout=0.1",
    "staleness": "--nodes 3 --staleness 1 --optimizer sgd --lr 0.05",
    "laps": "--nodes 2 --laps 2 --set depth=8",
    "recompute": "--nodes 4 --recompute all --set depth=8 --clip-norm 1",
    "cells": "--nodes 3 --model mine.py:model --protect disk --optimizer adamw",
    "frozen": "--nodes 3 --model mine.py:model --train third|head --protect memory",
    "allreduce": "--nodes 3 --strategy allreduce --checkpoint-every 60",
    "tree": "--nodes 4 --strategy allreduce:tree --checkpoint-every 60",
    "ps": "--nodes 3 --strategy ps:bsp --checkpoint-every 60",
    "servers": "--nodes 4 --strategy ps:bsp --with servers=2 --checkpoint-every 60",
}
#: A parameter server goes on without the share of a lost worker: another training, and no bits to compare.
INEXACT = {"ps", "servers"}
#: A checkpoint is all that a lost server without a replica, or a lost master, can go on from.
DISTURBANCES = ("kill", "kill", "stop", "two", "spare", "again", "master")


def arguments(way: str) -> list[str]:
    return [*WAYS[way].split(), "--steps", str(STEPS), "--notice", "1.5"]


@functools.cache
def undisturbed(way: str, folder: Path) -> dict[str, Any]:
    (folder / "mine.py").write_text(MODULE)
    done = ringtmp("train", *arguments(way), "--json", "--quiet", "--run-dir", folder / way, cwd=folder, timeout=300)
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("calm")


@dataclass(frozen=True)
class Loss:
    """A worker that was killed or stopped."""

    node: int
    at: float
    part: int


class Disturbed:
    """A run in a process of its own, and what was done to it."""

    def __init__(self, folder: Path, way: str) -> None:
        (folder / "mine.py").write_text(MODULE)
        self.run = folder / "run"
        self._folder = folder
        self._process = begin("train", *arguments(way), "--json", "--run-dir", self.run, cwd=folder)
        self._seen: dict[int, psutil.Process] = {}
        self._masters = [self._process.pid]
        self.losses: list[Loss] = []
        self.master_killed_at: list[float] = []

    def _count(self, kind: bytes) -> int:
        log = self.run / "events.jsonl"
        return log.read_bytes().count(b'{"type":"' + kind + b'"') if log.exists() else 0

    def _await(self, kind: bytes, count: int, limit_s: float) -> bool:
        """Until so many events of a kind were told; False when the run is over."""
        limit = time.monotonic() + limit_s
        while time.monotonic() < limit and self._process.poll() is None:
            for child in self._children():
                self._seen.setdefault(child.pid, child)
            if self._count(kind) >= count:
                return True
            time.sleep(0.01)
        assert self._process.poll() is not None, f"not {count} of {kind!r} within {limit_s} s"
        return False

    def reach(self, steps: int) -> bool:
        """Repeated steps counted."""
        return self._await(b"step", steps, 300)

    def _children(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self._process.pid).children()
        except psutil.NoSuchProcess:
            return []

    def _workers(self) -> dict[int, psutil.Process]:
        """By node, which the file says that it writes its output to."""
        found = {}
        for child in self._children():
            try:
                if match := re.search(r"node-(\d+)\.log", os.readlink(f"/proc/{child.pid}/fd/2")):
                    found[int(match[1])] = child
            except OSError:
                continue
        return found

    def _spares(self) -> list[psutil.Process]:
        workers = {each.pid for each in self._workers().values()}
        return [each for each in self._children() if each.pid not in workers]

    def disturb(self, how: str, draw: random.Random) -> None:
        """One or two workers killed, one stopped, the spare killed with a worker, a worker killed and another as soon as the
        ring has healed, or the master, which is then resumed."""
        if how == "master":
            self._kill_the_master()
            return
        regrouped = self._count(b"regroup")
        self._lose(2 if how == "two" else 1, how == "stop", draw)
        if how == "spare":
            for each in self._spares():
                each.kill()
        if how == "again" and self._await(b"regroup", regrouped + 1, 120):
            self._lose(1, False, draw)

    def _lose(self, count: int, stop: bool, draw: random.Random) -> None:
        workers = self._workers()
        for node in draw.sample(sorted(workers), min(len(workers), count)):
            try:
                workers[node].suspend() if stop else workers[node].kill()
            except psutil.NoSuchProcess:
                continue
            self.losses.append(Loss(node, time.monotonic(), len(self._masters)))

    def _kill_the_master(self) -> None:
        self._process.kill()
        self.master_killed_at.append(time.monotonic())
        self._process.communicate()
        for each in self._seen.values():  # one that is stopped cannot see that its master is gone
            if each.is_running() and each.status() == psutil.STATUS_STOPPED:
                each.kill()
        assert_all_gone(list(self._seen.values()))
        self._process = begin("train", "--resume", self.run, "--json", cwd=self._folder)
        self._masters.append(self._process.pid)

    def close(self) -> None:
        """On whatever way out: workers end with their master, but for a stopped one."""
        self._process.kill()
        self._process.communicate()
        for each in self._seen.values():
            if each.is_running():
                each.kill()

    @property
    def kills(self) -> int:
        return len(self.losses) + len(self.master_killed_at)

    def ended(self) -> dict[str, Any]:
        try:
            out, said = self._process.communicate(timeout=240)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            raise
        assert self._process.returncode == 0, said
        assert "Traceback" not in said, said
        assert_all_gone(list(self._seen.values()))
        summary: dict[str, Any] = json.loads(out)
        return summary

    def left_behind(self) -> list[str]:
        sockets = [each for pid in self._masters for each in Path(tempfile.gettempdir()).glob(f"ringtmp_{pid}-*")]
        files = [each for each in self.run.rglob("*") if each.suffix in {".tmp", ".part"} or each.name == "snapshots"]
        return sorted(map(str, sockets + files))

    def unnamed(self) -> list[Loss]:
        """Losses that no entry of `recoveries` names, but for those that nobody could notice: the master was killed, or had
        ended the run, before it looked."""
        told = list(events.read(self.run / "events.jsonl"))
        named = [(each.at, each.lost) for each in told if isinstance(each, events.Regrouped)]
        over = [each.at for each in told if isinstance(each, events.RunEnded)]
        ends = [*self.master_killed_at, *(at - 1 for at in over)]
        return [
            loss
            for loss in self.losses
            if not any(loss.node in lost and at >= loss.at for at, lost in named)
            and not any(loss.at <= end < loss.at + 6 or loss.at > end > loss.at - 2 for end in ends)
        ]


def check(number: int, way: str, run: Disturbed, expected: dict[str, Any]) -> None:
    draw, done = random.Random(number), []
    for moment in sorted(draw.choice((1, 5, STEPS - 2, draw.randrange(STEPS))) for _ in range(draw.choice((1, 2, 3)))):
        if not run.reach(moment):
            break
        done.append((moment, DISTURBANCES[(number // len(WAYS) + len(done)) % len(DISTURBANCES)]))
        run.disturb(done[-1][1], draw)
    summary = run.ended()
    what = f"{way}, {done}, {run.losses}"
    assert (summary["outcome"], summary["steps"]) == ("done", STEPS), what
    if way not in INEXACT or not run.losses:
        assert summary["weights_sha256"] == expected["weights_sha256"], what
        assert summary["loss"] == expected["loss"], what
    lost = {node for each in summary["recoveries"] for node in each["lost"]}
    assert lost <= {each.node for each in run.losses}, f"{what}: {summary['recoveries']}"
    assert not run.unnamed(), f"{what}: {summary['recoveries']}"
    assert not run.left_behind(), what
    print(f"kills {run.kills}: {what}")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(each, marks=pytest.mark.long if each in LONG else pytest.mark.nightly)  # quick: test_healing
        for each in range(RUNS)
    ],
)
def test_whoever_is_killed_and_whenever_the_bits_stay(number: int, tmp_path: Path, calm: Path) -> None:
    way = list(WAYS)[number % len(WAYS)]
    expected, run = undisturbed(way, calm), Disturbed(tmp_path, way)
    try:
        check(number, way, run, expected)
    finally:
        run.close()
