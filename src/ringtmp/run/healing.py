"""Leads when a node has died, and whenever else the ring must be rebuilt: devices come, go, or turn out slower.

A new generation goes on from the newest state that is whole. Those who live stay as they are, somebody takes the lost one's
place, the steps since are done again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import msgspec

from ringtmp.errors import DoesNotFit, Interrupted, LinkLost, NodeLost, SnapshotUnusable
from ringtmp.launch.supervise import Restarted
from ringtmp.metrics.events import NodeGone, Regrouped
from ringtmp.model.portable_layer import Layer
from ringtmp.plan.node_groups import parse_sums
from ringtmp.plan.route import MASTER
from ringtmp.run.members_and_plan import Generation, Generations, Origin, Run
from ringtmp.run.rebalancing import Ready
from ringtmp.runtime.base_leader import BaseLeader, Start
from ringtmp.runtime.checkpoint import Progress
from ringtmp.runtime.optimizers import state_values
from ringtmp.runtime.snapshot_schedule import Snapshot, in_hand
from ringtmp.strategies.base import Leader
from ringtmp.wire.messages import Hello, Renew

#: So many losses in a row without a step further than ever before: something kills them, and would go on.
MOST_IN_A_ROW = 8


def memory_need(layers: Sequence[Layer], optimizer: str, settings: Mapping[str, Any], nodes: int) -> int:
    """Bytes that all nodes together need at least: weights, gradients, optimizer state. Nothing is kept twice here, and
    activations are not counted: what is short of this cannot go on, what is above it is tried."""
    if nodes == 1:
        return 0
    trained = sum(layer.trained + state_values(optimizer, settings, layer) for layer in layers)
    return 4 * (sum(layer.parameters for layer in layers) + trained)


class Losses:
    """The losses of one healing, and whether there were too many without any progress between them."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._furthest = 0
        self._now: list[NodeLost] = []

    def begin(self) -> None:
        self._now = []

    def bear(self, lost: NodeLost) -> bool:
        """Whether to go on after one more."""
        self._now.append(lost)
        self._in_a_row += 1
        return lost.node is not None and self._in_a_row <= MOST_IN_A_ROW

    def found(self, losses: Iterable[NodeLost]) -> list[NodeLost]:
        """Of these, whoever was not told of in this healing; from here on it is."""
        new = [each for each in losses if each.node not in self.nodes]
        self._now += new
        return new

    def step_done(self, steps: int) -> None:
        if steps > self._furthest:
            self._furthest, self._in_a_row = steps, 0

    @property
    def reason(self) -> str:
        return "; ".join(map(str, self._now))

    @property
    def nodes(self) -> tuple[int, ...]:
        lost = (each.node for each in self._now if not isinstance(each, LinkLost))
        return tuple(dict.fromkeys(node for node in lost if node is not None))

    @property
    def notice_s(self) -> float:
        return max((each.notice_s for each in self._now), default=0.0)


class Healing:
    def __init__(self, run: Run, generations: Generations) -> None:
        self._run = run
        self._generations = generations
        self._node_pool = run.pool
        self.record = run.record
        self.losses = Losses()
        self._apart: frozenset[frozenset[int]] = frozenset()  # nodes that cannot reach each other
        self._replaced = -1  # up to this step the checkpoint is right, and not what nodes have in hand

    # -- the four reasons for a new generation ------------------------------------------------------------------------

    def heal(self, lost: NodeLost, reached: Progress) -> Generation:
        """A node was lost. Another loss meanwhile starts the healing over."""
        noticed = time.monotonic()
        self.losses.begin()
        while True:
            if self._run.job.config.keep.protect == "off" or not self.losses.bear(lost):
                raise lost
            if isinstance(lost, LinkLost):
                self._apart |= {lost.pair}
            else:  # whoever takes its place may have other links
                self._apart = frozenset(pair for pair in self._apart if lost.node not in pair)
            self.record.warn(f"{lost}; healing")
            self.record.write(NodeGone(time.monotonic(), reached.step, lost.node, str(lost)))
            self.record.log.flush()  # for those who look on: the next step may be a while off
            try:
                generation, source = self._revive(reached)
                break
            except NodeLost as another:
                lost = another
        repeated = reached.step - generation.progress.step
        self.record.survived(
            self._regrouped(self.losses.reason, noticed, generation.step, repeated=repeated, source=source)
        )
        return generation

    def regroup(self, leader: Leader, progress: Progress, reason: str) -> Generation | None:
        """Devices come or go: at a step boundary save, and continue from there with the remaining ones. None:
        there is no room on the disk."""
        started = time.monotonic()
        self.losses.begin()
        if not self._run.saving.save(leader, progress):
            return None
        self.record.watcher.tell(f"{reason}: rebuilding the ring after step {progress.step}")
        if self._node_pool.all_anew():
            self.dismiss(leader, progress, "a new generation begins")
            generation = self._all_anew(progress)
        else:
            generation, _ = self._revive(progress)
        reasons = "; ".join(filter(None, (reason, self.losses.reason)))
        self.record.write(self._regrouped(reasons, started, generation.progress.step))
        return generation

    def lay_out_again(self, progress: Progress) -> Generation:
        """The newest checkpoint holds other weights than the ring: it begins anew with those. A loss meanwhile is raised."""
        self.losses.begin()
        self._run.protection.spoil()
        self._replaced = progress.step
        return self._revive(progress)[0]

    def rebalance(self, leader: Leader, progress: Progress, ready: Ready) -> Generation | None:
        """Devices are not as fast as planned. None: there is no room on the disk."""
        rebalancing = self._run.rebalancing
        # Going back to a snapshot would skip the batches since, where they are not kept.
        here = ready.here or self._run.batches.gone
        if here and not self._run.saving.save(leader, progress):
            rebalancing.drop()
            return None
        rebalancing.begin(ready.move)
        started = time.monotonic()
        self.losses.begin()
        generation, source = self._revive(progress)
        step = generation.progress.step
        event = self._regrouped(
            ready.move.reason, started, step, repeated=progress.step - step, source=source, kind="rebalanced"
        )
        self.record.write(event)
        self.record.watcher.tell(rebalancing.moved(event, ready.move))
        return generation

    def take_up(self, left: Snapshot, origin: Origin) -> Generation:
        """A master was killed, and left this snapshot with its nodes; `origin` is the newest checkpoint. If not all of it is
        there any more, the run goes on from that."""
        run, generations = self._run, self._generations
        gathering = BaseLeader(Start(generations.endpoint, self._node_pool, self.record.log))
        gathering.gather(self._node_pool.addresses())
        protection, saved = run.protection, origin.progress.step
        protection.whole = left
        if protection.newest(gathering.hellos, (), run.kept_in_snapshots, saved) is None:
            protection.spoil()
            self.record.watcher.tell(f"the devices have not kept all of step {left.step}: going on from step {saved}")
            return generations.lay_out(replace(origin, hellos=gathering.hellos))
        self.record.watcher.tell(f"going on from the snapshot of step {left.step}, which the devices have kept")
        try:
            return generations.lay_out(Origin(origin.checkpoint, left.progress, gathering.hellos, left))
        except SnapshotUnusable as problem:
            protection.spoil()
            self.record.warn(f"{problem}; going back to the checkpoint of step {saved}")
            return self._revive(origin.progress)[0]

    def record_restart(self, before: Restarted, first: Generation) -> None:
        """This master takes the place of one that is gone: for the run that is a recovery like any other."""
        self.losses.begin()
        repeated = max(0, (before.steps or 0) - first.step)
        source = "checkpoint" if first.step == self._run.saving.step else "snapshot"
        event = self._regrouped(
            before.reason, before.at, first.step, repeated=repeated, source=source, kind="restarted"
        )
        self.record.write(msgspec.structs.replace(event, lost=(MASTER,)))

    def dismiss(self, leader: Leader, progress: Progress, reason: str) -> None:
        """Stop everyone. Somebody who died when all was saved was needed by nobody any more: a loss that costs nothing."""
        for lost in leader.stop(reason):
            self.losses.begin()
            self.losses.found([lost])
            self.record.warn(f"{lost}; the checkpoint of step {self._run.saving.step} had already been saved")
            self.record.write(self._regrouped(str(lost), time.monotonic(), progress.step, source="checkpoint"))

    # -- the next generation ------------------------------------------------------------------------------------------

    def _regrouped(
        self, reason: str, since: float, step: int, *, repeated: int = 0, source: str = "", kind: str = ""
    ) -> Regrouped:
        now, losses = time.monotonic(), self.losses
        return Regrouped(
            now, step, self._generations.number, reason, nodes=self._node_pool.nodes, seconds=now - since, lost=losses.nodes,
            notice_s=losses.notice_s, repeated=repeated, source=source, kind=kind,
        )  # fmt: skip

    def _revive(self, reached: Progress) -> tuple[Generation, str]:
        """From the newest whole state; also returns what that was. If the remaining devices cannot hold the model, the
        run pauses until another joins."""
        while True:
            try:
                return self._revived(reached)
            except DoesNotFit as short:
                if self._node_pool.await_another(str(short), self._waiting):
                    continue
                if self._run.interrupted():
                    go_on = self._run.job.how_to_go_on
                    raise Interrupted(f"interrupted while the run was paused: {go_on}") from None
                raise

    def _waiting(self) -> bool:
        """Whether the user wants to leave; a wait that is meant is no silence."""
        self.record.still_here()
        return self._run.interrupted()

    def _left_by_all(self, hellos: Mapping[int, Hello], reached: Progress, saved: int) -> Snapshot | None:
        """Where members of groups have the same layers: all of the step that was under way, if nobody has ended it."""
        kept, wanted = self._generations.endpoint.snapshots.contents(), self._run.kept_in_snapshots
        found = in_hand(hellos, kept, wanted, Snapshot(reached), saved)
        return found if found is not None and found.step == reached.step else None

    def _spared(self) -> Set[int]:
        """Members of groups whose siblings have all that they have."""
        generations, ring = self._generations, self._generations.config.ring
        route = None if generations.newest is None else getattr(generations.newest.plan, "route", None)
        if route is None or ring.share_optimizer or parse_sums(ring.group_sums):
            return set()
        return {node for visit in route.visits if visit.others for node in visit.members}

    def _revived(self, reached: Progress, by_hand: bool = True) -> tuple[Generation, str]:
        """`by_hand`: from what those who are left have in hand, if it is whole."""
        run, generations, protection = self._run, self._generations, self._run.protection
        endpoint, config = generations.endpoint, generations.config
        told = generations.leave()
        generations.number += 1
        checkpoint = run.saving.open()
        need_bytes = memory_need(
            run.layers, config.training.optimizer, config.training.optimizer_settings, self._node_pool.nodes
        )
        living = self._node_pool.replace_lost(
            run.name, generations.number, not run.strategy.splits_layers, need_bytes, self._spared()
        )
        for other in self.losses.found(self._node_pool.found_lost):
            self.record.warn(f"{other}; healing")
        endpoint.renew(generations.number, Renew(generations.number), living)
        generations.settle()
        gathering = BaseLeader(Start(endpoint, self._node_pool, self.record.log))
        gathering.gather(self._node_pool.addresses())
        kept, saved = endpoint.snapshots.contents(), checkpoint.progress.step
        if survivors := by_hand and run.strategy.state_from == "survivors":
            every = [index for index, layer in enumerate(run.layers) if layer.tensors]
            snapshot = in_hand(gathering.hellos, kept, every, Snapshot(reached, told=told), saved)
        else:
            by_hand = by_hand and config.ring.groups is not None and reached.step > self._replaced
            snapshot = self._left_by_all(gathering.hellos, reached, saved) if by_hand else None
            survivors = snapshot is not None
            if snapshot is None:
                snapshot = protection.newest(gathering.hellos, kept, run.kept_in_snapshots, saved)
        if snapshot is None and (whole := protection.whole) is not None and whole.step > saved:
            protection.spoil()  # gone with those who held it
        progress = checkpoint.progress if snapshot is None else self._without_undone_epoch(snapshot.progress)
        try:
            generation = generations.lay_out(Origin(checkpoint, progress, gathering.hellos, snapshot, self._apart))
        except SnapshotUnusable as problem:
            protection.spoil()
            self.record.warn(f"{problem}; going back to the checkpoint of step {saved}")
            return self._revived(reached, by_hand=False)
        return generation, "checkpoint" if snapshot is None else "survivors" if survivors else "snapshot"

    def _without_undone_epoch(self, progress: Progress) -> Progress:
        """Where the step that ends an epoch is done again, the epoch has not ended."""
        per_epoch = self._run.batches.steps_per_epoch
        if per_epoch is None:
            return progress
        return msgspec.structs.replace(progress, epochs_done=min(progress.epochs_done, progress.step // per_epoch))

    def _all_anew(self, progress: Progress) -> Generation:
        """Every process starts again, with fresh keys. If one is lost meanwhile, the remaining ones start again."""
        generations = self._generations
        generations.leave()
        self.losses.begin()
        while True:
            generations.number += 1
            try:
                generations.endpoint = self._node_pool.regroup(self._run.name, generations.number)
                break
            except NodeLost as lost:
                if not self.losses.bear(lost):
                    raise
                self.record.warn(f"{lost}; starting again without it")
        generations.settle()
        checkpoint = self._run.saving.open()
        try:
            return generations.lay_out(Origin(checkpoint, checkpoint.progress, apart=self._apart))
        except DoesNotFit:  # without the one that was revoked: pauses until another comes
            return self._revive(progress)[0]
