"""`kill -9` of each role at each named moment (failpoints/points.py): real processes, and the bits of an undisturbed run.

Dropout, BatchNorm, AdamW, clipping and a schedule are on, all of which remember something.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from failpoints.points import MASTERS, ONCE, WHILE_HEALING
from ringtmp.metrics import events
from test_processes import ringtmp

MODEL = """
from torch import nn

def model():
    yield nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32))
    for _ in range(4):
        yield nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2))
    yield nn.Linear(32, 10)
"""
FLAGS = (
    "--model", "mine.py:model", "--optimizer", "adamw", "--clip-norm", 1, "--lr-schedule", "cosine:warmup=5",
    "--steps", 60, "--checkpoint-every", 20, "--json", "--quiet",
)  # fmt: skip
QUICK = ("after an update", "holder before it tells")
QUICK_HEALING = ("before it restores a layer",)
QUICK_MASTER = ("before a checkpoint is there",)


def chosen(points: Any, quick: tuple[str, ...]) -> list[Any]:
    return [pytest.param(name, id=name, marks=[] if name in quick else [pytest.mark.long]) for name in points]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("alone")
    (folder / "mine.py").write_text(MODEL)
    digest: str = json.loads(ringtmp("train", "--nodes", 1, *FLAGS, cwd=folder).stdout)["weights_sha256"]
    return digest


@pytest.fixture(scope="module")
def told(request: pytest.FixtureRequest) -> Iterator[list[tuple[float, float, float]]]:
    """Seconds to notice, to heal, and from the kill to the end of the next step; shown when all is done."""
    times: list[tuple[float, float, float]] = []
    yield times
    if times:
        notice, heal, on = (statistics.median(column) for column in zip(*times, strict=True))
        capture = request.config.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled():
            print(
                f"\n{len(times)} kills: noticed within {notice:.2f} s, healed {heal:.2f} s later, "
                f"{on:.2f} s from the kill to the end of the next step (medians)"
            )


class Run:
    def __init__(self, folder: Path, *points: str) -> None:
        (folder / "mine.py").write_text(MODEL)
        self.folder, self.points = folder, points
        self.marks = folder / "marks"
        self.marks.mkdir()
        here = Path(__file__).parent
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(here / "failpoints"), os.environ.get("PYTHONPATH", "")]).rstrip(":"),
            "FAILPOINTS": "|".join(points),
            "FAILPOINT_MARKS": str(self.marks),
        }

    def train(self, *how: object, code: int = 0) -> str:
        done = ringtmp("train", *how, cwd=self.folder, code=code, env=self._environment)
        assert {each.name for each in self.marks.iterdir()} == set(self.points), "not everyone came to its point"
        return done.stdout

    def back_after_s(self) -> float:
        """From the last kill to the end of the first step of a ring that is whole again."""
        killed = max(float(each.read_text()) for each in self.marks.iterdir())
        log = list(events.read(self.folder / "run" / "events.jsonl"))
        healed = [event.at for event in log if isinstance(event, events.Regrouped)]
        after = [event.at for event in log if isinstance(event, events.StepDone) and event.at > healed[-1]]
        return (after[0] if after else healed[-1]) - killed


@pytest.mark.parametrize("name", chosen(ONCE, QUICK))
def test_a_worker_killed_is_replaced_and_no_bit_changes(
    name: str, tmp_path: Path, expected: str, told: list[tuple[float, float, float]]
) -> None:
    run = Run(tmp_path, name)
    summary = json.loads(run.train(*FLAGS, "--nodes", 3, "--run-dir", "run"))
    assert summary["weights_sha256"] == expected
    (healed,) = summary["recoveries"]
    assert healed["lost"] == [ONCE[name].node]
    told.append((healed["notice_s"], healed["seconds"], run.back_after_s()))


@pytest.mark.parametrize("name", chosen(WHILE_HEALING, QUICK_HEALING))
def test_another_killed_while_the_ring_heals_changes_no_bit(name: str, tmp_path: Path, expected: str) -> None:
    first, point = WHILE_HEALING[name]
    run = Run(tmp_path, first, name)
    summary = json.loads(run.train(*FLAGS, "--nodes", 3, "--run-dir", "run"))
    assert summary["weights_sha256"] == expected
    (healed,) = summary["recoveries"]
    assert set(healed["lost"]) == {ONCE[first].node, point.node}


@pytest.mark.parametrize("name", chosen(MASTERS, QUICK_MASTER))
def test_a_master_killed_is_resumed_with_the_same_bits(name: str, tmp_path: Path, expected: str) -> None:
    run = Run(tmp_path, name)
    run.train(*FLAGS, "--nodes", 3, "--run-dir", "run", code=-9)
    summary = json.loads(run.train("--resume", "run", "--json", "--quiet"))
    assert summary["weights_sha256"] == expected
    assert not (tmp_path / "run" / "snapshots").exists()
