"""Members of a group share the optimizer state by whole parameters: the same bits, and every state is kept once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from crooked import Crooked, Tensors
from harness import Built, recipe, ring_in_memory
from ringtmp.config import KeepPart, RingPart, RunConfig, TrainingPart
from ringtmp.errors import Misconduct, ProtocolError, UsageError
from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.plan.node_groups import members_of
from ringtmp.plan.route import Visit
from ringtmp.run.check_settings import resolve
from ringtmp.runtime.mailbox import Mail
from ringtmp.runtime.snapshot_store import SnapshotStore
from ringtmp.strategies.ring import gradient_buckets
from ringtmp.strategies.ring.gather_state import GatheredState
from ringtmp.strategies.ring.pass_order import PassOrder
from ringtmp.strategies.ring.shared_state import SharedState
from ringtmp.strategies.ring.sums_and_norms import SumsAndNorms
from ringtmp.transport.base import Channel, Frame
from ringtmp.transport.faults import Faults, Shaped
from ringtmp.wire import messages
from ringtmp.wire.messages import GroupState
from ringtmp.wire.tensors import TensorSpec
from test_group_members_lost import MOMENTS, NODE, OTHER, Moment, Mortal, Ticking, arm, expected, run
from test_groups import SMALL
from test_groups_in_place import OneWaits
from test_late_sums import Slow
from test_rings_sum_tree import plain
from test_same_bits_as_one_process import MICROBATCHES
from test_schedules import CLIP, SEED, SETTINGS, Case

SHARED = "strategies.ring.shared_state:SharedState"
LOST = {
    "before it says its norms": Moment(f"{SHARED}.say_norms", "before", 7, (OTHER,)),
    "after it said its norms": Moment(f"{SHARED}.say_norms", "after", 7, (OTHER,)),
    "before it hands on what it updated": Moment(f"{SHARED}.send_weights", "before", 7),
    "after it handed on what it updated": Moment(f"{SHARED}.send_weights", "after", 7),
    "before it has the others' parameters": Moment(f"{SHARED}.put_weights", "before", 7),
    "when it has the others' parameters": Moment(f"{SHARED}.put_weights", "after", 7),
}
QUICK = {("after it handed on what it updated", OTHER)}


@pytest.fixture(autouse=True)
def _many_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_buckets, "BUCKET", SMALL)


@pytest.fixture(scope="module")
def built_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Built]:
    return cache(lambda model: Case(model).build(tmp_path_factory.mktemp(model)))


@pytest.mark.parametrize(
    ("model", "groups", "schedule"),
    [
        ("gpt", (2, 2), "zero-bubble"),
        ("mlp", (3, 1, 2), "1f1b"),
        pytest.param("gpt", (4,), "gpipe", marks=pytest.mark.long),
    ],
)
def test_shared_state_ends_in_the_bits_of_one_process(
    model: str, groups: tuple[int, ...], schedule: str, built_of: Callable[[str], Built]
) -> None:
    """With momentum, dropout, clipping, packets lost and out of order, a last batch in which a member has nothing to do."""
    case, nodes = Case(model), 1 + sum(groups)
    how = recipe("sgd", SETTINGS, seed=SEED, clip_norm=CLIP, sum_tree=4)
    rough = Faults(drop=0.02, duplicate=0.02, reorder=0.05)
    got = ring_in_memory(
        built_of(model), how, case.batches, MICROBATCHES, case.loss, nodes, schedule, window=MICROBATCHES,
        members=members_of(groups, range(nodes)), shares_state=True, wrap=lambda t: Shaped(t, rough, 7 + t.node),
    )  # fmt: skip
    assert got == plain(model, 4)


def test_every_state_is_kept_by_one_member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[tuple[int, int], set[int]] = {}
    send = SharedState.send_weights

    def watched(this: Any, turn: int) -> None:
        states = this._stage._optimizer.states
        kept[this._visit.index, this._rank] = {at for at, state in enumerate(states) if state}
        send(this, turn)

    monkeypatch.setattr(SharedState, "send_weights", watched)
    calm = expected(tmp_path)
    result = run(tmp_path / "shared", InMemoryPool(5), "4", share_optimizer=True)
    assert result.summary.weights_sha256 == calm
    every = sorted(at for found in kept.values() for at in found)
    assert len(kept) == 4
    assert len(every) >= 4
    assert every == list(range(len(every)))  # none twice, none missing


@pytest.mark.parametrize(
    ("name", "node", "protect"),
    [
        pytest.param(name, node, protect, marks=[] if (name, node) in QUICK else pytest.mark.long)
        for name, moment in LOST.items()
        for node in moment.nodes
        for protect in ("memory", "checkpoint")
    ],
)
def test_a_lost_member_is_replaced_from_what_its_group_kept(
    name: str, node: int, protect: Any, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A snapshot has the state of all members, gathered by the first; and so has a checkpoint."""
    monkeypatch.setitem(MOMENTS, name, LOST[name])
    calm = expected(tmp_path_factory.getbasetemp())
    seen = arm(name, node, monkeypatch)
    next(seen)
    every = 5 if protect == "checkpoint" else 1000
    keep = KeepPart(checkpoint_every=every, protect=protect)
    hit = run(tmp_path / "hit", Mortal(5, clock=Ticking()), "2,2", keep=keep, share_optimizer=True)
    assert next(seen) > LOST[name].times, "it never came to its moment"
    source = "checkpoint" if protect == "checkpoint" else "snapshot"
    assert [(each.lost, each.source) for each in hit.summary.recoveries] == [((node,), source)]
    assert hit.summary.weights_sha256 == calm


@pytest.mark.parametrize("groups", ["4", "2,2"])
def test_a_member_that_nobody_replaces_leaves_its_state_to_those_who_are_left(
    groups: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other owners than when the snapshot was taken."""
    calm = expected(tmp_path_factory.getbasetemp())
    seen = arm("after its update", 1, monkeypatch)
    next(seen)
    keep = KeepPart(checkpoint_every=1000, protect="memory")
    result = run(tmp_path / "hit", OneWaits(), groups, keep=keep, share_optimizer=True)
    assert result.summary.weights_sha256 == calm
    lost, joined = result.summary.recoveries
    assert (lost.source, lost.nodes, joined.nodes) == ("snapshot", 4, 5)


class Lagging(Slow):
    """What members send of a snapshot comes when the first is steps ahead."""

    def send(self, peer: int, channel: Channel, frames: Sequence[Frame]) -> None:
        if channel is Channel.BULK:
            super().send(peer, channel, frames)
        else:
            self._inner.send(peer, channel, frames)


def test_state_that_comes_steps_later_is_still_of_its_snapshot(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm = expected(tmp_path_factory.getbasetemp())
    monkeypatch.setitem(MOMENTS, "late", Moment(f"{NODE}._update", "after", 10))
    put, behind = GatheredState.put, list[int]()

    def watched(this: GatheredState, mail: Mail) -> None:
        behind.append(done[-1] - mail.message.step if done else 0)  # type: ignore[attr-defined]
        put(this, mail)

    update, done = SumsAndNorms.update, list[int]()

    def updated(this: SumsAndNorms, state: Any, current: Any) -> None:
        if this._me == 1:
            done.append(current.step)
        update(this, state, current)

    monkeypatch.setattr(GatheredState, "put", watched)
    monkeypatch.setattr(SumsAndNorms, "update", updated)
    seen = arm("late", OTHER, monkeypatch)
    next(seen)
    keep = KeepPart(checkpoint_every=1000, protect="memory")
    pool = Mortal(5, wrap=lambda transport: Lagging(transport, 150), clock=Ticking())
    hit = run(tmp_path / "hit", pool, "2,2", keep=keep, share_optimizer=True)
    assert [(each.lost, each.source) for each in hit.summary.recoveries] == [((OTHER,), "snapshot")]
    assert hit.summary.weights_sha256 == calm
    assert max(behind) >= 1, "nothing ever came late"


@pytest.mark.usefixtures("offenders")
@pytest.mark.parametrize(
    ("kind", "which", "later"),
    [
        ("GroupNorms", 0, 1),
        ("GroupWeights", 3, 2),
        ("GroupSum", 3, 1),
        pytest.param("GroupNorms", 3, 2**60, marks=pytest.mark.long),
        pytest.param("GroupWeights", 0, 10**6, marks=pytest.mark.long),
        pytest.param("GroupSum", 8, 2**60, marks=pytest.mark.long),
    ],
)
def test_who_speaks_of_a_later_pass_before_it_has_said_all_of_this_one_is_named(
    kind: str, which: int, later: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """It was believed, what was due never came, and the run ended with the word that an innocent node gives no sign of life."""
    calm, left = expected(tmp_path_factory.getbasetemp()), [which]

    def of_later(peer: int, message: Any, tensors: Tensors) -> tuple[int, Any, Tensors] | None:
        if not isinstance(message, getattr(messages, kind)):
            return None
        left[0] -= 1
        return (peer, msgspec.structs.replace(message, turn=message.turn + later), tensors) if left[0] < 0 else None

    shares = {"share_optimizer": kind != "GroupSum"}
    keep = KeepPart(checkpoint_every=1000, protect="memory")
    done = run(tmp_path / "bent", Crooked(5, 2, of_later), "2,2", keep=keep, **shares).summary
    assert [each.lost for each in done.recoveries] == [(2,)]
    assert done.weights_sha256 == calm


def test_what_is_owed_of_a_pass_is_said_once_and_before_anything_of_a_later_one() -> None:
    order = PassOrder(lambda sender: ("a", "b"))
    order.check(2, 1, "a", 0, 1)
    for what, turn, why in (("c", 1, "not its to send"), ("a", 1, "out of turn"), ("a", 2, "before all of pass 1")):
        with pytest.raises(ProtocolError, match=why):
            order.check(2, turn, what, 0, 1)
    order = PassOrder(lambda sender: ("a", "b"))
    order.check(2, 3, "a", 0, None)  # evaluations may lie between; this member is in none of its passes yet
    order.nobody_left_out(3)
    with pytest.raises(Misconduct, match="of pass 3 before all of pass 2") as found:
        order.nobody_left_out(2)
    assert found.value.node == 2
    with pytest.raises(ProtocolError, match="out of turn"):
        order.check(2, 2, "a", 0, None)


def test_state_that_is_not_a_layers_or_comes_twice_is_refused(built_of: Callable[[str], Built]) -> None:
    given = built_of("mlp").layers
    index = next(at for at, each in enumerate(given) if each.trained)
    weight = next(each for each in given[index].tensors if each.trainable)
    gathered = GatheredState(Visit(1, 1, index, index + 1, (2, 3)), given.__getitem__)
    spec = TensorSpec("float32", tuple(weight.shape), tuple(torch.empty(weight.shape).stride()))
    name = (weight.name, "exp_avg")

    def said(step: int = 5, layer: int = index, state: Any = (name,), specs: Any = (spec,), sender: int = 2) -> None:
        gathered.check(sender, GroupState(step, 1, layer, state, specs), 5)

    wrong: list[tuple[dict[str, Any], str]] = [
        ({"layer": index + 1}, "its group does not hold"),
        ({"step": 7}, "of step 7 in step 5"),
        ({"state": (name, name), "specs": (spec, spec)}, "with 2 tensors"),
        ({"state": (("nobody", "exp_avg"),)}, "sent optimizer state nobody"),
        ({"specs": (TensorSpec("float32", (1,), (1,)),)}, "as exp_avg"),
        ({"specs": ()}, "with 0 tensors"),
    ]
    for what, why in wrong:
        with pytest.raises(ProtocolError, match=why):
            said(**what)
    said(step=3)  # of a snapshot that was given up, and late
    said()
    said(sender=3)
    with pytest.raises(ProtocolError, match="twice"):
        said()
    said(step=6)  # the next
    with pytest.raises(ProtocolError, match="twice"):
        said()
    gathered = GatheredState(Visit(1, 1, index, index + 2, (2, 3)), given.__getitem__)
    said()
    with pytest.raises(ProtocolError, match="of step 6 before all of step 5"):
        said(step=6)


def test_a_member_that_announces_the_next_snapshot_keeps_none_from_becoming_whole() -> None:
    """What had come of the one under way was thrown away for it."""
    visit = Visit(1, 1, 0, 1, (2, 3))
    gathered = GatheredState(visit, lambda layer: pytest.fail("not asked"))
    stage: Any = SimpleNamespace(visit=visit, layer_state=lambda layer, frozen: ([torch.ones(1)], {}))

    def came(sender: int, step: int) -> None:
        value = torch.tensor([float(step)])
        gathered.put(Mail(sender, GroupState(step, 1, 0, ((f"of {sender}", "m"),)), [value], 4, 0.0, 0.0))

    first, second = visit.others
    for step in (5, 8):
        came(first, step)
        gathered.take(step, stage, lambda layer: frozenset())
        came(first, step + 1)  # there will be none
        assert list(gathered.whole()) == []
        came(second, step)
        ((found, layer, (_, state)),) = gathered.whole()
        assert (found, layer, {float(each) for each in state.values()}) == (step, 0, {float(step)})
        assert list(gathered.whole()) == []
        came(first, step + 2)
        assert len(gathered._parts) <= 2
    gathered.drop(20)
    came(first, 20)
    assert list(gathered.whole()) == []
    assert not gathered._parts


def test_a_store_that_takes_none_of_several_whole_layers_ends_their_snapshot_with_a_word(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others' parts came first, so that all layers are whole at once when the first takes its own."""
    calm, keep = expected(tmp_path_factory.getbasetemp()), KeepPart(checkpoint_every=1000, protect="memory")
    take, put, full = GatheredState.take, SnapshotStore.put, list[int]()

    def waiting(this: GatheredState, step: int, stage: Any, frozen: Any) -> None:
        take(this, step, stage, frozen)
        for parts in this._parts.values():
            parts.others = {other: {} for other in this._visit.others}
        full.append(len(this._parts))

    def refusing(this: SnapshotStore, *given: Any) -> str | None:
        return "no space is left" if len(full) == 1 else put(this, *given)

    monkeypatch.setattr(GatheredState, "take", waiting)
    monkeypatch.setattr(SnapshotStore, "put", refusing)
    done = run(tmp_path / "full", InMemoryPool(5), "4", keep=keep, share_optimizer=True).summary
    assert max(full) > 1, "one layer alone is no test"
    assert (done.weights_sha256, done.recoveries) == (calm, ())


@pytest.mark.parametrize(
    ("ring", "protect", "says"),
    [
        ({"nodes": 5}, "auto", "--share-optimizer is for stages that several nodes hold: use it with --groups 2,2"),
        ({"nodes": 4, "strategy": "ps"}, "auto", "--share-optimizer works with --strategy ring only"),
    ],
)
def test_sharing_what_cannot_be_shared_is_refused(ring: dict[str, Any], protect: Any, says: str) -> None:
    training = TrainingPart(batch_size=16, microbatches=4, sum_tree=4)
    config = RunConfig(training=training, ring=RingPart(**ring, share_optimizer=True), keep=KeepPart(protect=protect))
    with pytest.raises(UsageError, match=says):
        resolve(config)
