"""Groups whose members do not wait for each other's sums: the bound holds, nothing is lost or applied twice, it learns."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import Built, recipe, ring_in_memory
from oracle import plain_loop
from ringtmp import api
from ringtmp.config import KeepPart, RingPart, RunConfig, TrainingPart
from ringtmp.data.tables_and_streams import tensors
from ringtmp.errors import ProtocolError, UsageError
from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.metrics.events import NodeStep, read
from ringtmp.plan.node_groups import members_of, parse_sums, shared_parts
from ringtmp.plan.route import Visit
from ringtmp.run.check_settings import resolve
from ringtmp.runtime import snapshot_schedule
from ringtmp.runtime.mailbox import Mail
from ringtmp.strategies.ring import gradient_buckets
from ringtmp.strategies.ring.exchange_snapshots import NodeSnapshots
from ringtmp.strategies.ring.late_sums import LateSums
from ringtmp.strategies.ring.segment_queue import Pass
from ringtmp.transport.base import Arrival, Channel, Frame, Transport, TransportWrapper
from ringtmp.transport.faults import Faults, Shaped
from ringtmp.wire.message_parts import Specs
from ringtmp.wire.messages import GroupChange
from ringtmp.wire.tensors import TensorSpec
from test_group_members_lost import MOMENTS, OTHER, Moment, Mortal, Ticking, arm, model
from test_groups import SMALL
from test_same_bits_as_one_process import MICROBATCHES
from test_schedules import SEED, Case
from test_training_loop import blobs

STEPS = 15
GROUPS = "2,2"
QUICK = {(OTHER, "memory", "after its change was told"), (1, "checkpoint", "before it takes another's")}
SIBLINGS = {1: {2}, 2: {1}, 3: {4}, 4: {3}}


class Slow(TransportWrapper):
    """What goes to the other member of the group takes a while: so many looks of the sender at its mail."""

    def __init__(self, inner: Transport, looks: int, siblings: Mapping[int, Collection[int]] = SIBLINGS) -> None:
        super().__init__(inner)
        self._looks, self._siblings, self._now = looks, siblings, 0
        self._under_way: list[tuple[int, int, Channel, list[Frame]]] = []

    def send(self, peer: int, channel: Channel, frames: Sequence[Frame]) -> None:
        if peer in self._siblings.get(self.node, ()):
            self._under_way.append((self._now + self._looks, peer, channel, [bytes(frame) for frame in frames]))
        else:
            self._inner.send(peer, channel, frames)

    def receive(self) -> list[Arrival]:
        self._now += 1
        while self._under_way and self._under_way[0][0] <= self._now:
            _, *packet = self._under_way.pop(0)
            self._inner.send(*packet)
        return self._inner.receive()


def run(
    folder: Path, pool: InMemoryPool, sums: str = "async:2", steps: int = STEPS, protect: Any = "checkpoint",
    optimizer: str = "adamw", **ring: Any,
) -> api.Result:  # fmt: skip
    config = RunConfig(
        training=TrainingPart(
            data="given",
            steps=steps,
            batch_size=16,
            microbatches=4,
            optimizer=optimizer,
            optimizer_settings={"lr": 0.01},
        ),
        ring=RingPart(nodes=pool.nodes, groups=GROUPS, group_sums=sums, all_devices=True, **ring),
        keep=KeepPart(checkpoint_every=7 if protect == "checkpoint" else 1000, protect=protect),
    )
    data = (tensors("t", *blobs(200)), tensors("t", *blobs(30)))
    return api.start(config, model(), data, None, run_dir=folder, pool=pool)


def slow(looks: int, seed: int = 0) -> InMemoryPool:
    return InMemoryPool(5, seed, lambda transport: Slow(transport, looks), clock=Ticking())


def lateness(result: api.Result) -> list[int]:
    """Of every member and step: how many steps it lacked something of."""
    steps = [each for each in read(result.run_dir / "events.jsonl") if isinstance(each, NodeStep) and each.node]
    assert len(steps) == 4 * STEPS
    assert all(each.oldest is not None for each in steps)
    return [each.step - (each.oldest or 0) for each in steps]


@pytest.mark.parametrize("bound", [1, 3])
def test_nobody_computes_without_what_the_bound_promises_and_the_bound_is_used(bound: int, tmp_path: Path) -> None:
    result = run(tmp_path, slow(60 * bound), f"async:{bound}")
    assert max(lateness(result)) == bound
    assert result.summary.exactness == "steps"


def test_a_seed_repeats_a_run_and_another_order_of_work_gives_other_bits(tmp_path: Path) -> None:
    found = [
        run(tmp_path / str(at), slow(20, seed), steps=9).summary.weights_sha256 for at, seed in enumerate((1, 1, 2))
    ]
    assert found[0] == found[1]
    assert found[0] != found[2]


def come_to_rest(master: Any) -> None:
    """Until every member has what the others made. That nobody has anything to do is no sign of it: a lost packet is sent again
    when its time has come."""
    workers, until = master._node_pool._workers, time.monotonic() + 30
    while not all(worker.member._ending.settled() for worker in workers):
        assert time.monotonic() < until, "a change never came"
        master._node_pool.advance()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Case("mlp").build(tmp_path_factory.mktemp("mlp"))


@pytest.mark.parametrize(
    ("optimizer", "settings", "late", "schedule"),
    [
        ("adamw", {"lr": 0.01}, 2, "zero-bubble"),
        pytest.param("sgd", {"lr": 0.05, "momentum": 0.9}, 1, "1f1b", marks=pytest.mark.long),
        pytest.param("muon", {"lr": 0.01}, 4, "gpipe", marks=pytest.mark.long),
    ],
)
def test_at_rest_the_copies_of_a_stage_differ_by_rounding_alone(
    optimizer: str, settings: dict[str, Any], late: int, schedule: str, built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So every change was applied once by everyone, also of a last batch in which a member has nothing to do; with packets
    lost and out of order, a group of one, and whatever the optimizer keeps."""
    monkeypatch.setattr(gradient_buckets, "BUCKET", SMALL)
    case, groups = Case("mlp"), (3, 1, 2)
    copies: dict[int, list[torch.Tensor]] = {}

    def read_copies(master: Any) -> None:
        come_to_rest(master)
        for worker in master._node_pool._workers:
            for index, state in worker.member.visits.items():
                parameters = [each.detach().flatten() for each in state.stage.parameters[0]]
                copies.setdefault(index, []).append(torch.cat(parameters))

    how = recipe(optimizer, settings, seed=SEED)
    rough = Faults(drop=0.02, duplicate=0.02, reorder=0.05)
    digest, _ = ring_in_memory(
        built, how, case.batches * 3, MICROBATCHES, case.loss, 7, schedule, window=MICROBATCHES, then=read_copies,
        members=members_of(groups, range(7)), late=late,
        wrap=lambda t: Shaped(Slow(t, 25, {1: {2, 3}, 2: {1, 3}}), rough, 7 + t.node),
    )  # fmt: skip
    assert [len(each) for each in copies.values()] == [3, 1, 2]
    moved = recipe("sgd", {"lr": 0.0}, seed=SEED)
    first, _ = ring_in_memory(built, moved, case.batches[:1], MICROBATCHES, case.loss, 1)
    assert digest != first
    for first_copy, *others in copies.values():
        for other in others:
            assert float((first_copy - other).abs().max()) < 1e-5


@pytest.mark.parametrize("groups", [(3,), (1, 2)])
def test_a_step_of_plain_descent_of_which_nothing_is_late_is_that_of_one_process(
    groups: tuple[int, ...], built: Built
) -> None:
    """Each member's change counts by its share of the step, which weight decay shows, too: it is not made by every member."""
    case, nodes, settings = Case("mlp"), 1 + sum(groups), {"lr": 0.5, "weight_decay": 0.1}
    plain = case.plain()
    plain_loop(plain, case.batches[:1], MICROBATCHES, case.loss, lambda p: torch.optim.SGD(p, **settings), SEED)
    apart: list[float] = []

    def compare(master: Any) -> None:
        come_to_rest(master)
        for worker in master._node_pool._workers:
            for state in worker.member.visits.values():
                wanted = torch.cat([p.detach().flatten() for at in state.visit.layers for p in plain[at].parameters()])
                found = torch.cat([each.detach().flatten() for each in state.stage.parameters[0]])
                apart.append(float((found - wanted).abs().max()))

    ring_in_memory(
        built, recipe("sgd", settings, seed=SEED), case.batches[:1], MICROBATCHES, case.loss, nodes,
        members=members_of(groups, range(nodes)), late=1, then=compare,
    )  # fmt: skip
    assert len(apart) == sum(groups)
    assert max(apart) < 1e-6


class Ledger:
    """What every member changed in every step, and what was copied for snapshots, by visit, in the order of parameters."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.changes: dict[tuple[int, int, int], list[torch.Tensor]] = {}  # by visit, member and step
        self.snapshots: dict[tuple[int, int], torch.Tensor] = {}  # by visit and step
        self.early = 0  # changes of a step that were there when a snapshot from before it was taken
        update, take = LateSums.update, NodeSnapshots.take

        def watched(this: Any, current: Pass) -> None:
            post, told = this._post, self.changes.setdefault((this._visit.index, this._me, current.step), [])

            def noted(node: int, message: Any, values: list[torch.Tensor]) -> None:
                bucket = this._known()[message.bucket]
                told.extend(each[start:stop].clone() for each in values for start, stop in bucket.slots)
                post(node, message, values)

            this._post = noted
            update(this, current)
            this._post = post

        def copied(this: Any, step: int, stage: Any) -> None:
            values = torch.cat([each.detach().flatten() for each in stage.parameters[0]])
            self.snapshots[stage.visit.index, step] = values
            self.early += any(visit == stage.visit.index and at >= step for visit, _, at in self.changes)
            take(this, step, stage)

        patch.setattr(LateSums, "update", watched)
        patch.setattr(NodeSnapshots, "take", copied)

    def between(self, visit: int, first: int, stop: int) -> torch.Tensor:
        found = [
            torch.cat(told) for (at, _, step), told in self.changes.items() if at == visit and first <= step < stop
        ]
        return torch.stack(found).sum(0)


@pytest.mark.parametrize(
    ("seed", "looks"), [(0, 25), *(pytest.param(seed, seed * 7, marks=pytest.mark.long) for seed in range(1, 12))]
)
def test_a_snapshot_has_the_changes_of_all_steps_before_it_and_of_none_after(
    seed: int, looks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the other member of the group is a step ahead. Otherwise a step that is repeated after a loss would be applied
    twice, in part."""
    monkeypatch.setattr(snapshot_schedule, "BUDGET", 100.0)  # one after the other
    ledger = Ledger(monkeypatch)
    to_the_first = {0: {1, 3}, 2: {3}, 4: {1}}  # whatever goes to those who speak for their groups
    pool = InMemoryPool(5, seed, lambda transport: Slow(transport, looks, to_the_first), clock=Ticking())
    run(tmp_path, pool, protect="memory")
    for visit in (1, 2):
        steps = sorted(step for at, step in ledger.snapshots if at == visit)
        assert len(steps) > 2
        for first, stop in pairwise(steps):
            grown = ledger.snapshots[visit, stop] - ledger.snapshots[visit, first]
            assert float((grown - ledger.between(visit, first, stop)).abs().max()) < 1e-5
    if not seed:
        assert ledger.early, "nobody was ever ahead"


LATE = "strategies.ring.late_sums:LateSums"
LOST = {
    "before its own change": Moment(f"{LATE}.update", "before", 10),
    "after its change was told": Moment(f"{LATE}.update", "after", 10),
    "before it takes another's": Moment(f"{LATE}.take", "before", 13),
    "after it took another's": Moment(f"{LATE}.take", "after", 13),
    "before it applies what came": Moment(f"{LATE}.apply", "before", 11),
}


@pytest.mark.parametrize(
    ("name", "node", "protect"),
    [
        pytest.param(name, node, protect, marks=[] if (node, protect, name) in QUICK else pytest.mark.long)
        for name, moment in LOST.items()
        for node in moment.nodes
        for protect in ("memory", "checkpoint")
    ],
)
def test_a_lost_member_is_replaced_from_what_its_group_last_agreed_on(
    name: str, node: int, protect: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MOMENTS, name, LOST[name])
    seen = arm(name, node, monkeypatch)
    next(seen)
    pool = Mortal(5, wrap=lambda transport: Slow(transport, 30), clock=Ticking())
    hit = run(tmp_path, pool, protect=protect).summary
    assert next(seen) > LOST[name].times, "it never came to its moment"
    source = "snapshot" if protect == "memory" else "checkpoint"
    assert [(each.lost, each.source) for each in hit.recoveries] == [((node,), source)]
    assert (hit.steps, hit.exactness) == (STEPS, "steps")
    assert hit.loss.last < hit.loss.first


@pytest.mark.parametrize(
    ("training", "ring", "says"),
    [
        ({}, {"group_sums": "async:0"}, "must be exact, or async:STEPS with 1 to 64 steps"),
        ({}, {"group_sums": "async:65"}, "1 to 64 steps"),
        ({}, {"group_sums": "async"}, "such as async:2"),
        ({"sum_tree": 4}, {}, "--sum-tree 4 asks for the bits of one process"),
        ({}, {"share_optimizer": True}, "cannot be combined with --share-optimizer"),
        ({"clip_norm": 1.0}, {}, "cannot be combined with --clip-norm"),
        ({"staleness": 1}, {}, "cannot be combined with --laps, --route v or --staleness 1 yet"),
        ({"microbatches": "auto"}, {}, "cannot be combined with --microbatches auto"),
        ({}, {"groups": None}, "use it with --groups 2,2, say"),
        ({}, {"groups": "auto"}, "is for groups given by hand"),
        ({}, {"nodes": 6}, "needs 5 nodes with the master"),
        ({"microbatches": 3}, {"groups": "1,3"}, "use --microbatches 4 or more, or smaller groups"),
        ({}, {"strategy": "ps"}, "--group-sums works with --strategy ring only"),
        ({}, {"strategy": "auto"}, "is no way that --strategy auto considers"),
    ],
)
def test_what_cannot_be_is_refused(training: dict[str, Any], ring: dict[str, Any], says: str) -> None:
    if ring.get("strategy") == "ps":
        ring = {"groups": None, **ring}
    config = RunConfig(
        training=TrainingPart(**{"batch_size": 16, "microbatches": 4, **training}),
        ring=RingPart(**{"nodes": 5, "groups": GROUPS, "group_sums": "async:2", **ring}),
    )
    with pytest.raises(UsageError, match=says):
        resolve(config)


def test_shares_are_as_equal_as_microbatches_allow() -> None:
    assert [parse_sums(each) for each in ("exact", "async:1", "async:64")] == [0, 1, 64]
    assert [shared_parts(4, 0, 8), shared_parts(1, 2, 8), shared_parts(1, 2, 7)] == [4, 8, 4]


class Still:
    """A stage of one tensor of six values."""

    def __init__(self) -> None:
        self.parameters = [[torch.zeros(6), torch.zeros(2)]]

    def step(self, step: int, total_norm: torch.Tensor | None) -> None:
        """Nothing changes."""


def test_changes_out_of_turn_too_far_ahead_or_of_another_size_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_buckets, "BUCKET", 4)
    posted: list[int] = []
    stage: Any = Still()
    late = LateSums(Visit(1, 1, 0, 1, (2, 3)), 1, stage, bound=2, step=5, post=lambda node, *_: posted.append(node))
    whole = (TensorSpec("float32", (16,), (1,)),)

    def said(step: int, bucket: int, tensors: Specs = whole, sender: int = 2) -> None:
        late.check(sender, GroupChange(step, 1, bucket, tensors))

    for step, bucket in ((4, 0), (6, 0), (5, 1), (5, 2), (5, -1)):
        with pytest.raises(ProtocolError, match="out of turn"):
            said(step, bucket)
    with pytest.raises(ProtocolError, match="for 16 values"):
        said(5, 0, (TensorSpec("float32", (15,), (1,)),))
    with pytest.raises(ProtocolError, match="for 16 values"):
        said(5, 0, (TensorSpec("float64", (16,), (1,)),))
    for place in ((5, 0), (5, 1), (6, 0), (6, 1)):
        said(*place)
    said(5, 0, (), sender=3)  # it had no microbatch
    with pytest.raises(ProtocolError, match="out of turn"):
        said(6, 1)  # again
    with pytest.raises(ProtocolError, match="out of turn"):
        said(7, 0)  # nobody can have been let so far ahead of this one
    late.update(Pass(9, 5, True, 2, 4))
    said(7, 0)
    assert posted == [2, 3, 2, 3]


def test_what_a_faster_member_made_of_a_step_waits_until_that_step_is_done_here() -> None:
    stage: Any = Still()
    late = LateSums(Visit(1, 1, 0, 1, (2,)), 1, stage, bound=2, step=5, post=lambda *_: None)

    def comes(step: int) -> list[float]:
        message = GroupChange(step, 1, 0, (TensorSpec("float32", (32,), (1,)),))
        late.check(2, message)
        late.take(Mail(2, message, [torch.full((32,), float(step))], 0, 0.0, 0.0))
        late.apply()
        return [float(each[0]) for each in stage.parameters[0]]

    assert comes(5) == [0, 0]
    assert comes(6) == [0, 0]
    late.update(Pass(9, 5, True, 2, 4))
    assert [float(each[0]) for each in stage.parameters[0]] == [5, 5]
    late.update(Pass(10, 6, True, 2, 4))
    assert [float(each[0]) for each in stage.parameters[0]] == [11, 11]
    assert late.settled
    assert late.oldest == 6
