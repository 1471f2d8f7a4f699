"""Leads step after step: batch, update, record, and between two steps whatever can only be done while the ring is at rest."""

from __future__ import annotations

import time

import msgspec

from ringtmp.data.batches import Batch, evaluation_batches
from ringtmp.data.tables_and_streams import text_of
from ringtmp.errors import Interrupted, NodeLost, UsageError
from ringtmp.metrics import events
from ringtmp.run.healing import Healing
from ringtmp.run.members_and_plan import Generation, Run
from ringtmp.run.other_home import OtherHome
from ringtmp.runtime.learning_rates import learning_rate
from ringtmp.runtime.losses import Score, is_of_bytes
from ringtmp.runtime.stop_and_checkpoint_requests import CHECKPOINT, STOP, Requests, released

#: Without --checkpoint-every a checkpoint is taken at the end of an epoch, but not more often than this.
CHECKPOINT_PAUSE_S = 30.0
RETRY_S = 30.0
#: An evaluation pass holds this many training batches' worth of microbatches, to keep the ring full.
EVALUATION_FACTOR = 4


class TrainingLoop:
    """`progress` is how far the run has come. Whoever heals or rebuilds the ring gives it the next generation."""

    def __init__(self, run: Run, first: Generation, healing: Healing, home: OtherHome | None = None) -> None:
        self._run = run
        self._home = home
        self._met_home = home is None
        self._record = run.record
        self._watcher = run.record.watcher
        self._healing = healing
        self._generation = first
        self.progress = first.progress
        self._fresh = True  # the next step begins after a pause
        self._requests = Requests(run.job.run.path)
        self._asked: set[str] = set()  # by somebody who looks on, and not done yet
        self._warn_at = 1  # so many samples left out
        self._not_before = 0.0  # when a checkpoint, or what needs one, is tried again that found the disk full

    def to_the_end(self) -> str:
        """All steps and what is kept of them; again from the last whole state whenever a node is lost."""
        while True:
            try:
                outcome = self._steps()
                self._watcher.phase("saving")
                self._run.saving.save(self._generation.leader, self.progress, needed=True)
                return outcome
            except NodeLost as lost:
                self._go_on_with(self._healing.heal(lost, self.progress))

    def _go_on_with(self, generation: Generation | None) -> None:
        """None: the one that is there."""
        self._fresh = True
        if generation is not None:
            self._generation, self.progress = generation, generation.progress

    # -- step after step ----------------------------------------------------------------------------------------------

    def _steps(self) -> str:
        self._fresh = True
        if self._home is not None and not self._met_home:
            self._go_on_with(self._home.start(self._generation.leader, self.progress))
            self._met_home = True
        total, epochs = self._run.total_steps, self._run.job.config.training.epochs
        while total is None or self.progress.step < total:
            batch = self._batch()
            if batch is None or batch.epoch > self.progress.epochs_done:
                if self._end_epoch():
                    return "stopped early"
                self._fresh = True
            if batch is None and total is not None:
                self._record.warn(f"the data ended after {self.progress.step} of {total} steps")
            if batch is None or (total is None and epochs is not None and self.progress.epochs_done >= epochs):
                return "done"
            self._step(batch)
            if self._generation.leader.committed <= self.progress.step:
                self._at_rest()  # else work beyond this step has been given out, so nothing can pause here
        per_epoch = self._run.batches.steps_per_epoch
        step, epoch = self.progress.step, self.progress.epochs_done
        if per_epoch is not None and step % per_epoch == 0 and epoch < step // per_epoch:
            self._end_epoch()
        else:
            self._evaluate()
        return "done"

    def _batch(self) -> Batch | None:
        """The next; None when a stream has ended. Says what could not be had again."""
        batches = self._run.batches
        batch = batches.batch(self.progress.step)
        if batch is not None and self._is_unusable_rest(batch):
            batch, self._warn_at = None, 1
        for stray in batches.strays():
            self._record.write(events.StreamStrayed(time.monotonic(), stray.step, stray.skipped, stray.text))
            self._record.warn(stray.text)
        if (left_out := batches.left_out()) is not None:
            count, text = left_out.count, left_out.text
            self._record.write(events.SamplesLeftOut(time.monotonic(), self.progress.step, count, text))
            if count >= self._warn_at:
                self._record.warn(f"{text}: left out, number {count} so far")
                self._warn_at = 10 * count
        if (trouble := batches.trouble()) is not None:
            self._record.warn(f"batches of the stream cannot be written: {trouble}; they are kept in memory")
        return batch

    def _is_unusable_rest(self, batch: Batch) -> bool:
        """A last batch too small for the model, of data that is read once: nobody could have made it larger."""
        step = self.progress.step
        why = _too_small(batch, self._run.index.least_microbatch, step)
        return why is not None and self._run.batches.leave_out_last(step, why)

    def _step(self, batch: Batch) -> None:
        run, log, step = self._run, self._record.log, self.progress.step
        if (why := _too_small(batch, run.index.least_microbatch, step)) is not None:
            raise UsageError(
                f"{why}: use fewer --microbatches, or drop the last, smaller batch (drop_last=True of a DataLoader)"
            )
        batch = run.index.check_batch(batch, run.job.loss_name, run.job.train.name, f"the batch of step {step + 1}")
        predicted = self._predicted(batch) if run.job.config.keep.test_then_train else None
        started = time.monotonic()
        run.protection.progress = self.progress
        loss = self._generation.leader.train_step(step, batch, self._fresh, self._upcoming)
        self._fresh = False
        now = time.monotonic()
        rate = learning_rate(run.lr_schedule, run.job.config.training.optimizer_settings["lr"], step)
        done = events.StepDone(
            now, step, batch.epoch, loss, lr=rate,
            samples=batch.samples, wall_s=now - started, unprotected=run.protection.unprotected,
            predicted_loss=predicted.loss if predicted else None,
            predicted_accuracy=predicted.accuracy if predicted else None,
        )  # fmt: skip
        log.write(done)
        log.flush()
        if (news := log.news()) is not None:
            self._record.warn(news)
        step += 1
        self._healing.losses.step_done(step)
        self._protect(done.wall_s)
        self.progress = msgspec.structs.replace(self.progress, step=step)
        self._watcher.step(step, run.total_steps, done, log.idle_share)
        left = step if run.total_steps is None else run.total_steps - step  # of a stream: as many again
        run.rebalancing.step_done(done.wall_s, left, run.protection)
        run.saving.settle(wait=False)
        self._mind_requests()

    def _predicted(self, batch: Batch) -> Score:
        """How well the model does on a batch that it has not learned from."""
        self._fresh = True
        return self._generation.leader.evaluate([batch], self.progress.step, is_of_bytes(self._run.job.loss_name))

    def _mind_requests(self) -> None:
        """What viewers of the run's page ask for."""
        for request in self._requests.taken():
            if (node := released(request)) is None:
                self._asked.add(request)
                continue
            try:
                self._run.pool.release(node)
            except UsageError as no:
                self._record.warn(f"node {node} was to be released: {no}")
        if self._requests.wants_detail:
            self._generation.leader.want_detail(self.progress.step + 1)

    def _protect(self, step_s: float) -> None:
        """What a finished step means for the snapshots."""
        protection, batches = self._run.protection, self._run.batches
        protection.step_took(step_s)
        if protection.mode == "off" and self._run.job.config.keep.stream_keep != "disk":
            batches.forget(self.progress.step + 1)
        whole = protection.whole
        if whole is not None and batches.full and time.monotonic() < self._not_before:
            batches.forget(whole.step)  # no checkpoint will let them go for now
        if (trouble := protection.lapse()) is not None:
            self._record.warn(f"no more snapshots: {trouble}; a lost node now means going back to the last checkpoint")

    def _upcoming(self, step: int) -> Batch | None:
        """The batch of a step that may begin before the one before it has ended; None if the run must pause between: for
        an evaluation, a checkpoint, or because somebody wants to stop."""
        run, every, total = self._run, self._run.job.config.keep.checkpoint_every, self._run.total_steps
        if (total is not None and step >= total) or (every is not None and step % every == 0):
            return None
        if run.job.config.keep.test_then_train:
            return None
        if self._home is not None and not self._home.may_pass(step):
            return None
        if run.protection.due(step) or run.rebalancing.ready(run.protection):
            return None
        leaving = run.interrupted() or bool(self._asked) or self._change() is not None
        early = None if leaving else run.batches.early(step)
        return None if early is None else run.index.in_order(early, f"the batch of step {step + 1}")

    # -- between two steps --------------------------------------------------------------------------------------------

    def _at_rest(self) -> None:
        """Nothing is under way: a checkpoint may be taken, the ring rebuilt, the run interrupted."""
        if self._home is not None and self._home.due(self.progress):
            self._go_on_with(self._home.exchange(self._generation.leader, self.progress))
        run, healing, every = self._run, self._healing, self._run.job.config.keep.checkpoint_every
        due = every is not None and self.progress.step % every == 0
        if due or CHECKPOINT in self._asked or (run.batches.full and self._may_try()):
            self._asked.discard(CHECKPOINT)
            if not self._run.saving.begin(self._generation.leader, self.progress):
                self._not_before = time.monotonic() + RETRY_S
            self._fresh = True
        if (reason := self._change()) is not None:
            started = time.monotonic()
            generation = healing.regroup(self._generation.leader, self.progress, reason)
            if generation is None:  # who joins, leaves or is let in waits for room on the disk
                self._not_before = started + RETRY_S
            self._go_on_with(generation)
        self._fresh = run.rebalancing.at_rest(self._generation.leader, run.protection) or self._fresh
        if (ready := run.rebalancing.ready(run.protection)) is not None:
            self._go_on_with(healing.rebalance(self._generation.leader, self.progress, ready))
        if run.interrupted() or STOP in self._asked:
            self._watcher.phase("interrupted: saving")
            run.saving.save(self._generation.leader, self.progress, needed=True)
            raise Interrupted(
                f"interrupted after step {self.progress.step}; the checkpoint is saved: {run.job.how_to_go_on}"
            )

    def _may_try(self) -> bool:
        """Unless the disk was too full a moment ago."""
        return time.monotonic() >= self._not_before

    def _change(self) -> str | None:
        """Why the ring must be rebuilt."""
        return self._run.pool.changed() if self._may_try() else None

    def _end_epoch(self) -> bool:
        """Evaluate, perhaps save. True: the test loss has not improved for long enough to stop."""
        config, epoch = self._run.job.config, self.progress.epochs_done
        self.progress = self.progress.after_epoch(epoch, self._evaluate())
        if config.keep.checkpoint_every is None and time.monotonic() - self._run.saving.at > CHECKPOINT_PAUSE_S:
            self._run.saving.begin(self._generation.leader, self.progress)
        patience = config.training.early_stop
        return patience is not None and self.progress.epochs_without_gain >= patience

    def _evaluate(self) -> float | None:
        """The test loss, if there is a test part."""
        job, step = self._run.job, self.progress.step
        if job.test is None:
            return None
        batches = evaluation_batches(
            job.test, self._run.batch_size * EVALUATION_FACTOR, self._generation.microbatches * EVALUATION_FACTOR
        )
        where = f"the test part of {job.test.name}"
        checked = (self._run.index.check_batch(batch, job.loss_name, where, where) for batch in batches)
        score = self._generation.leader.evaluate(checked, step, is_of_bytes(job.loss_name))
        told = score.of_text(job.loss_name, text_of(job.test))
        event = events.Evaluated(
            time.monotonic(), step, self.progress.epochs_done, score.samples, score.loss, score.accuracy,
            bits_per_byte=told.bits_per_byte, perplexity=told.perplexity,
        )  # fmt: skip
        self._record.write(event)
        self._record.log.flush()
        self._watcher.evaluated(event)
        return score.loss


def _too_small(batch: Batch, least: int, step: int) -> str | None:
    """Why the model cannot learn from it. A table's sizes are checked before the start; a stream may bring any."""
    smallest = min(len(each) for each in batch.targets)
    if smallest >= least:
        return None
    return (
        f"the batch of step {step + 1} has {batch.samples} samples, so its smallest microbatch has {smallest}, but a "
        f"BatchNorm needs {least}"
    )
