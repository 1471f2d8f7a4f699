"""One training run, from settings to result: build or resume, plan, lay out, train, keep.

Everything that can be refused is refused before a node starts; everything that was started is stopped on every way out.
"""

from __future__ import annotations

import time
from functools import partial

import msgspec

from ringtmp.data.batches import Batch, evaluation_batches
from ringtmp.errors import DoesNotFit, Interrupted, LinkLost, NodeLost, RingError, SnapshotUnusable
from ringtmp.metrics import events
from ringtmp.metrics.events import EventLog
from ringtmp.plan.microbatches import to_build
from ringtmp.plan.route import MASTER
from ringtmp.run.build_model import refuse_too_small, write_model
from ringtmp.run.generation import Laying
from ringtmp.run.losses_of_nodes import memory_need
from ringtmp.runtime.checkpoint import Progress, weights_sha256
from ringtmp.runtime.endpoint import Endpoint
from ringtmp.runtime.leader import Lead
from ringtmp.runtime.learning_rates import learning_rate
from ringtmp.runtime.losses import is_of_bytes
from ringtmp.runtime.snapshot_schedule import Snapshot, in_hand
from ringtmp.strategies.base import Leader
from ringtmp.strategies.ring.plan import refuse_too_few
from ringtmp.system.resources import keeping_what_is_there
from ringtmp.wire.messages import Renew

#: Without --checkpoint-every a checkpoint is taken at the end of an epoch, but not more often than this.
CHECKPOINT_PAUSE_S = 30.0
RETRY_S = 30.0
#: An evaluation pass holds this many training batches' worth of microbatches, to keep the ring full.
EVALUATION_FACTOR = 4


class Session(Laying):
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
            endpoint = self._node_pool.start(self._ring, self._generation)
            self._settle()
            if self._job.model is not None:
                auto = self._job.config.training.microbatches == "auto"
                sizes = to_build(self._batches.sizes(), self._batch_size, self._microbatches, auto)
                loss = self._job.loss, self._job.loss_name
                keep_all = self._node_pool.same_machine or self._job.config.ring.all_devices
                enough = partial(refuse_too_few, self._job.config, self._node_pool.nodes, keep_all)
                write_model(
                    run, self._job.model, self._job.train, loss, self._recipe(), *sizes, self._watcher.phase, enough
                )  # fmt: skip
            index, layers, checkpoint = self._open()
            self._begin_stream(resuming)
            with keeping_what_is_there():
                try:
                    self._lay_out(endpoint, index, layers, checkpoint)
                except NodeLost as lost:
                    self._heal(lost)
                self._interrupted.armed = True
                outcome = self._to_the_end()
            digest = weights_sha256(self._saving.newest(), layers)
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
            now, step, self._generation, losses.reason, self._node_pool.nodes, now - noticed,
            losses.nodes, losses.notice_s, reached.step - self._progress.step, source,
        )  # fmt: skip
        self._survived(event)

    def _revive(self, reached: Progress) -> tuple[str, int]:
        """The next generation, from the newest state that is whole; returns what that was, and of which step. Those who are
        left may not hold the model: then the run pauses until another comes."""
        while True:
            try:
                return self._revived(reached)
            except DoesNotFit as short:
                if self._node_pool.await_another(str(short), self._interrupted):
                    continue
                if self._interrupted():
                    raise Interrupted(f"interrupted while the run was paused: {self._job.how_to_go_on}") from None
                raise
            except NodeLost:
                self._progress = reached  # whoever heals counts from there
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
        need_bytes = memory_need(
            layers, config.training.optimizer, config.training.optimizer_settings, self._node_pool.nodes
        )
        living = self._node_pool.replace_lost(self._ring, self._generation, config.ring.strategy != "ring", need_bytes)
        for other in self._losses.found(self._node_pool.found_lost):
            self._warn(f"{other}; healing")
        endpoint.renew(self._generation, Renew(self._generation), living)
        self._settle()
        scout = Lead(endpoint, self._node_pool, self._log)
        scout.gather([node for node in self._node_pool.addresses() if node != MASTER])
        kept, saved = endpoint.shelf.contents(), checkpoint.progress.step
        if survivors := config.ring.strategy == "allreduce":
            snapshot = in_hand(scout.hellos, kept, layers, Snapshot(reached, told=told), saved)
        else:
            snapshot = self._protection.newest(scout.hellos, kept, layers, saved)
        if snapshot is not None:
            self._progress = self._without_undone_epoch(snapshot.progress)
        elif (whole := self._protection.whole) is not None and whole.step > saved:  # gone with those who held it
            self._protection.spoil()
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
            batch = self._batch(step)
            if batch is None or batch.epoch != epoch:
                if self._end_epoch(master, epoch):
                    return "stopped early"
                fresh = True
                epoch += 1
            if batch is None or (total is None and training.epochs is not None and epoch >= training.epochs):
                return "done"
            refuse_too_small(batch, self._least, step)
            self._check(batch, job.train.name, f"the batch of step {step}")
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
            if (news := self._log.news()) is not None:
                self._warn(news)
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
            if (every is not None and step % every == 0) or self._spool_is_full():
                if not self._saved(master):
                    self._not_before = time.monotonic() + RETRY_S
                fresh = True
            if (reason := self._change()) is not None:
                master = self._regroup(master, reason)
                fresh = True
            fresh = self._rebalancing.at_rest(master, self._protection) or fresh
            if source := self._rebalancing.ready(self._protection):
                master = self._rebalance(master, source)
                fresh, step, epoch = True, self._progress.step, self._progress.epochs_done
            if self._interrupted():
                self._watcher.phase("interrupted: saving")
                self._save(master, needed=True)
                raise Interrupted(f"interrupted after step {step}; the checkpoint is saved: {self._job.how_to_go_on}")
        per_epoch = self._batches.steps_per_epoch
        if per_epoch is not None and step % per_epoch == 0 and epoch < step // per_epoch:
            self._end_epoch(master, epoch)
        else:
            self._evaluate(master, epoch)
        return "done"

    def _spool_is_full(self) -> bool:
        """Whether a stream's batches should be let go, unless the disk was too full for a checkpoint a moment ago."""
        return self._batches.full and time.monotonic() >= self._not_before

    def _begin_stream(self, resuming: bool) -> None:
        if self._job.config.training.steps is None and self._batches.steps_per_epoch is None and self._batches.once:
            self._watcher.tell("the data is read once: training goes on until it ends, or give steps")
        self._batches.go_on(self._progress.step, self._progress.stream)
        if resuming and (reason := self._batches.not_ours) is not None:
            self._warn(
                f"{reason}: their order is not ours to repeat, so this run may see other batches than one that never stopped"
            )

    def _batch(self, step: int) -> Batch | None:
        """None when a stream has ended. Says what could not be had again."""
        batch = self._batches.batch(step)
        for stray in self._batches.strays():
            assert self._log is not None
            self._log.write(events.StreamStrayed(time.monotonic(), stray.step, stray.skipped, stray.text))
            self._warn(stray.text)
        if (trouble := self._batches.trouble()) is not None:
            self._warn(f"batches of the stream cannot be written: {trouble}; they are kept in memory")
        return batch

    def _upcoming(self, step: int) -> Batch | None:
        """The batch of a step that may begin before the one before it has ended; None if the run must pause between: for
        an evaluation, a checkpoint, or because somebody wants to stop."""
        every, total = self._job.config.keep.checkpoint_every, self._total_steps()
        if (total is not None and step >= total) or (every is not None and step % every == 0):
            return None
        if self._protection.due(step) or self._rebalancing.ready(self._protection):
            return None
        leaving = self._interrupted() or self._change() is not None
        return None if leaving else self._batches.early(step)

    def _change(self) -> str | None:
        """Why the ring must be laid out anew, unless the disk was too full for it a moment ago."""
        return self._node_pool.changed() if time.monotonic() >= self._not_before else None

    def _protect(self, step_s: float) -> None:
        """What a finished step means for the snapshots."""
        protection = self._protection
        protection.step_took(step_s)
        if protection.mode == "off" and self._job.config.keep.stream_keep != "disk":
            self._batches.forget(self._progress.step + 1)
        whole = protection.whole
        if whole is not None and self._batches.full and time.monotonic() < self._not_before:
            self._batches.forget(whole.step)  # no checkpoint will let them go for now
        if (trouble := protection.lapse()) is not None:
            self._warn(f"no more snapshots: {trouble}; a lost node now means going back to the last checkpoint")

    def _regroup(self, master: Leader, reason: str) -> Leader:
        """A new generation at a step boundary: save, stop, begin again from what was saved with those who are left."""
        assert self._log is not None
        started = time.monotonic()
        self._losses.begin()
        if not self._saved(master):
            self._not_before = started + RETRY_S  # who joins, leaves or is let in waits for room on the disk
            return master
        self._watcher.tell(f"{reason}: laying the ring out anew after step {self._progress.step}")
        if self._node_pool.all_anew():
            self._dismiss(master, "a new generation begins")
            master.leave()
            endpoint = self._started_anew()
            self._settle()
            try:
                self._lay_out(endpoint, *self._open())
            except DoesNotFit:  # without the one that was revoked: pauses until another comes
                self._revive(self._progress)
        else:
            self._revive(self._progress)
        assert self._master is not None
        now, losses = time.monotonic(), self._losses
        event = events.Regrouped(
            now, self._progress.step, self._generation, "; ".join(filter(None, (reason, losses.reason))),
            self._node_pool.nodes, now - started, losses.nodes, losses.notice_s,
        )  # fmt: skip
        self._log.write(event)
        return self._master

    def _started_anew(self) -> Endpoint:
        """Somebody may be lost while all start: then all who are left start again."""
        self._losses.begin()
        while True:
            self._generation += 1
            try:
                return self._node_pool.regroup(self._ring, self._generation)
            except NodeLost as lost:
                if not self._losses.bear(lost):
                    raise
                self._warn(f"{lost}; starting again without it")

    def _rebalance(self, master: Leader, source: str) -> Leader:
        """A new generation because devices are not as fast as planned."""
        assert self._log is not None
        # Going back to a snapshot would skip the batches since, where they are not kept.
        here = source == "checkpoint" or self._batches.gone
        if here and not self._saved(master):
            self._rebalancing.drop()
            return master
        move, started, reached = self._rebalancing.begin(), time.monotonic(), self._progress.step
        self._losses.begin()
        source, _ = self._revive(self._progress)
        now = time.monotonic()
        event = events.Regrouped(
            now, self._progress.step, self._generation, move.reason, self._node_pool.nodes, now - started,
            self._losses.nodes, self._losses.notice_s, repeated=reached - self._progress.step, source=source, kind="rebalanced",
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
        where = f"the test part of {job.test.name}"
        score = master.evaluate(
            (self._check(batch, where, where) for batch in batches), self._progress.step, is_of_bytes(job.loss_name)
        )
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
