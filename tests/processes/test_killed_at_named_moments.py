"""`kill -9` of each role at each named moment (failpoints/points.py): real processes, and the bits of an undisturbed run.

Dropout, BatchNorm, AdamW, clipping and a schedule are on, all of which remember something.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from commands import REMEMBERING, remembering_model, ringtmp
from failpoints.points import CUTS, MASTERS, ONCE, WHILE_HEALING
from ringtmp.metrics import events

MODEL = remembering_model(32)
FLAGS = (*REMEMBERING, "--steps", 60, "--checkpoint-every", 50)
pytestmark = pytest.mark.timeout(300)


def some_at_night(points: dict[str, Any]) -> pytest.MarkDecorator:
    """Every third moment in `make long`, the others at night."""
    found = [
        pytest.param(name, marks=pytest.mark.nightly if number % 3 else pytest.mark.long)
        for number, name in enumerate(points)
    ]
    return pytest.mark.parametrize("name", found)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose master died before the first step: every other goes on from here, and none has to build the model."""
    run = Run(tmp_path_factory.mktemp("base"), None, "before the first step")
    (run.folder / "mine.py").write_text(MODEL)
    run.train(*FLAGS, "--nodes", 1, "--run-dir", "run", code=-9)
    return run.folder / "run"


@pytest.fixture(scope="module")
def expected(base: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    digest: str = Run(tmp_path_factory.mktemp("calm"), base).resume(nodes=1)["weights_sha256"]
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
    def __init__(self, folder: Path, base: Path | None, *points: str) -> None:
        self.folder, self.points = folder, points
        self.marks = folder / "marks"
        self.marks.mkdir()
        if base is not None:
            shutil.copytree(base, folder / "run")
        here = str(Path(__file__).parent.parent / "support" / "failpoints")
        path = [here, *filter(None, [os.environ.get("PYTHONPATH")])]
        armed = {"FAILPOINTS": "|".join(points), "FAILPOINT_MARKS": str(self.marks)} if points else {}
        self._environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), **armed}

    def train(self, *how: object, code: int = 0) -> str:
        done = ringtmp("train", *how, cwd=self.folder, code=code, env=self._environment)
        assert {each.name for each in self.marks.iterdir()} == set(self.points), "not everyone came to its point"
        return done.stdout

    def resume(self, nodes: int = 3) -> dict[str, Any]:
        cuts = ["--cuts", CUTS] if nodes == 3 else []
        summary: dict[str, Any] = json.loads(
            self.train("--resume", "run", "--nodes", nodes, *cuts, "--json", "--quiet")
        )
        return summary

    def back_after_s(self) -> float:
        """From the last kill to the end of the first step of a ring that is whole again."""
        killed = max(float(each.read_text()) for each in self.marks.iterdir())
        log = list(events.read(self.folder / "run" / "events.jsonl"))
        healed = [event.at for event in log if isinstance(event, events.Regrouped)]
        after = [event.at for event in log if isinstance(event, events.StepDone) and event.at > healed[-1]]
        return (after[0] if after else healed[-1]) - killed


@some_at_night(ONCE)  # a lost process in test_healing_processes and test_joining; in memory: test_seeded_faults
def test_a_worker_killed_is_replaced_and_no_bit_changes(
    name: str, tmp_path: Path, base: Path, expected: str, told: list[tuple[float, float, float]]
) -> None:
    run = Run(tmp_path, base, name)
    summary = run.resume()
    assert summary["weights_sha256"] == expected
    (healed,) = summary["recoveries"]
    assert healed["lost"] == [ONCE[name].node]
    told.append((healed["notice_s"], healed["seconds"], run.back_after_s()))


@some_at_night(WHILE_HEALING)  # in memory: test_healing, test_seeded_faults
def test_another_killed_while_the_ring_heals_changes_no_bit(
    name: str, tmp_path: Path, base: Path, expected: str
) -> None:
    first, point = WHILE_HEALING[name]
    summary = Run(tmp_path, base, first, name).resume()
    assert summary["weights_sha256"] == expected
    # One recovery, or two where the first was over when the second loss was noticed.
    lost = {node for healed in summary["recoveries"] for node in healed["lost"]}
    assert lost == {ONCE[first].node, point.node}


@some_at_night(MASTERS)  # a killed master is resumed in test_healing_processes
def test_a_master_killed_is_resumed_with_the_same_bits(name: str, tmp_path: Path, base: Path, expected: str) -> None:
    run = Run(tmp_path, base, name)
    run.train("--resume", "run", "--nodes", 3, "--cuts", CUTS, "--quiet", code=-9)
    assert run.resume()["weights_sha256"] == expected
    assert not (tmp_path / "run" / "snapshots").exists()


def test_a_process_dies_at_its_point(base: Path) -> None:
    """The one quick kill: it shows that processes are armed. That runs come to every point: test_failpoints_are_reached."""
    told = list(events.read(base / "events.jsonl"))
    assert told
    assert not [each for each in told if isinstance(each, events.StepDone)], "it dies before the first step"
