"""A master is killed and its nodes are not: the next one goes on from the snapshot they hold, its own layers among it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import test_group_members_lost as members
from ringtmp import api
from ringtmp.config import KeepPart
from ringtmp.data.tables_and_streams import tensors
from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.metrics import events
from ringtmp.runtime import left_with_nodes
from ringtmp.runtime.mailbox import Endpoint
from ringtmp.runtime.snapshot_store import SnapshotStore
from test_healing import CASES, STEPS, Ticking, run
from test_training_loop import blobs

#: Only what is there before the first step, so that every step gone on from is a snapshot's.
KEEP = KeepPart(protect="memory")


class Killed(BaseException):
    """The master is gone."""


class Outlived(InMemoryPool):
    """At some moment the run's folder is put aside as it is, and every node leaves its snapshots."""

    outlives_master = True

    def __init__(self, nodes: int, folder: Path, at: int | None, found: dict[int, Path]) -> None:
        """`at`: the step in which the master is killed; `found`: what nodes find that the ones before them left."""
        super().__init__(nodes, clock=Ticking())
        self._folder, self._at, self._found = folder, at, found

    def _endpoint(self, node: int, ring: str, generation: int) -> Endpoint:
        endpoint = super()._endpoint(node, ring, generation)
        endpoint.snapshots = SnapshotStore(self._found.get(node, self._folder / "nodes" / str(node)), taken_up=True)
        return endpoint

    def advance(self) -> bool:
        if self._at is not None and any(each.step >= self._at for each in self._workers):
            self._at = None
            for worker in self._workers:
                worker.endpoint.snapshots.leave()
            shutil.copytree(self._folder, self._folder.with_name("killed"))
            raise Killed
        return super().advance()


def killed(folder: Path, at: int, nodes: int, **how: Any) -> Path:
    """The run's folder as a master that was killed in this step leaves it; `nodes` in it is what nodes have left."""
    with pytest.raises(Killed):
        run(folder / "hit", Outlived(nodes, folder / "hit", at, {}), KEEP, **how)
    return folder / "killed"


def gone_on(folder: Path, nodes: int, found: dict[int, int]) -> api.Result:
    """By another master. `found`: whose snapshots each node has."""
    left = {node: folder / "nodes" / str(before) for node, before in found.items()}
    data = (tensors("t", *blobs()), tensors("t", *blobs(30)))
    return api.resume(folder, {"nodes": nodes}, data, pool=Outlived(nodes, folder, None, left))


def first_steps(folder: Path) -> list[int]:
    return [each.first_step for each in events.read(folder / "events.jsonl") if isinstance(each, events.RunStarted)]


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.long] * (case != "clipped")) for case in CASES])
def test_the_next_master_goes_on_from_what_nodes_hold_with_the_same_bits(case: str, tmp_path: Path) -> None:
    calm = run(tmp_path / "calm", InMemoryPool(4), **CASES[case])
    folder = killed(tmp_path, 9, 4, **CASES[case])
    result = gone_on(folder, 4, {1: 2, 2: 3, 3: 1})  # they come in another order
    assert result.summary.weights_sha256 == calm.summary.weights_sha256
    first, then = first_steps(folder)
    assert (first, then > 0) == (0, True), "there is no checkpoint but the first"
    assert result.summary.steps == STEPS
    assert left_with_nodes.read(folder) is None, "nothing is left of a run that has ended"


def test_a_ring_of_groups_goes_on_from_what_its_nodes_hold_too(tmp_path: Path) -> None:
    """Of a group one holds the layers for all; in the next ring that one may be in another group."""
    calm = members.expected(tmp_path)
    with pytest.raises(Killed):
        members.run(tmp_path / "hit", Outlived(5, tmp_path / "hit", 9, {}), "2,2", keep=KEEP)
    result = gone_on(tmp_path / "killed", 5, {1: 4, 2: 3, 3: 1, 4: 2})
    assert result.summary.weights_sha256 == calm
    first, then = first_steps(tmp_path / "killed")
    assert (first, then > 0) == (0, True), "there is no checkpoint but the first"


def test_where_a_holder_is_gone_too_its_neighbour_has_what_is_needed(tmp_path: Path) -> None:
    calm = run(tmp_path / "calm", InMemoryPool(4))
    folder = killed(tmp_path, 9, 4)
    result = gone_on(folder, 3, {1: 1, 2: 3})
    assert result.summary.weights_sha256 == calm.summary.weights_sha256
    assert first_steps(folder)[1] > 0


@pytest.mark.parametrize("damage", ["missing", "changed", "of another run", "nobody came back"])
def test_what_is_not_whole_any_more_gives_way_to_the_checkpoint(damage: str, tmp_path: Path) -> None:
    calm = run(tmp_path / "calm", InMemoryPool(3))
    folder = killed(tmp_path, 9, 3)
    left = left_with_nodes.read(folder)
    assert left is not None
    found = {1: 1, 2: 2}
    copies = [path for path in (folder / "nodes").rglob(f"{left.progress.step}-0") if not path.suffix]
    assert copies, "the master's first layer is with its neighbour"
    for each in copies:
        if damage == "missing":
            each.unlink()
        elif damage == "changed":
            each.write_bytes(bytes(each.stat().st_size))
    if damage == "of another run":
        left_with_nodes.write(folder, left_with_nodes.Left("another", left.ring, left.progress))
    elif damage == "nobody came back":
        found = {}
    result = gone_on(folder, 3, found)
    assert result.summary.weights_sha256 == calm.summary.weights_sha256
    warned = [each.text for each in events.read(folder / "events.jsonl") if isinstance(each, events.Warned)]
    assert any("going back to the checkpoint" in each for each in warned) == (damage == "changed")


def test_a_master_that_nobody_starts_again_gives_its_own_layers_to_nobody(tmp_path: Path) -> None:
    pool = Outlived(3, tmp_path / "hit", 9, {})
    pool.outlives_master = False
    with pytest.raises(Killed):
        run(tmp_path / "hit", pool, KEEP)
    assert list((tmp_path / "killed" / "nodes").rglob("*.label")), "they do hold snapshots"
    assert not list((tmp_path / "killed" / "nodes" / "1").rglob("*-0"))
    assert left_with_nodes.read(tmp_path / "killed") is None
