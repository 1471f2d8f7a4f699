"""A generation: who holds what, under whose lead. Lays the run's strategy out over the nodes that are there."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec
import torch

from ringtmp import __version__
from ringtmp.config import RunConfig
from ringtmp.data.batches import TrainingBatches
from ringtmp.errors import UsageError
from ringtmp.launch.node_pool import NodePool
from ringtmp.metrics import events
from ringtmp.model.frozen_parameters import frozen_names, without_frozen
from ringtmp.model.portable_layer import Layer
from ringtmp.plan.node_groups import parse_sums
from ringtmp.run.choose_strategy import STRATEGY_CHOSEN, best_way
from ringtmp.run.interruption import Interruption
from ringtmp.run.rebalancing import Rebalancing
from ringtmp.run.record_events import Record, unlike
from ringtmp.run.save_checkpoints import Saving
from ringtmp.run.what_to_train import Job
from ringtmp.runtime import compute_device
from ringtmp.runtime.base_leader import BaseLeader, Start
from ringtmp.runtime.checkpoint import Checkpoint, Progress
from ringtmp.runtime.mailbox import Endpoint
from ringtmp.runtime.run_directory import LayerIndex, SavedConfig
from ringtmp.runtime.snapshot_schedule import Protection, Snapshot
from ringtmp.strategies import registry
from ringtmp.strategies.base import Leader, Plan, PlanRequest, Strategy, drifts, keeps_bits
from ringtmp.system.resources import fingerprint, set_threads
from ringtmp.wire.formats import wire_format
from ringtmp.wire.messages import Hello, Recipe


@dataclass(kw_only=True)
class Run:
    """What lasts as long as the run, whatever its generation. A strategy that stands for others makes place for the one it
    chooses with the first layout."""

    job: Job
    pool: NodePool
    record: Record
    interrupted: Interruption
    name: str  # of the ring, on its links
    index: LayerIndex
    layers: list[Layer]
    batches: TrainingBatches
    batch_size: int
    targets: torch.Tensor  # of a few samples
    total_steps: int | None  # None: until the data ends
    lr_schedule: dict[str, Any]
    saving: Saving
    protection: Protection
    rebalancing: Rebalancing
    strategy: Strategy
    leave_behind: Callable[[Snapshot], None] | None = (
        None  # told of each whole snapshot, for a master that is started again
    )

    def go_by(self, config: RunConfig) -> None:
        """The strategy of the run is chosen."""
        self.strategy, self.protection = registry.get(config.ring.strategy), protection_of(config, self.leave_behind)

    @property
    def kept_in_snapshots(self) -> list[int]:
        """Layers of which something changes."""
        aside = self.index.aside
        return [at for at, each in enumerate(self.layers) if without_frozen(each, frozen_names(each, aside))]


@dataclass(frozen=True)
class Origin:
    """What a generation is laid out from: a checkpoint, or after a loss the layers of a snapshot."""

    checkpoint: Checkpoint
    progress: Progress
    hellos: Mapping[int, Hello] = field(default_factory=dict)  # of those who have said it already
    snapshot: Snapshot | None = None
    apart: frozenset[frozenset[int]] = frozenset()  # nodes that cannot reach each other

    @property
    def step(self) -> int:
        return self.progress.step if self.snapshot is None else self.snapshot.step


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One membership and plan. `step` is the nodes' first one, which may lie beyond what `progress` has counted."""

    number: int
    members: tuple[int, ...]
    endpoint: Endpoint
    plan: Plan
    leader: Leader
    microbatches: int
    progress: Progress
    step: int


def settled(config: RunConfig, pool: NodePool) -> RunConfig:
    """With what only the pool knows: how many came, and the thread count they have in common."""
    ring, threads = config.ring, config.training.threads or pool.threads
    if ring.nodes != pool.nodes:  # cuts and window were meant for another ring
        ring = msgspec.structs.replace(ring, nodes=pool.nodes, cuts=None, window=None)
    set_threads(threads)
    training = msgspec.structs.replace(config.training, threads=threads)
    return msgspec.structs.replace(config, training=training, ring=ring)


def protection_of(config: RunConfig, leave: Callable[[Snapshot], None] | None) -> Protection:
    by_snapshot = registry.get(config.ring.strategy).state_from == "snapshot"
    return Protection(config.keep.protect if by_snapshot else "checkpoint", config.training.staleness, leave)


class Generations:
    """Makes one generation after another. `newest` is there from the moment somebody leads it, laid out or not."""

    def __init__(self, run: Run, config: RunConfig, microbatches: int, endpoint: Endpoint) -> None:
        """`config` is settled with the pool; `microbatches` with "auto" until the plan has chosen."""
        self._run = run
        self.config = config
        self._microbatches = microbatches
        self.endpoint = endpoint
        self.number = 1
        self.newest: Generation | None = None
        self.begun = False  # the run's first line is written
        self._chosen: dict[str, Any] = {}  # facts of the choice of a strategy
        self._left = 0  # the number of the last generation that was left
        self._told: Mapping[int, float] = {}
        self._named: set[str] = set()  # nodes unlike the master that were told of
        self._known: PlanRequest | None = None  # of the last layout, if its devices need not be tried again

    def leave(self) -> Mapping[int, float]:
        """The newest generation ends. Losses of steps that are done and not counted yet."""
        if self.newest is not None and self.newest.number > self._left:
            self._left, self._told = self.newest.number, self.newest.leader.leave()
        return self._told

    def settle(self) -> None:
        """Others are there than were."""
        self.config = settled(self.config, self._run.pool)

    def lay_out(self, origin: Origin) -> Generation:
        run, pool, log, phase = self._run, self._run.pool, self._run.record.log, self._run.record.watcher.phase
        request, hellos = self._measured(self._request(origin), origin.hellos)
        if self.config.training.microbatches == "auto":
            request = self._choose_microbatches(request)
        if run.strategy.chooses:
            request = self._choose_strategy(origin, request)
        plan = run.strategy.plan(request)
        # One that was left out may have been busy with something else: it has another chance with the next layout.
        again = pool.same_machine or plan.left_out
        self._known = None if again else request
        run.record.watcher.expect((*filter(None, [self._chosen.get(STRATEGY_CHOSEN)]), *plan.lines))
        for warning in plan.warnings:
            run.record.warn(warning)
        self._write_settings()
        if not self.begun:
            self._begin(plan, request.chosen, origin.progress)
        phase("waiting for the nodes")
        gathering = BaseLeader(Start(self.endpoint, pool, log, hellos))
        members = tuple(share.node for share in plan.shares)
        gathering.gather(members)
        for node, hello in sorted(gathering.hellos.items()):
            compute_device.refuse_slow_bfloat16(self.config.training.compute, hello.bfloat16, f"node {node}")
        run.protection.renew(origin.progress.step, pool.nodes)
        leader = plan.lead(
            Start(
                self.endpoint,
                pool,
                log,
                gathering.hellos,
                snapshot=origin.snapshot,
                protection=run.protection,
                survived=run.record.survived,
            )
        )
        self.newest = generation = Generation(
            number=self.number, members=members, endpoint=self.endpoint, plan=plan, leader=leader,
            microbatches=self._microbatches, progress=origin.progress, step=origin.step,
        )  # fmt: skip
        phase("placing the layers")
        leader.lay_out(origin.checkpoint)
        self._write_nodes(generation, request, self._tell_of_unlike(gathering.hellos))
        run.rebalancing.watch(plan, log, self.endpoint.clock, pool.same_machine)
        return generation

    def _request(self, origin: Origin) -> PlanRequest:
        run, pool, job, training = self._run, self._run.pool, self._run.job, self.config.training
        recipe = Recipe(
            training.seed, training.threads or pool.threads, training.optimizer, training.optimizer_settings, run.lr_schedule,
            clip_norm=training.clip_norm, staleness=training.staleness, randomness=run.index.randomness,
            sum_tree=training.sum_tree, compute=training.compute, compiled=training.compile,
            deterministic=training.deterministic,
        )  # fmt: skip
        return PlanRequest(
            self.config, run.index, run.layers, job.loss, loss_name=job.loss_name, recipe=recipe, step=origin.step,
            microbatches=self._microbatches, batch_size=run.batch_size, addresses=pool.addresses(), devices=pool.devices(),
            keep_all=pool.same_machine or self.config.ring.all_devices, targets=run.targets, apart=origin.apart,
            before=None if self.newest is None else getattr(self.newest.plan, "route", None),
        )  # fmt: skip

    def _measured(self, request: PlanRequest, hellos: Mapping[int, Hello]) -> tuple[PlanRequest, Mapping[int, Hello]]:
        """With devices as the run knows them, or as they are found to be now: trying them takes longer than healing."""
        if (moved := self._run.rebalancing.devices_for(request)) is not None:
            return moved, hellos
        if (last := self._known) is not None:
            known = {(each.name, each.identity): each for each in last.devices}
            same = all((each.name, each.identity) in known for each in request.devices)
            if same and self._run.strategy.tried_alike(request, last):
                devices = tuple(known[each.name, each.identity] for each in request.devices)
                return dataclasses.replace(request, devices=devices, paths=last.paths), hellos
        record = self._run.record
        return self._run.strategy.tried(
            request, self.endpoint, self._run.pool, record.log, phase=record.watcher.phase, hellos=hellos
        )

    def _choose_microbatches(self, request: PlanRequest) -> PlanRequest:
        """From here on it is a number, in the settings that are kept too: a resumed run has the same bits."""
        self._run.record.watcher.phase("choosing the number of microbatches")
        request = self._run.strategy.with_best_microbatches(request, self._run.batches.sizes())
        self.config, self._microbatches = request.config, request.microbatches
        self._run.batches.slice_into(self._microbatches)
        return request

    def _choose_strategy(self, origin: Origin, request: PlanRequest) -> PlanRequest:
        """From here on it is this one, in the settings that are kept too."""
        run = self._run
        run.record.watcher.phase("choosing a strategy")
        best, self._chosen = best_way(request, run.pool)
        self.config = best.config
        run.go_by(best.config)
        if best.alone:
            for node in range(1, run.pool.nodes):
                self.endpoint.forget(node)
            run.pool.send_home()
        devices = run.pool.devices() if best.alone else request.devices
        return dataclasses.replace(
            self._request(origin), devices=devices, paths=request.paths, chosen=request.chosen
        )  # fmt: skip

    def _write_settings(self) -> None:
        job = self._run.job
        training = msgspec.structs.replace(self.config.training, lr_schedule=self._run.lr_schedule)
        ring, asked = self.config.ring, job.config.ring
        if self._run.pool.same_machine and ring.groups is not None and ring.groups == asked.groups:
            # Without one for a moment: whoever resumes it meanwhile has places for all, for which the groups were given.
            ring = msgspec.structs.replace(ring, nodes=asked.nodes, cuts=asked.cuts, window=asked.window)
        kept = msgspec.structs.replace(self.config, training=training, ring=ring)
        try:
            job.run.write_config(SavedConfig(__version__, kept, job.loss_name))
        except OSError as error:
            if not self.begun:
                raise UsageError(f"the run directory {job.run.path} cannot be written: {error.strerror}") from error
            self._run.record.warn(f"cannot rewrite the run's settings: {error.strerror}; keeping the old ones")

    def _begin(self, plan: Plan, chosen: bool, progress: Progress) -> None:
        """The run's first line."""
        run, job = self._run, self._run.job
        self.begun = True
        run.record.began(
            job.run.path,
            events.RunStarted(
                time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds"), events.SCHEMA, run.index.run,
                version=__version__, config=msgspec.to_builtins(self.config),
                facts={**fingerprint(run.pool.threads), **plan.facts, **self._chosen, "microbatches": self._microbatches,
                 "microbatches_chosen": chosen, "checked": run.index.checked, "total_steps": run.total_steps,
                 "device": compute_device.name(),
                 "batch_size": run.batch_size, "data": job.train.name, "loss": job.loss_name,
                 "skipped_samples": progress.stream.skipped, "exactness": self._exactness(progress),
                 "drifts": self._drifts() or plan.facts.get("drifts", False),
                 "numeric_mode": self.config.training.numeric_mode},
                generation=self.number, first_step=progress.step,
            ),
        )  # fmt: skip

    def _drifts(self) -> bool:
        ring = self.config.ring
        strategy, settings = registry.of(ring)
        return ring.local_steps is not None or parse_sums(ring.group_sums) > 0 or drifts(strategy, settings, ring.nodes)

    def _exactness(self, progress: Progress) -> str:
        if self._run.batches.not_ours is not None or progress.stream.strayed:
            return "stream"
        if not wire_format(self.config.training.wire).exact or not self.config.training.deterministic:
            return "steps"
        strategy, settings = registry.of(self.config.ring)
        if self.config.ring.local_steps is not None:
            return "replay"
        if parse_sums(self.config.ring.group_sums):
            return "steps"
        if compute_device.here().type != "cpu":
            return "replay"
        bits = keeps_bits(strategy, settings, self.config.training.sum_tree)
        return "bits" if bits else strategy.exactness(settings)

    def _tell_of_unlike(self, hellos: Mapping[int, Hello]) -> Collection[int]:
        found = unlike(hellos, fingerprint(self._run.pool.threads), compute_device.name())
        for text in found.values():
            if text not in self._named:
                self._named.add(text)
                self._run.record.warn(text)
        return found

    def _write_nodes(self, generation: Generation, request: PlanRequest, unlike: Collection[int]) -> None:
        log, pool = self._run.record.log, self._run.pool
        names = {} if pool.same_machine else dict(zip(sorted(request.addresses), request.devices, strict=True))
        for share in generation.plan.shares:
            log.write(
                events.NodeStarted(
                    time.monotonic(), share.node, share.role, pool.pids().get(share.node, 0),
                    generation=generation.number, segments=share.segments, parameters=share.parameters,
                    device=names[share.node].name if names else "", unlike=share.node in unlike,
                )
            )  # fmt: skip
        log.servers = frozenset(share.node for share in generation.plan.shares if share.role == "server")
        log.flush()
