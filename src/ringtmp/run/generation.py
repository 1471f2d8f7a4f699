"""What a run stands on: settings, pool, log and checkpoints, and a strategy laid out over the nodes that are there."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

import msgspec

from ringtmp import __version__
from ringtmp.config import usual_microbatches
from ringtmp.data.batches import Batch, TrainingBatches
from ringtmp.data.sources import Stream
from ringtmp.data.stream_store import LEAST_LIMIT_BYTES, MEMORY_LIMIT_BYTES
from ringtmp.errors import UsageError
from ringtmp.launch.node_pool import NodePool
from ringtmp.metrics import events
from ringtmp.metrics.events import EventLog
from ringtmp.model.export import EXAMPLE_BATCH
from ringtmp.model.portable_layer import Layer
from ringtmp.run.checkpoints import Saving
from ringtmp.run.job import Interruption, Job, Watcher
from ringtmp.run.losses_of_nodes import Losses, lost_text, unlike
from ringtmp.run.rebalancing import Rebalancing
from ringtmp.runtime.checkpoint import Checkpoint, Progress, latest
from ringtmp.runtime.endpoint import Endpoint
from ringtmp.runtime.learning_rates import checked_schedule
from ringtmp.runtime.run_directory import LayerIndex, SavedConfig
from ringtmp.runtime.snapshot_schedule import Protection, Snapshot
from ringtmp.strategies import registry
from ringtmp.strategies.base import Brief, Leader
from ringtmp.strategies.ring import plan as ring_plan
from ringtmp.system.resources import fingerprint, free_memory_bytes, set_threads
from ringtmp.wire.messages import Hello, Recipe

FAILED_STOP_LIMIT_S = 0.5


class Laying:
    """The part of a run that is the same in every generation."""

    def __init__(self, job: Job, pool: NodePool, watcher: Watcher, interrupted: Interruption) -> None:
        self._job = job
        self._node_pool = pool
        self._watcher = watcher
        self._interrupted = interrupted
        training = job.config.training
        assert training.microbatches is not None, "the settings are not resolved"
        self._microbatches = usual_microbatches(training)  # with "auto" until the plan has chosen
        size = job.train.batch_size if isinstance(job.train, Stream) else training.batch_size
        self._batch_size = size
        self._batches = self._training_batches()
        self._targets = job.train.example(EXAMPLE_BATCH)[1]
        self._saving = Saving(job.run.checkpoints)
        self._log: EventLog | None = None
        self.unwritten: list[events.Event] = []  # what the record on the disk lacks when the run has ended
        self._master: Leader | None = None
        self._endpoint: Endpoint | None = None
        self._begun = False  # the run's first line is written
        self._named: set[str] = set()  # nodes unlike the master that were told of
        self._progress = Progress(0)
        self._ring = secrets.token_hex(8)
        self._generation = 1
        self._least = 1
        self._index = LayerIndex("", (), ())
        self._lr_schedule: dict[str, Any] = {}
        self._losses = Losses()
        self._apart: frozenset[frozenset[int]] = frozenset()  # nodes that cannot reach each other
        ring, keep = job.config.ring, job.config.keep
        protect = keep.protect if ring.strategy == "ring" else "checkpoint"
        self._protection = Protection(protect, training.staleness)
        self._rebalancing = Rebalancing(ring.rebalance)
        self._known: Brief | None = None  # of the last layout, if its devices need not be tried again
        self._not_before = 0.0  # when a change of the pool is taken up again that found the disk full

    def _close(self, outcome: str, error: str | None, digest: str | None) -> None:
        self._interrupted.deaf = True  # every wait from here has a limit
        log = self._log
        try:
            if self._master is not None and log is not None:
                try:
                    if outcome == "failed":  # somebody may be dead and never answer
                        self._master.stop(outcome, FAILED_STOP_LIMIT_S)
                    else:
                        self._dismiss(self._master, outcome)
                except Exception as problem:  # a broken link must not hide why the run ended
                    log.write(events.Warned(time.monotonic(), f"while stopping: {problem}"))
                log.write(self._master.farewell())
        finally:
            self._node_pool.stop()
            if outcome in ("done", "stopped early") or self._saving.step == self._progress.step:
                self._batches.close()
            if log is not None:
                self._tell_of_removed()
                ended = events.RunEnded(time.monotonic(), self._progress.step, outcome, digest, error, self._begun)
                log.write(ended)
                log.close()
                self._tell_of_unwritten(log)
            self._job.run.discard()
            self._job.run.unlock()

    def _check(self, batch: Batch, table: str, stream: str) -> Batch:
        """The batch, if its shapes and labels are what the model takes."""
        for inputs in batch.inputs:
            self._index.check_inputs(inputs, stream)
        self._index.label_range(self._job.loss_name).check_batch(batch, table, stream)
        return batch

    def _tell_of_removed(self) -> None:
        """Somebody may have removed what the run itself never reads again."""
        if self._begun and (missing := self._job.run.missing()):
            self._warn(
                f"{self._job.run.path} lacks {' and '.join(missing)}, removed while the run lasted: it cannot be resumed; "
                "checkpoints written since then load in plain PyTorch"
            )

    def _tell_of_unwritten(self, log: EventLog) -> None:
        self.unwritten = log.unwritten
        if not self.unwritten and (news := log.news()) is not None:
            self._watcher.warn(news)
        if count := len(self.unwritten):
            text = f"{self._job.run.events} lacks the last {count} events, for which there was no room"
            if log.gone:
                text = f"{self._job.run.events} was removed and cannot be written again: its {count} events are in memory alone"
            self.unwritten.append(events.Warned(time.monotonic(), text))
            self._watcher.warn(text)

    def _dismiss(self, master: Leader, reason: str) -> None:
        """Stop everyone. Somebody who died when all was saved was needed by nobody any more: a loss that costs nothing."""
        assert self._log is not None
        for lost in master.stop(reason):
            assert lost.node is not None
            self._warn(f"{lost}; the checkpoint of step {self._saving.step} was there by then")
            self._log.write(
                events.Regrouped(
                    time.monotonic(), self._progress.step, self._generation, str(lost), self._node_pool.nodes, 0.0,
                    (lost.node,), lost.notice_s, source="checkpoint",
                )
            )  # fmt: skip

    def _settle(self) -> None:
        """What only the pool knows: how many came, and the thread count they have in common."""
        config, ring = self._job.config, self._job.config.ring
        threads = config.training.threads or self._node_pool.threads
        if ring.nodes != self._node_pool.nodes:  # cuts and window were meant for another ring
            ring = msgspec.structs.replace(ring, nodes=self._node_pool.nodes, cuts=None, window=None)
        training = msgspec.structs.replace(config.training, threads=threads)
        config = msgspec.structs.replace(config, training=training, ring=ring)
        self._job = dataclasses.replace(self._job, config=config)
        set_threads(threads)

    def _open(self) -> tuple[LayerIndex, list[Layer], Checkpoint]:
        index, layers = self._job.run.read_layers()
        checkpoint, problems = latest(self._job.run.checkpoints, index.run)
        for problem in problems:
            self._warn(f"checkpoint {problem}; going back to step {checkpoint.progress.step}")
        self._least = index.least_microbatch
        self._index = index
        self._progress = checkpoint.progress
        self._saving.opened(checkpoint)
        return index, layers, checkpoint

    def _lay_out(
        self, endpoint: Endpoint, index: LayerIndex, layers: list[Layer], checkpoint: Checkpoint,
        hellos: Mapping[int, Hello] = MappingProxyType({}), snapshot: Snapshot | None = None,
    ) -> None:  # fmt: skip
        job, config = self._job, self._job.config
        assert self._log is not None
        self._endpoint = endpoint
        training = config.training
        schedule = self._lr_schedule = checked_schedule(training.lr_schedule, self._total_steps())
        recipe = self._recipe()
        brief = Brief(
            config, index, layers, job.loss, job.loss_name, recipe,
            snapshot.step if snapshot else self._progress.step, self._microbatches, self._batch_size,
            self._node_pool.addresses(), self._node_pool.devices(), self._node_pool.same_machine or config.ring.all_devices,
            self._targets, self._apart,
        )  # fmt: skip
        brief, found = self._measured(brief, endpoint, hellos)
        if training.microbatches == "auto":
            brief = self._choose_microbatches(brief)
            config, training = brief.config, brief.config.training
        plan = registry.plan(brief)
        # One that was left out may have been busy with something else: it has another chance with the next layout.
        again = self._node_pool.same_machine or (isinstance(plan, ring_plan.RingPlan) and plan.left_out)
        self._known = None if again else brief
        self._watcher.expect(plan.lines)
        for warning in plan.warnings:
            self._warn(warning)
        kept = msgspec.structs.replace(config, training=msgspec.structs.replace(training, lr_schedule=schedule))
        try:
            job.run.write_config(SavedConfig(__version__, kept, job.loss_name))
        except OSError as error:
            if not self._begun:
                raise UsageError(f"the run directory {job.run.path} cannot be written: {error.strerror}") from error
            self._warn(f"the run's settings cannot be written anew: {error.strerror}; those of before are kept")
        if not self._begun:
            self._begun = True
            self._log.write(
                events.RunStarted(
                    time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds"), events.SCHEMA, index.run, __version__,
                    msgspec.to_builtins(config),
                    {**fingerprint(self._node_pool.threads), **plan.facts, "microbatches": self._microbatches,
                     "microbatches_chosen": brief.chosen, "checked": index.checked,
                     "batch_size": self._batch_size, "data": job.train.name, "loss": job.loss_name,
                     "skipped_samples": self._progress.stream.skipped, "exactness": self._exactness()},
                    self._generation, self._progress.step,
                )
            )  # fmt: skip
        self._master = master = plan.lead(endpoint, self._node_pool, self._log)
        master.hellos.update(found)
        master.snapshot, master.protection = snapshot, self._protection
        master.survived = self._survived
        self._protection.renew(self._progress.step, self._node_pool.nodes)
        plan.start(master, checkpoint, self._watcher.phase)
        for text in unlike(master.hellos, fingerprint(self._node_pool.threads)):
            if text not in self._named:
                self._named.add(text)
                self._warn(text)
        names = (
            {}
            if self._node_pool.same_machine
            else dict(zip(sorted(brief.addresses), (each.name for each in brief.devices), strict=True))
        )
        for share in plan.shares:
            self._log.write(
                events.NodeStarted(
                    time.monotonic(), share.node, share.role, self._node_pool.pids().get(share.node, 0), self._generation,
                    share.segments, share.parameters, names.get(share.node, ""),
                )
            )  # fmt: skip
        self._log.servers = frozenset(share.node for share in plan.shares if share.role == "server")
        self._log.flush()
        self._rebalancing.watch(plan, self._log, endpoint.clock, self._node_pool.same_machine)

    def _measured(
        self, brief: Brief, endpoint: Endpoint, hellos: Mapping[int, Hello]
    ) -> tuple[Brief, dict[int, Hello]]:  # fmt: skip
        """With devices as the run knows them, or as they are found to be now: trying them takes longer than healing."""
        if (moved := self._rebalancing.devices_for(brief)) is not None:
            return moved, dict(hellos)
        known = {} if self._known is None else {(each.name, each.identity): each for each in self._known.devices}
        same = all((each.name, each.identity) in known for each in brief.devices)
        if (
            self._known is not None
            and same
            and ring_plan.order_is_given(brief) == ring_plan.order_is_given(self._known)
        ):
            devices = tuple(known[each.name, each.identity] for each in brief.devices)
            return dataclasses.replace(brief, devices=devices, paths=self._known.paths), dict(hellos)
        assert self._log is not None
        return ring_plan.tried(brief, endpoint, self._node_pool, self._log, self._watcher.phase, hellos)

    def _choose_microbatches(self, brief: Brief) -> Brief:
        """From here on it is a number, in the settings that are kept too: a resumed run has the same bits."""
        self._watcher.phase("choosing the number of microbatches")
        brief = ring_plan.with_best_microbatches(brief, self._batches.sizes())
        self._microbatches = brief.microbatches
        self._job = dataclasses.replace(self._job, config=brief.config)
        self._batches = self._training_batches()
        return brief

    def _training_batches(self) -> TrainingBatches:
        return TrainingBatches(
            self._job.train, self._batch_size, self._microbatches, self._job.config.training.seed,
            keep=self._job.config.keep.stream_keep, folder=self._job.run.stream,
            memory_bytes=min(MEMORY_LIMIT_BYTES, max(LEAST_LIMIT_BYTES, free_memory_bytes() // 4)),
        )  # fmt: skip

    def _exactness(self) -> str:
        if self._batches.not_ours is not None or self._progress.stream.strayed:
            return "stream"
        ring, training = self._job.config.ring, self._job.config.training
        return registry.exactness(ring.strategy, ring.strategy_settings, training.wire)

    def _recipe(self) -> Recipe:
        training = self._job.config.training
        assert training.threads is not None, "settled with the crew"
        return Recipe(
            training.seed, training.threads, training.optimizer, training.optimizer_settings, self._lr_schedule,
            training.clip_norm, training.staleness,
        )  # fmt: skip

    def _total_steps(self) -> int | None:
        training = self._job.config.training
        if training.steps is not None:
            return training.steps
        per_epoch = self._batches.steps_per_epoch
        return per_epoch * training.epochs if per_epoch is not None and training.epochs is not None else None

    def _survived(self, event: events.Regrouped) -> None:
        assert self._log is not None
        self._log.write(event)
        self._watcher.tell(lost_text(event))

    def _saved(self, master: Leader) -> bool:
        """Whether there is a checkpoint of this very step; a full disk is no reason to end the run."""
        self._save(master)
        return self._saving.step == self._progress.step

    def _save(self, master: Leader, needed: bool = False) -> None:
        assert self._log is not None
        progress = msgspec.structs.replace(self._progress, stream=self._batches.place(self._progress.step))
        saved = self._saving.save(master, progress, needed, self._warn)
        if saved is not None:
            self._batches.forget(saved.step)
            self._log.write(saved)

    def _warn(self, text: str) -> None:
        self._watcher.warn(text)
        if self._log is not None:
            self._log.write(events.Warned(time.monotonic(), text))
