"""Real kills by seed: runs of local processes lose workers, spares and masters at moments drawn from a number, and end with the
bits of an undisturbed run, everyone lost named, nothing left behind."""

from __future__ import annotations

import functools
import json
import random
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from commands import assert_all_gone, begin, ringtmp

STEPS = 240
RUNS = 100
#: Ways to run, and whether a loss may leave the digest to rounding (the order in which survivors add is another).
WAYS = {
    "ring": "--nodes 3",
    "disk": "--nodes 4 --protect disk --set depth=8",
    "checkpoint": "--nodes 3 --protect checkpoint --checkpoint-every 40",
    "zero-bubble": "--nodes 3 --schedule zero-bubble --set dropout=0.1",
    "staleness": "--nodes 3 --staleness 1 --optimizer sgd --lr 0.05",
    "laps": "--nodes 2 --laps 2 --set depth=8",
    "recompute": "--nodes 4 --recompute all --set depth=8 --clip-norm 1",
}


@functools.cache
def undisturbed(way: str, folder: Path) -> str:
    done = ringtmp("train", *arguments(way), "--json", "--quiet", "--run-dir", folder / way, cwd=folder)
    digest: str = json.loads(done.stdout)["weights_sha256"]
    return digest


def arguments(way: str) -> list[str]:
    return [*WAYS[way].split(), "--steps", str(STEPS), "--notice", "1.5"]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("calm")


class Disturbed:
    """A run in a process of its own, and what was done to it."""

    def __init__(self, folder: Path, way: str) -> None:
        self.run = folder / "run"
        self._folder = folder
        self._process = begin("train", *arguments(way), "--json", "--run-dir", self.run, cwd=folder)
        self._seen: dict[int, psutil.Process] = {}
        self.kills = 0

    def reach(self, steps: int) -> bool:
        """Until so many steps were done, repeated ones counted; False when the run is over."""
        limit = time.monotonic() + 120
        while time.monotonic() < limit and self._process.poll() is None:
            for child in self._children():
                self._seen.setdefault(child.pid, child)
            log = self.run / "events.jsonl"
            if log.exists() and log.read_bytes().count(b'{"type":"step"') >= steps:
                return True
            time.sleep(0.01)
        assert self._process.poll() is not None, f"no step {steps} within two minutes"
        return False

    def _children(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self._process.pid).children()
        except psutil.NoSuchProcess:
            return []

    def _of(self, spare: bool) -> list[psutil.Process]:
        found = []
        for child in self._children():
            try:
                if ("spare" in child.cmdline()) is spare:
                    found.append(child)
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
        return found

    def disturb(self, how: str, draw: random.Random) -> None:
        """One or two workers killed, one stopped, the spare killed with a worker, or the master, which is then resumed."""
        workers = self._of(spare=False)
        chosen = draw.sample(workers, min(len(workers), 2 if how == "two" else 1))
        if how == "spare":
            chosen += self._of(spare=True)
        for each in chosen:
            try:
                each.suspend() if how == "stop" else each.kill()
                self.kills += 1
            except psutil.NoSuchProcess:
                continue
        if how == "master":
            self._process.kill()
            self._process.communicate()
            assert_all_gone(list(self._seen.values()))
            self.kills += 1
            self._process = begin("train", "--resume", self.run, "--json", cwd=self._folder)

    def ended(self) -> dict[str, Any]:
        try:
            out, said = self._process.communicate(timeout=240)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            raise
        assert self._process.returncode == 0, said
        assert_all_gone(list(self._seen.values()))
        summary: dict[str, Any] = json.loads(out)
        return summary


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", range(RUNS))
def test_whoever_is_killed_and_whenever_the_bits_stay(number: int, tmp_path: Path, calm: Path) -> None:
    draw = random.Random(number)
    way = list(WAYS)[number % len(WAYS)]
    expected = undisturbed(way, calm)
    run = Disturbed(tmp_path, way)
    done = []
    for moment in sorted(draw.choice((1, 5, STEPS - 2, draw.randrange(STEPS))) for _ in range(draw.choice((1, 2, 3)))):
        if not run.reach(moment):
            break
        done.append((moment, draw.choice(("kill", "kill", "stop", "two", "spare", "master"))))
        run.disturb(done[-1][1], draw)
    summary = run.ended()
    assert summary["weights_sha256"] == expected, (way, done)
    assert (summary["outcome"], summary["steps"]) == ("done", STEPS), (way, done)
