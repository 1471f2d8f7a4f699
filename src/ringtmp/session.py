"""One training run, from settings to result: build or resume, plan, lay out, train, keep.

Everything that can be refused is refused before a node starts; everything that was started is stopped on every way out.
"""

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
from ringtmp.data.batches import Batch, TrainingBatches, evaluation_batches
from ringtmp.data.sources import Stream
from ringtmp.errors import DoesNotFit, Interrupted, LinkLost, NodeLost, RingError, SnapshotUnusable, UsageError
from ringtmp.job import Interruption, Job, Watcher
from ringtmp.launch.crew import Crew
from ringtmp.metrics import events
from ringtmp.metrics.events import EventLog
from ringtmp.model.export import EXAMPLE_BATCH
from ringtmp.model.portable import Layer
from ringtmp.plan.microbatches import to_build
from ringtmp.plan.route import MASTER
from ringtmp.prepare import refuse_too_small, write_model
from ringtmp.rebalancing import Rebalancing
from ringtmp.recovery import Losses, lost_text, memory_need, unlike
from ringtmp.resources import fingerprint, set_threads
from ringtmp.ring.checkpoint import Checkpoint, Progress, latest, weights_sha256
from ringtmp.ring.endpoint import Endpoint
from ringtmp.ring.lead import STOP_LIMIT_S, Lead
from ringtmp.ring.protect import Protection, Snapshot, in_hand
from ringtmp.ring.recipe import checked_schedule, learning_rate
from ringtmp.ring.rundir import LayerIndex, SavedConfig
from ringtmp.saving import Saving
from ringtmp.strategies import catalog, ring
from ringtmp.strategies.brief import Brief, Leader
from ringtmp.wire.message import Hello, Recipe, Renew

#: Without --checkpoint-every a checkpoint is taken at the end of an epoch, but not more often than this.
CHECKPOINT_PAUSE_S = 30.0
FAILED_STOP_LIMIT_S = 0.5
RETRY_S = 30.0
#: A stream's batches since the last whole state are kept; when they are more than this, a checkpoint lets them go.
SPOOL_LIMIT_BYTES = 256 * 2**20
#: An evaluation pass holds this many training batches' worth of microbatches, to keep the ring full.
EVALUATION_FACTOR = 4


class Session:
    def __init__(self, job: Job, crew: Crew, watcher: Watcher, interrupted: Interruption) -> None:
        self._job = job
        self._crew = crew
        self._watcher = watcher
        self._interrupted = interrupted
        training = job.config.training
        assert training.microbatches is not None, "the settings are not resolved"
        self._microbatches = usual_microbatches(training)  # with "auto" until the plan has chosen
        size = job.train.batch_size if isinstance(job.train, Stream) else training.batch_size
        self._batch_size = size
        self._batches = TrainingBatches(job.train, size, self._microbatches, training.seed)
        self._targets = job.train.example(EXAMPLE_BATCH)[1]
        self._saving = Saving(job.run.checkpoints)
        self._log: EventLog | None = None
        self._master: Leader | None = None
        self._endpoint: Endpoint | None = None
        self._begun = False  # the run's first line is written
        self._progress = Progress(0)
        self._ring = secrets.token_hex(8)
        self._generation = 1
        self._least = 1
        self._told_of_log = False
        self._lr_schedule: dict[str, Any] = {}
        self._losses = Losses()
        self._apart: frozenset[frozenset[int]] = frozenset()  # nodes that cannot reach each other
        ring, keep = job.config.ring, job.config.keep
        protect = keep.protect if ring.strategy == "ring" else "checkpoint"
        self._protection = Protection(protect, training.staleness)
        self._rebalancing = Rebalancing(ring.rebalance)
        self._kept = -1  # the step of the last snapshot that was recorded
        self._not_before = 0.0  # when a change of the crew is taken up again that found the disk full

    # -- the whole run ------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Run to the end. Raises; whatever it raises, the checkpoints and events so far are kept."""
        run, resuming = self._job.run, self._job.model is None
        if resuming:
            run.open()
        else:
            run.create()
        run.lock()
        outcome, error, digest = "failed", None, None
        try:
            self._log = EventLog(run.events)
            endpoint = self._crew.start(self._ring, self._generation)
            self._settle()
            if self._job.model is not None:
                auto = self._job.config.training.microbatches == "auto"
                sizes = to_build(self._batches.sizes(), self._batch_size, self._microbatches, auto)
                loss = self._job.loss, self._job.loss_name
                write_model(run, self._job.model, self._job.train, loss, self._recipe(), *sizes, self._watcher.phase)
            index, layers, checkpoint = self._open()
            try:
                self._lay_out(endpoint, index, layers, checkpoint)
            except NodeLost as lost:
                self._heal(lost)
            self._interrupted.armed = True
            outcome = self._to_the_end()
            checkpoint, _ = latest(run.checkpoints)
            digest = weights_sha256(checkpoint, layers)
        except Interrupted as interruption:
            outcome, error = "interrupted", str(interruption)
            raise
        except RingError as problem:
            error = str(problem)
            raise
        except BaseException as problem:
            error = f"{type(problem).__name__}: {problem}"
            raise
        finally:
            self._close(outcome, error, digest)

    def _close(self, outcome: str, error: str | None, digest: str | None) -> None:
        log = self._log
        try:
            if self._master is not None and log is not None:
                try:
                    # After a failure somebody may be dead and never answer.
                    self._master.stop(outcome, FAILED_STOP_LIMIT_S if outcome == "failed" else STOP_LIMIT_S)
                except Exception as problem:  # a broken link must not hide why the run ended
                    log.write(events.Warned(time.monotonic(), f"while stopping: {problem}"))
                log.write(self._master.farewell())
        finally:
            self._crew.stop()
            if log is not None:
                log.write(events.RunEnded(time.monotonic(), self._progress.step, outcome, digest, error))
                log.close()
            self._job.run.discard()
            self._job.run.unlock()

    def _settle(self) -> None:
        """What only the crew knows: how many came, and the thread count they have in common."""
        config, ring = self._job.config, self._job.config.ring
        threads = config.training.threads or self._crew.threads
        if ring.nodes != self._crew.nodes:  # cuts and window were meant for another ring
            ring = msgspec.structs.replace(ring, nodes=self._crew.nodes, cuts=None, window=None)
        training = msgspec.structs.replace(config.training, threads=threads)
        config = msgspec.structs.replace(config, training=training, ring=ring)
        self._job = dataclasses.replace(self._job, config=config)
        set_threads(threads)

    # -- before the first step ----------------------------------------------------------------------------------------

    def _open(self) -> tuple[LayerIndex, list[Layer], Checkpoint]:
        index, layers = self._job.run.read_layers()
        checkpoint, problems = latest(self._job.run.checkpoints)
        for problem in problems:
            self._warn(f"checkpoint {problem}; going back to step {checkpoint.progress.step}")
        if checkpoint.manifest.run != index.run:
            raise UsageError(f"the checkpoints in {self._job.run.path} belong to another run")
        self._least = index.least_microbatch
        self._progress = checkpoint.progress
        self._saving.opened(index.run, checkpoint.progress.step)
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
            self._crew.addresses(), self._crew.devices(), self._crew.alike or config.ring.all_devices,
            self._targets, self._apart,
        )  # fmt: skip
        if (measured := self._rebalancing.devices_for(brief)) is not None:
            brief, found = measured, dict(hellos)
        else:
            brief, found = ring.tried(brief, endpoint, self._crew, self._log, self._watcher.phase, hellos)
        if training.microbatches == "auto":
            brief = self._choose_microbatches(brief)
            config, training = brief.config, brief.config.training
        plan = catalog.plan(brief)
        self._watcher.expect(plan.lines)
        for warning in plan.warnings:
            self._warn(warning)
        job.run.write_config(
            SavedConfig(
                __version__,
                msgspec.structs.replace(config, training=msgspec.structs.replace(training, lr_schedule=schedule)),
                job.loss_name,
            )
        )
        if not self._begun:
            self._begun = True
            self._log.write(
                events.RunStarted(
                    time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds"), events.SCHEMA, index.run, __version__,
                    msgspec.to_builtins(config),
                    {**fingerprint(self._crew.threads), **plan.facts, "microbatches": self._microbatches,
                     "microbatches_chosen": brief.chosen,
                     "batch_size": self._batch_size, "data": job.train.name, "loss": job.loss_name,
                     "exactness": catalog.exactness(
                         config.ring.strategy, config.ring.strategy_settings, training.wire)},
                    1, self._progress.step,
                )
            )  # fmt: skip
        for text in unlike(found, fingerprint(self._crew.threads)):
            self._warn(text)
        self._master = master = plan.lead(endpoint, self._crew, self._log)
        master.hellos.update(found)
        master.snapshot, master.protection = snapshot, self._protection
        master.survived = self._survived
        self._protection.renew(self._progress.step, self._crew.nodes)
        plan.start(master, checkpoint, self._watcher.phase)
        for share in plan.shares:
            self._log.write(
                events.NodeStarted(
                    time.monotonic(), share.node, share.role, self._crew.pids().get(share.node, 0), self._generation,
                    share.segments, share.parameters,
                )
            )  # fmt: skip
        self._log.servers = frozenset(share.node for share in plan.shares if share.role == "server")
        self._log.flush()
        self._rebalancing.watch(plan, self._log, endpoint.clock, self._crew.alike)

    def _choose_microbatches(self, brief: Brief) -> Brief:
        """From here on it is a number, in the settings that are kept too: a resumed run has the same bits."""
        self._watcher.phase("choosing the number of microbatches")
        brief = ring.with_best_microbatches(brief, self._batches.sizes())
        self._microbatches = brief.microbatches
        self._job = dataclasses.replace(self._job, config=brief.config)
        self._batches = TrainingBatches(
            self._job.train, self._batch_size, self._microbatches, brief.config.training.seed
        )  # fmt: skip
        return brief

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

    # -- step after step ----------------------------------------------------------------------------------------------

    def _to_the_end(self) -> str:
        """All steps and what is kept of them; again from the last whole state whenever a node is lost."""
        while True:
            assert self._master is not None
            try:
                outcome = self._steps(self._master)
                self._watcher.phase("saving")
                assert self._master is not None
                self._save(self._master, needed=True)  # a new generation has a master of its own
                return outcome
            except NodeLost as lost:
                self._heal(lost)

    def _heal(self, lost: NodeLost) -> None:
        """A new generation from the last whole state: those who live stay as they are, somebody takes the lost one's
        place, the steps since are done again. A loss meanwhile begins it anew."""
        assert self._log is not None
        noticed, reached = time.monotonic(), self._progress
        self._losses.begin()
        while True:
            if self._job.config.keep.protect == "off" or not self._losses.bear(lost):
                raise lost
            if isinstance(lost, LinkLost):
                self._apart |= {lost.pair}
            else:  # whoever takes its place may have other links
                self._apart = frozenset(pair for pair in self._apart if lost.node not in pair)
            self._warn(f"{lost}; healing")
            try:
                source, step = self._revive(reached)
                break
            except NodeLost as another:
                lost = another
        losses, now = self._losses, time.monotonic()
        event = events.Regrouped(
            now, step, self._generation, losses.reason, self._crew.nodes, now - noticed,
            losses.nodes, losses.notice_s, reached.step - self._progress.step, source,
        )  # fmt: skip
        self._survived(event)

    def _survived(self, event: events.Regrouped) -> None:
        assert self._log is not None
        self._log.write(event)
        self._watcher.tell(lost_text(event))

    def _revive(self, reached: Progress) -> tuple[str, int]:
        """The next generation, from the newest state that is whole; returns what that was, and of which step. Those who are
        left may not hold the model: then the run pauses until another comes."""
        while True:
            try:
                return self._revived(reached)
            except DoesNotFit as short:
                if self._crew.await_another(str(short), self._interrupted):
                    continue
                if self._interrupted():
                    raise Interrupted(
                        f"interrupted while the run was paused: go on with ringtmp train --resume {self._job.run.path}"
                    ) from None
                raise

    def _revived(self, reached: Progress) -> tuple[str, int]:
        assert self._endpoint is not None
        assert self._log is not None
        # None: somebody was lost while devices were tried, before there was a plan.
        told = self._master.leave() if self._master is not None else {}
        self._generation += 1
        endpoint = self._endpoint
        config = self._job.config
        index, layers, checkpoint = self._open()
        need_bytes = memory_need(layers, config.training.optimizer, self._crew.nodes)
        living = self._crew.mend(self._ring, self._generation, config.ring.strategy != "ring", need_bytes)
        endpoint.renew(self._generation, Renew(self._generation), living)
        self._settle()
        scout = Lead(endpoint, self._crew, self._log)
        scout.gather([node for node in self._crew.addresses() if node != MASTER])
        kept, saved = endpoint.shelf.contents(), checkpoint.progress.step
        if survivors := config.ring.strategy == "allreduce":
            snapshot = in_hand(scout.hellos, kept, layers, Snapshot(reached, told=told), saved)
        else:
            snapshot = self._protection.newest(scout.hellos, kept, layers, saved)
        if snapshot is not None:
            self._progress = self._without_undone_epoch(snapshot.progress)
        try:
            self._lay_out(endpoint, index, layers, checkpoint, scout.hellos, snapshot)
        except SnapshotUnusable as problem:
            self._protection.spoil()
            self._warn(f"{problem}; going back to the checkpoint of step {saved}")
            return self._revived(reached)
        if snapshot is None:
            return "checkpoint", saved
        return "survivors" if survivors else "snapshot", snapshot.step

    def _without_undone_epoch(self, progress: Progress) -> Progress:
        """Where the step that ends an epoch is done again, the epoch has not ended."""
        per_epoch = self._batches.steps_per_epoch
        if per_epoch is None:
            return progress
        return msgspec.structs.replace(progress, epochs_done=min(progress.epochs_done, progress.step // per_epoch))

    def _steps(self, master: Leader) -> str:
        job, training = self._job, self._job.config.training
        total = self._total_steps()
        fresh = True
        epoch = self._progress.epochs_done
        step = self._progress.step
        while total is None or step < total:
            batch = self._batches.batch(step)
            if batch is None or batch.epoch != epoch:
                if self._end_epoch(master, epoch):
                    return "stopped early"
                fresh = True
                epoch += 1
            if batch is None or (total is None and training.epochs is not None and epoch >= training.epochs):
                return "done"
            refuse_too_small(batch, self._least, step)
            started = time.monotonic()
            self._protection.progress = self._progress
            loss = master.train_step(step, batch, fresh, self._upcoming)
            fresh = False
            now = time.monotonic()
            rate = learning_rate(self._lr_schedule, training.optimizer_settings["lr"], step)
            done = events.StepDone(
                now, step, batch.epoch, loss, rate,
                batch.samples, now - started, self._protection.unprotected,
            )  # fmt: skip
            assert self._log is not None
            self._log.write(done)
            self._log.flush()
            if self._log.trouble is not None and not self._told_of_log:
                self._told_of_log = True
                self._watcher.warn(self._log.trouble)
            step += 1
            self._losses.step_done(step)
            self._protect(done.wall_s)
            self._progress = msgspec.structs.replace(self._progress, step=step)
            self._watcher.step(step, total, done, self._log.idle_share)
            left = step if total is None else total - step  # of a stream: as many again
            self._rebalancing.step_done(done.wall_s, left, self._protection)
            if master.committed > step:
                continue  # work beyond this step has been given out, so nothing can pause here
            every = job.config.keep.checkpoint_every
            if (every is not None and step % every == 0) or self._batches.spooled_bytes > SPOOL_LIMIT_BYTES:
                self._save(master)
                fresh = True
            if time.monotonic() >= self._not_before and (reason := self._crew.changed()) is not None:
                master = self._regroup(master, reason)
                fresh = True
            fresh = self._rebalancing.at_rest(master, self._protection) or fresh
            if source := self._rebalancing.ready(self._protection):
                master = self._rebalance(master, source)
                fresh, step, epoch = True, self._progress.step, self._progress.epochs_done
            if self._interrupted():
                self._watcher.phase("interrupted: saving")
                self._save(master, needed=True)
                raise Interrupted(
                    f"interrupted after step {step}; the checkpoint is saved: go on with ringtmp train --resume {job.run.path}"
                )
        per_epoch = self._batches.steps_per_epoch
        if per_epoch is not None and step % per_epoch == 0 and epoch < step // per_epoch:
            self._end_epoch(master, epoch)
        else:
            self._evaluate(master, epoch)
        return "done"

    def _upcoming(self, step: int) -> Batch | None:
        """The batch of a step that may begin before the one before it has ended; None if the run must pause between: for
        an evaluation, a checkpoint, or because somebody wants to stop."""
        every, total = self._job.config.keep.checkpoint_every, self._total_steps()
        if (total is not None and step >= total) or (every is not None and step % every == 0):
            return None
        if self._protection.due(step) or self._rebalancing.ready(self._protection):
            return None
        changed = time.monotonic() >= self._not_before and self._crew.changed() is not None
        leaving = self._interrupted() or changed
        return None if leaving else self._batches.early(step)

    def _protect(self, step_s: float) -> None:
        """What a finished step means for the snapshots."""
        protection, log = self._protection, self._log
        protection.step_took(step_s)
        if protection.mode == "off":
            self._batches.forget(self._progress.step + 1)
        whole = protection.whole
        if whole is not None and whole.step > self._kept and log is not None:
            self._kept = whole.step
            self._batches.forget(whole.step)
            log.write(events.SnapshotWhole(time.monotonic(), whole.step, protection.interval))
        if (trouble := protection.lapse()) is not None:
            self._warn(f"no more snapshots: {trouble}; a lost node now means going back to the last checkpoint")

    def _regroup(self, master: Leader, reason: str) -> Leader:
        """A new generation at a step boundary: save, stop, begin again from what was saved with those who are left."""
        assert self._log is not None
        started = time.monotonic()
        if not self._saved(master):
            self._not_before = started + RETRY_S  # who joins, leaves or is let in waits for room on the disk
            return master
        self._watcher.tell(f"{reason}: laying the ring out anew after step {self._progress.step}")
        if self._crew.all_anew():
            master.stop("a new generation begins")
            endpoint = self._started_anew()
            self._settle()
            self._lay_out(endpoint, *self._open())
        else:
            self._revive(self._progress)
        assert self._master is not None
        now = time.monotonic()
        self._log.write(
            events.Regrouped(now, self._progress.step, self._generation, reason, self._crew.nodes, now - started)
        )
        return self._master

    def _started_anew(self) -> Endpoint:
        """Somebody may be lost while all start: then all who are left start again."""
        self._losses.begin()
        while True:
            self._generation += 1
            try:
                return self._crew.regroup(self._ring, self._generation)
            except NodeLost as lost:
                if not self._losses.bear(lost):
                    raise
                self._warn(f"{lost}; starting again without it")

    def _rebalance(self, master: Leader, source: str) -> Leader:
        """A new generation because devices are not as fast as planned."""
        assert self._log is not None
        if source == "checkpoint" and not self._saved(master):
            self._rebalancing.drop()
            return master
        move, started, reached = self._rebalancing.begin(), time.monotonic(), self._progress.step
        source, _ = self._revive(self._progress)
        now = time.monotonic()
        event = events.Regrouped(
            now, self._progress.step, self._generation, move.reason, self._crew.nodes, now - started,
            repeated=reached - self._progress.step, source=source, kind="rebalanced",
        )  # fmt: skip
        self._log.write(event)
        self._watcher.tell(self._rebalancing.moved(event, move))
        assert self._master is not None
        return self._master

    def _evaluate(self, master: Leader, epoch: int) -> float | None:
        """The test loss, if there is a test part."""
        job = self._job
        assert self._log is not None
        if job.test is None:
            return None
        batches = evaluation_batches(
            job.test, self._batch_size * EVALUATION_FACTOR, self._microbatches * EVALUATION_FACTOR
        )
        score = master.evaluate(batches, self._progress.step, job.loss_name == "next_byte")
        event = events.Evaluated(
            time.monotonic(), self._progress.step, epoch, score.samples, score.loss, score.accuracy, score.bits_per_byte
        )
        self._log.write(event)
        self._log.flush()
        self._watcher.evaluated(event)
        return score.loss

    def _end_epoch(self, master: Leader, epoch: int) -> bool:
        """Evaluate, perhaps save. True: the test loss has not improved for long enough to stop."""
        loss = self._evaluate(master, epoch)
        self._progress, patience = self._progress.after_epoch(epoch, loss), self._job.config.training.early_stop
        if self._job.config.keep.checkpoint_every is None and time.monotonic() - self._saving.at > CHECKPOINT_PAUSE_S:
            self._save(master)
        return patience is not None and self._progress.epochs_without_gain >= patience

    def _saved(self, master: Leader) -> bool:
        """Whether there is a checkpoint of this very step; a full disk is no reason to end the run."""
        self._save(master)
        return self._saving.step == self._progress.step

    def _save(self, master: Leader, needed: bool = False) -> None:
        assert self._log is not None
        saved = self._saving.save(master, self._progress, needed, self._warn)
        if saved is not None:
            self._batches.forget(saved.step)
            self._log.write(saved)

    def _warn(self, text: str) -> None:
        self._watcher.warn(text)
        if self._log is not None:
            self._log.write(events.Warned(time.monotonic(), text))
