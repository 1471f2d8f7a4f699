"""Snapshots: taken at a step boundary, held by the neighbour, whole or not at all, and what healing takes from them."""

from __future__ import annotations

import math
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch

from ringtmp import api
from ringtmp.config import KeepPart
from ringtmp.errors import SnapshotUnusable
from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.metrics import events
from ringtmp.plan.memory_forecast import PIECES_BYTES
from ringtmp.runtime import snapshot_schedule
from ringtmp.runtime.checkpoint import Progress
from ringtmp.runtime.layer_snapshot import LayerSnapshot, Writing, laid_out
from ringtmp.runtime.mailbox import Endpoint
from ringtmp.runtime.snapshot_schedule import BUDGET, Protection, interval_steps
from ringtmp.runtime.snapshot_store import SnapshotStore
from ringtmp.strategies.ring.exchange_snapshots import LINE_SHARE, MOST_PIECE_BYTES, Pace
from ringtmp.strategies.ring.node import Node
from ringtmp.wire.messages import Held
from ringtmp.wire.tensors import raw_bytes
from test_healing import CASES, Death, Mortal, run


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots as often as they can be had, whatever they cost."""
    monkeypatch.setattr(snapshot_schedule, "BUDGET", 1e9)


def parcel(step: int = 3, layer: int = 1) -> LayerSnapshot:
    state = {("weight", "step"): torch.tensor(4.0), ("weight", "exp_avg"): torch.randn(5, 3).t()}
    return packed(step, layer, [torch.randn(5, 3).t(), torch.arange(4)], state)


def packed(step: int, layer: int, tensors: list[torch.Tensor], state: dict[Any, torch.Tensor]) -> LayerSnapshot:
    label, views = laid_out(step, layer, tensors, state)
    writing = Writing(label)
    for view in views:
        writing.add(view)
    return writing.finished()


def put(snapshots: SnapshotStore, given: LayerSnapshot, mode: str) -> str | None:
    return snapshots.put(given.label, [raw_bytes(given.body)], mode)


def test_a_parcel_gives_back_bits_strides_and_boundaries() -> None:
    tensors = [torch.randn(5, 3).t(), torch.randn(7)[1:], torch.arange(4)]
    state = {("weight", "step"): torch.tensor(4.0)}
    given, states = packed(3, 1, tensors, state).unpack()
    for before, after in zip([*tensors, *state.values()], [*given, *states.values()], strict=True):
        assert before.equal(after)
        assert before.stride() == after.stride()
        assert after.data_ptr() % 64 == 0
    assert list(states) == list(state)


def test_a_parcel_with_one_bit_changed_is_refused() -> None:
    made = parcel()
    made.body[7] ^= 1
    with pytest.raises(SnapshotUnusable, match="layer 1 in the snapshot of step 3 does not match its digest"):
        made.unpack()


@pytest.mark.parametrize("mode", ["memory", "disk"])
def test_a_shelf_keeps_parcels_until_they_may_go(mode: str, tmp_path: Path) -> None:
    snapshots = SnapshotStore(tmp_path / "shelf")
    for step in (3, 6):
        assert put(snapshots, parcel(step), mode) is None
    assert snapshots.contents() == ((3, 1), (6, 1))
    found = snapshots.get(3, 1)
    assert found is not None
    found.unpack()
    snapshots.free(before=6)
    assert snapshots.contents() == ((6, 1),)
    assert snapshots.get(3, 1) is None
    assert len(list(tmp_path.rglob("*-1"))) == (1 if mode == "disk" else 0)
    snapshots.close()
    assert not (tmp_path / "shelf").exists()


@pytest.mark.parametrize("mode", ["memory", "disk"])
def test_a_parcel_that_comes_in_pieces_is_refused_if_a_bit_changed_and_leaves_nothing_when_given_up(
    mode: str, tmp_path: Path
) -> None:
    snapshots, made = SnapshotStore(tmp_path / "shelf"), parcel()
    body = raw_bytes(made.body)

    def bring(content: memoryview) -> str | None:
        assert snapshots.begin(made.label, mode) is None
        pieces = [content[start : start + 10] for start in range(0, len(content), 10)]
        return next(filter(None, (snapshots.add(made.label, each) for each in pieces)), None)

    assert bring(body[:-1]) is None
    assert "does not match its digest" in (snapshots.finish(made.label) or "")
    changed = bytearray(body)
    changed[5] ^= 1
    assert bring(memoryview(changed)) is None
    assert "does not match its digest" in (snapshots.finish(made.label) or "")
    assert "has more bytes" in (bring(memoryview(bytes(body) + b"more")) or "")
    assert bring(body) is None
    assert snapshots.awaits(made.label)
    snapshots.discard(3)
    assert not snapshots.awaits(made.label)
    assert list(tmp_path.rglob("*-1")) == []
    assert bring(body) is None
    assert snapshots.finish(made.label) is None
    piece = snapshots.piece(made.label, 7, 10**6)
    assert piece is not None
    assert piece.equal(made.body[7:])
    assert snapshots.label(3, 1) == made.label


def test_a_large_layer_goes_to_disk_and_to_a_neighbour_without_being_in_memory_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = [torch.ones(2**22)]  # 16 MiB
    owner, holder = SnapshotStore(tmp_path / "owner"), SnapshotStore(tmp_path / "holder")
    made, empty = [0], torch.empty

    def counted(size: int, **how: Any) -> torch.Tensor:
        made.append(size)
        return empty(size, **how)

    monkeypatch.setattr(torch, "empty", counted)
    tracemalloc.start()  # of all but tensors
    try:
        label, views = laid_out(3, 1, layer, {})
        assert owner.put(label, views, "disk") is None
        sealed = owner.label(3, 1)
        assert sealed is not None
        assert holder.begin(sealed, "disk") is None
        for start in range(0, sealed.size, MOST_PIECE_BYTES):
            piece = owner.piece(sealed, start, MOST_PIECE_BYTES)
            assert piece is not None
            assert holder.add(sealed, raw_bytes(piece)) is None
        assert holder.finish(sealed) is None
        assert tracemalloc.get_traced_memory()[1] + max(made) < PIECES_BYTES
    finally:
        tracemalloc.stop()
    monkeypatch.undo()
    found = holder.get(3, 1)
    assert found is not None
    assert found.unpack()[0][0].equal(layer[0])


def test_auto_takes_memory_where_there_is_room_then_the_disk_then_nothing(tmp_path: Path) -> None:
    roomy, tight = SnapshotStore(tmp_path / "a", lambda: 2**30), SnapshotStore(tmp_path / "b", lambda: 100)
    assert put(roomy, parcel(), "auto") is None
    assert not (tmp_path / "a").exists()
    assert put(tight, parcel(), "auto") is None
    assert (tmp_path / "b" / "3-1").exists()
    assert put(SnapshotStore(None, lambda: 400), parcel(), "auto") == "there is neither memory nor a disk for it"
    (tmp_path / "file").write_text("in the way")
    assert put(SnapshotStore(tmp_path / "file" / "c"), parcel(), "disk") == "Not a directory"


def test_the_interval_keeps_the_cost_within_the_budget() -> None:
    for cost, step in ((0.001, 0.1), (0.1, 0.1), (2.0, 0.05)):
        interval = interval_steps(cost, step)
        assert cost / (interval * step) <= BUDGET
        assert interval == 1 or cost / ((interval - 1) * step) > BUDGET


def begun(layers: list[int], step: int = 5) -> Protection:
    protection = Protection("memory")
    protection.step_took(0.1)
    protection.progress = Progress(step)
    assert protection.due(step)
    protection.begin(layers)
    return protection


def test_a_snapshot_is_whole_when_every_layer_is_held_and_the_next_waits_for_it() -> None:
    protection = begun([0, 2])
    assert not protection.due(6)
    assert not protection.held(Held(5, 0, 1, 0.001, 0.002), 2)
    assert protection.whole is None
    assert not protection.held(Held(4, 2, 1, 0.0, 0.0), 2), "of another snapshot"
    assert protection.held(Held(5, 2, 1, 0.001, 0.002), 2)
    assert protection.whole is not None
    assert protection.whole.step == 5
    assert protection.interval == interval_steps(0.004, 0.1) == 2
    assert [protection.due(step) for step in (6, 7)] == [False, True]


def slowed(per_snapshot_s: float, steps: int = 2000, step_s: float = 0.1) -> list[float]:
    """Steps of a run whose snapshots cost nodes no work and slow the two steps during which they travel."""
    protection, took = Protection("memory"), []
    for step in range(steps):
        protection.progress = Progress(step)
        began = protection.due(step)
        if began:
            protection.begin([0])
        elif protection._under_way is not None:
            protection.held(Held(protection._under_way.snapshot.step, 0, 1, 0.0, 0.0), 2)
        loud = protection._loud
        took.append(step_s + per_snapshot_s / 2 * loud)
        protection.step_took(took[-1])
    return took


@pytest.mark.parametrize("per_snapshot_s", [0.01, 0.2, 2.0])
def test_steps_slowed_on_a_shared_line_count_against_the_budget(per_snapshot_s: float) -> None:
    took = slowed(per_snapshot_s)
    assert sum(took[300:]) / (len(took[300:]) * 0.1) <= 1 + 1.1 * BUDGET
    assert max(took[300:]) > 0.1, "and there still are some"


def test_one_slow_step_by_chance_does_not_end_the_snapshots() -> None:
    protection = begun([0])
    for _ in range(5):
        protection._quiet_s.append(0.1)
    for slow in (0.0, 30.0, 0.0):
        protection.held(Held(protection.progress.step, 0, 1, 0.0, 0.0), 2)
        protection.step_took(0.1 + slow)
        protection.progress = Progress(protection.progress.step + protection.interval)
        protection.begin([0])
    assert protection.interval <= 10


def carried(rate: float, turn_s: float = 0.0005, seconds: float = 10.0) -> tuple[int, float]:
    """Bytes that a sender with a turn every so often puts on a line of this rate, and the longest time a piece takes it."""
    pace, now, total, largest = Pace(rate), 0.0, 0, 0
    while now < seconds:
        now += turn_s
        if pace.may_send(now):
            size = pace.piece_bytes(now)
            pace.posted(now, size)
            total, largest = total + size, max(largest, size)
    return total, largest / rate


@pytest.mark.parametrize(("turn_s", "piece_s"), [(0.0005, 0.006), (0.06, 0.022)])
def test_a_slow_line_is_left_to_training_for_most_of_the_time(turn_s: float, piece_s: float) -> None:
    total, longest_s = carried(12.5e6, turn_s)
    assert 0.7 * 10 * LINE_SHARE <= total / 12.5e6 <= 1.05 * 10 * LINE_SHARE
    assert longest_s <= piece_s


def test_a_fast_line_is_not_held_back_nor_one_whose_rate_nobody_knows() -> None:
    assert carried(1e9)[0] / 1e9 > 1.0
    assert carried(math.inf)[0] > 1e9


def test_what_a_checkpoint_needs_is_left_free(tmp_path: Path) -> None:
    made = parcel()
    snapshots = SnapshotStore(tmp_path / "shelf", lambda: 2000)
    assert put(snapshots, made, "memory") is None
    snapshots.reserve_bytes = 1900
    assert put(snapshots, parcel(6), "memory") == (
        f"100 B of memory are left beside the 1.9 KiB of a checkpoint, and a layer of {made.label.size} B does not fit in"
    )
    assert put(snapshots, parcel(6), "auto") is None
    assert (tmp_path / "shelf" / "6-1").exists()
    snapshots.discard(6)
    snapshots.discard(3)
    assert snapshots.contents() == ()


def test_one_that_is_wanted_at_once_comes_when_the_one_under_way_is_whole() -> None:
    protection = begun([0])
    protection.hasten()
    assert not protection.due(6)
    protection.held(Held(5, 0, 1, 50.0, 0.0), 2)
    assert protection.interval > 1
    assert protection.due(6)
    protection.progress = Progress(6)
    protection.begin([0])
    protection.held(Held(6, 0, 1, 50.0, 0.0), 2)
    assert not protection.due(7), "once"


def test_one_that_cannot_be_kept_ends_the_snapshots_and_is_told_once() -> None:
    protection = begun([0, 2])
    assert not protection.held(Held(5, 0, 1, 0.0, 0.0, "No space left on device"), 2)
    assert not protection.due(100)
    assert protection.lapse() == "No space left on device"
    assert protection.lapse() is None


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.long] * (case in ("clipped", "delayed"))) for case in CASES]
)
def test_a_loss_goes_back_to_a_snapshot_and_the_bits_stay(case: str, tmp_path: Path) -> None:
    calm = run(tmp_path / "calm", InMemoryPool(4), KeepPart(protect="off"), **CASES[case])
    hit = run(tmp_path / "hit", Mortal(4, Death(2, 7, 4), Death(3, 10, 1)), KeepPart(), **CASES[case])
    assert hit.summary.weights_sha256 == calm.summary.weights_sha256
    assert [each.source for each in hit.summary.recoveries] == ["snapshot", "snapshot"]
    assert all(each.step >= 3 for each in hit.summary.recoveries)


def test_an_owner_lost_with_its_holder_means_the_checkpoint(tmp_path: Path) -> None:
    calm = run(tmp_path / "calm", InMemoryPool(4))

    class Both(Mortal):
        def kill(self, node: int) -> None:
            super().kill(node)
            if node == 1:
                super().kill(2)

    hit = run(tmp_path / "hit", Both(4, Death(1, 9)), KeepPart(checkpoint_every=4))
    assert hit.summary.weights_sha256 == calm.summary.weights_sha256
    (healed,) = hit.summary.recoveries
    assert (healed.source, healed.step) == ("checkpoint", 8)


class Rotting(Mortal):
    """Whatever a node holds changes a bit the moment another dies."""

    def kill(self, node: int) -> None:
        for worker in self._workers:
            for step, layer in worker.endpoint.snapshots.contents():
                found = worker.endpoint.snapshots.get(step, layer)
                assert found is not None
                found.body[0] ^= 1
        super().kill(node)


class RottingOnce(Mortal):
    """The owner of a layer has a changed bit in its own copy; its neighbour's is sound."""

    def kill(self, node: int) -> None:
        for worker in self._workers:
            if worker.endpoint.node == 2 and isinstance(worker.member, Node):
                (state,) = worker.member.visits.values()
                for step, layer in worker.endpoint.snapshots.contents():
                    found = worker.endpoint.snapshots.get(step, layer)
                    assert found is not None
                    if layer in state.visit.layers:
                        found.body[0] ^= 1
        super().kill(node)


@pytest.mark.usefixtures("often")
def test_a_damaged_layer_is_refused_and_its_next_source_taken(tmp_path: Path) -> None:
    calm = run(tmp_path / "calm", InMemoryPool(4))
    hit = run(tmp_path / "hit", RottingOnce(4, Death(1, 7)), KeepPart(checkpoint_every=5))
    assert hit.summary.weights_sha256 == calm.summary.weights_sha256
    (healed,) = hit.summary.recoveries
    assert (healed.source, healed.generation) == ("snapshot", 2)
    assert any("node 2: layer" in text and "does not match its digest" in text for text in hit.summary.warnings)


@pytest.mark.usefixtures("often")
def test_a_damaged_snapshot_is_refused_and_the_checkpoint_taken(tmp_path: Path) -> None:
    calm = run(tmp_path / "calm", InMemoryPool(4))
    hit = run(tmp_path / "hit", Rotting(4, Death(2, 7)), KeepPart(checkpoint_every=5))
    assert hit.summary.weights_sha256 == calm.summary.weights_sha256
    (healed,) = hit.summary.recoveries
    assert (healed.source, healed.step) == ("checkpoint", 5)
    assert any("does not match its digest" in text for text in hit.summary.warnings)


class Full(Mortal):
    """A node without memory or disk for snapshots."""

    def _make(self, node: int, ring: str, generation: int) -> None:
        super()._make(node, ring, generation)
        self._workers[-1].endpoint.snapshots = SnapshotStore(None, lambda: 0)


def test_without_room_training_goes_on_protected_by_checkpoints_and_says_so_once(tmp_path: Path) -> None:
    calm = run(tmp_path / "calm", InMemoryPool(3))
    hit = run(tmp_path / "hit", Full(3, Death(1, 7)), KeepPart(checkpoint_every=5))
    assert hit.summary.weights_sha256 == calm.summary.weights_sha256
    assert hit.summary.recoveries[0].source == "checkpoint"
    assert sum("no more snapshots" in text for text in hit.summary.warnings) == 1


class Tight(Mortal):
    """A master with memory for a checkpoint and little more."""

    def start(self, ring: str, generation: int) -> Endpoint:
        endpoint = super().start(ring, generation)
        endpoint.snapshots = SnapshotStore(None, lambda: endpoint.snapshots.reserve_bytes + 1000)
        return endpoint


@pytest.mark.parametrize("mode", ["auto", "memory"])
def test_a_master_near_its_limit_keeps_room_for_checkpoints_and_says_so_once(mode: Any, tmp_path: Path) -> None:
    calm = run(tmp_path / "calm", InMemoryPool(3))
    hit = run(tmp_path / "hit", Tight(3, Death(1, 7)), KeepPart(checkpoint_every=5, protect=mode))
    assert hit.summary.weights_sha256 == calm.summary.weights_sha256
    assert hit.summary.recoveries[0].source == "checkpoint"
    (warning,) = [text for text in hit.summary.warnings if "no more snapshots" in text]
    assert "of a checkpoint" in warning


def snapshots(result: api.Result) -> list[Any]:
    return [each for each in events.read(result.run_dir / "events.jsonl") if isinstance(each, events.SnapshotWhole)]


@pytest.mark.usefixtures("often")
def test_older_snapshots_go_when_a_newer_one_is_whole(tmp_path: Path) -> None:
    most: list[int] = []

    class Counting(Mortal):
        def advance(self) -> bool:
            for worker in self._workers:
                most.append(len({step for step, _ in worker.endpoint.snapshots.contents()}))
            return super().advance()

    result = run(tmp_path / "run", Counting(3), KeepPart(protect="memory"))
    steps = [each.step for each in snapshots(result)]
    assert len(steps) >= 2
    assert steps == sorted(set(steps)), "each completes once and in order"
    assert max(most) == 2, "the whole one and the one under way"
