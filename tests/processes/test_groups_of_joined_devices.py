"""Devices that joined and form a group, as real processes: a killed master finds them, and the snapshot they hold, again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from commands import REMEMBERING, here, remembering_model, wait_for_step
from ringtmp.metrics import events
from test_joining import Ring

HOW = (*REMEMBERING, "--steps", 150, "--sum-tree", 2, "--threads", 1)


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[Ring]:
    (tmp_path / "mine.py").write_text(remembering_model(32).replace("BatchNorm1d", "LayerNorm"))
    made = Ring(tmp_path)
    yield made
    made.close()


@pytest.mark.long  # in memory: test_left_with_nodes
@pytest.mark.timeout(1200)
def test_a_killed_master_of_groups_goes_on_with_the_same_bits(ring: Ring) -> None:
    """There is no checkpoint but the first. Nobody types anything after the kill."""
    process = ring.master(3, *HOW, "--groups", "2", "--supervised", "--protect", "memory")
    ring.device("alpha")
    ring.device("beta")
    wait_for_step(ring.folder / "run", 15, process, 400)
    (master,) = psutil.Process(process.pid).children()
    master.kill()
    summary = ring.result(600)
    alone = here("train", *HOW, "--nodes", 1, "--run-dir", "alone", cwd=ring.folder)
    assert summary["weights_sha256"] == json.loads(alone.stdout)["weights_sha256"]
    told = list(events.read(ring.folder / "run" / "events.jsonl"))
    started = [each for each in told if isinstance(each, events.RunStarted)]
    assert [each.first_step > 0 for each in started] == [False, True], "snapshots outlived the master"
    assert {each.facts["groups"] for each in started} == {"M-2-M"}
