"""One training run, from settings to result: build or resume, lay out, train, keep.

Everything that can be refused is refused before a node starts; everything that was started is stopped on every way out.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial

from ringtmp.config import usual_microbatches
from ringtmp.data.batches import TrainingBatches
from ringtmp.data.stream_store import LEAST_LIMIT_BYTES, MEMORY_LIMIT_BYTES
from ringtmp.data.tables_and_streams import Stream
from ringtmp.errors import Interrupted, NodeLost, RingError, UsageError
from ringtmp.launch.node_pool import NodePool
from ringtmp.launch.supervise import restarted
from ringtmp.metrics import events
from ringtmp.metrics.event_log import EventLog
from ringtmp.model.build import TRACED
from ringtmp.model.export import EXAMPLE_BATCH
from ringtmp.run.build_model import write_model
from ringtmp.run.healing import Healing
from ringtmp.run.interruption import Interruption
from ringtmp.run.measure_model import Reading
from ringtmp.run.meet_home import Line
from ringtmp.run.members_and_plan import Generations, Origin, Run, protection_of, settled
from ringtmp.run.other_home import OtherHome, Settings
from ringtmp.run.rebalancing import Rebalancing
from ringtmp.run.record_events import Record
from ringtmp.run.save_checkpoints import Saving
from ringtmp.run.training_loop import TrainingLoop
from ringtmp.run.what_to_train import Job, Watcher
from ringtmp.runtime import left_with_nodes
from ringtmp.runtime.checkpoint import Progress
from ringtmp.runtime.ensemble_members import sha256_of_all
from ringtmp.runtime.learning_rates import checked_schedule
from ringtmp.runtime.left_with_nodes import Left
from ringtmp.runtime.snapshot_schedule import Snapshot
from ringtmp.strategies import registry
from ringtmp.strategies.base import Leader
from ringtmp.system.resources import free_memory_bytes, keeping_what_is_there

FAILED_STOP_LIMIT_S = 0.5


class Session:
    def __init__(self, job: Job, pool: NodePool, watcher: Watcher, interrupted: Interruption) -> None:
        self._job = job
        self._node_pool = pool
        self._watcher = watcher
        self._interrupted = interrupted
        training, keep = job.config.training, job.config.keep
        self._microbatches = usual_microbatches(training)
        self._batch_size = job.train.batch_size if isinstance(job.train, Stream) else training.batch_size
        self._batches = TrainingBatches(
            job.train, self._batch_size, self._microbatches, training.seed, keep=keep.stream_keep, folder=job.run.stream,
            memory_bytes=min(MEMORY_LIMIT_BYTES, max(LEAST_LIMIT_BYTES, free_memory_bytes() // 4)),
        )  # fmt: skip
        _refuse_one_home(job)
        strategy, per_epoch = registry.get(job.config.ring.strategy), self._batches.steps_per_epoch
        if strategy.full_batch and per_epoch != 1:
            whole = "a stream has no whole" if isinstance(job.train, Stream) else f"use --batch-size {job.train.size}"
            raise UsageError(
                f"strategy {strategy.name} takes the whole data in every step, and --batch-size {self._batch_size} is a part "
                f"of {job.train.name}: {whole}"
            )
        self._targets = job.train.example(EXAMPLE_BATCH)[1]
        self._ring = secrets.token_hex(8)
        self._outcome = "failed"
        self._step = 0  # where the run ended
        self._left = None if job.model is not None or not pool.outlives_master else left_with_nodes.read(job.run.path)
        self._begun = False  # its first line is written
        self.unwritten: list[events.Event] = []  # what the record on the disk lacks when the run has ended

    def train(self) -> None:
        """Run to the end. Raises; whatever it raises, the checkpoints and events so far are kept."""
        run = self._job.run
        if self._job.model is None:
            run.open()
        else:
            run.create()
        run.lock()
        try:
            self._recorded(Record(EventLog(run.events), self._watcher))
        finally:
            run.discard()
            run.unlock()

    def _recorded(self, record: Record) -> None:
        error, digest = None, None
        try:
            digest = self._whole_run(record)
        except RingError as problem:
            error = str(problem)
            raise
        except BaseException as problem:
            error = f"{type(problem).__name__}: {problem}"
            raise
        finally:
            self._interrupted.deaf = True  # every wait from here has a limit
            self._node_pool.stop()
            left_with_nodes.forget(self._job.run.path)
            self._tell_of_removed(record)
            end = events.RunEnded(time.monotonic(), self._step, self._outcome, digest, error, self._begun)
            record.write(end)
            record.log.close()
            self._tell_of_unwritten(record)
            self._watcher.ended(end)

    def _whole_run(self, record: Record) -> str:
        """Returns the digest of the weights."""
        if self._job.line is None:
            return self._in_this_home(record, None)
        with closing(self._job.line(self._watcher.tell)) as line:
            return self._in_this_home(record, line)

    def _in_this_home(self, record: Record, line: Line | None) -> str:
        job, config = self._job, self._job.config
        endpoint = self._node_pool.start(self._ring, 1)
        config = settled(config, self._node_pool)
        if job.model is not None:
            keep_all = self._node_pool.same_machine or config.ring.all_devices
            enough = partial(registry.get(config.ring.strategy).refuse_too_few, config, self._node_pool.nodes, keep_all)
            how = Reading.of(config, self._batches, self._batch_size, (job.loss, job.loss_name))
            write_model(job.run, job.model, job.train, how, phase=self._watcher.phase, known=enough)
        run = self._opened(record)
        if job.model is None and run.total_steps is not None and run.saving.step >= run.total_steps:
            self._watcher.tell(
                f"nothing is left to train: this run has made {run.saving.step} steps of {run.total_steps}; --epochs and "
                "--steps count from its beginning"
            )
        if job.model is not None and run.index.checked == TRACED:
            self._watcher.tell(
                "the model looks at the values of its inputs to choose a path, which no graph can do: it is trained by the "
                "path its library exports (docs/models.md). If a mask is all ones, --leave-out it"
            )
        generations = Generations(run, config, self._microbatches, endpoint)
        with keeping_what_is_there():
            return self._led(run, generations, line)

    def _opened(self, record: Record) -> Run:
        """With the model as it lies in the run directory."""
        job, (index, layers) = self._job, self._job.run.read_layers()
        training, ring = job.config.training, job.config.ring
        total, per_epoch, leave = training.steps, self._batches.steps_per_epoch, self._leave_behind(index.run)
        if total is None and per_epoch is not None and training.epochs is not None:
            total = per_epoch * training.epochs
        return Run(
            job=job, pool=self._node_pool, record=record, interrupted=self._interrupted, name=self._ring, index=index,
            layers=layers, batches=self._batches, batch_size=self._batch_size, targets=self._targets, total_steps=total,
            lr_schedule=checked_schedule(training.lr_schedule, total),
            saving=Saving(
                job.run.checkpoints, index.run, self._batches, record,
                behind=ThreadPoolExecutor(1, "checkpoint") if self._node_pool.ranks_of_torch else None,
            ),
            strategy=registry.get(ring.strategy), rebalancing=Rebalancing(ring.rebalance),
            protection=protection_of(job.config, leave), leave_behind=leave,
        )  # fmt: skip

    def _led(self, run: Run, generations: Generations, line: Line | None) -> str:
        """The first generation, and all that come after it."""
        healing, origin, loop = Healing(run, generations), run.saving.opened, None
        try:
            self._begin_stream(run)
            try:
                left, begin = self._taken_up(run), Origin(origin, origin.progress)
                first = generations.lay_out(begin) if left is None else healing.take_up(left, begin)
            except NodeLost as lost:
                first = healing.heal(lost, origin.progress)
            if (before := restarted()) is not None:
                healing.record_restart(before, first)
            self._interrupted.armed = True
            home = None if line is None else OtherHome(run, healing, line, Settings.of(generations.config.ring))
            loop = TrainingLoop(run, first, healing, home)
            self._outcome = loop.to_the_end()
            return sha256_of_all(run.saving.newest(), run.layers, run.index.state)
        except Interrupted:
            self._outcome = "interrupted"
            raise
        finally:
            self._interrupted.deaf = True
            self._begun, reached = generations.begun, origin.progress if loop is None else loop.progress
            self._step = reached.step
            if generations.newest is not None:
                self._stop(generations.newest.leader, healing, reached)
            run.saving.close()
            if self._outcome in ("done", "stopped early") or run.saving.step == reached.step:
                self._batches.close()

    def _leave_behind(self, name: str) -> Callable[[Snapshot], None] | None:
        """For the master that is started when this one is killed. None: nodes will not be there any more."""
        if not self._node_pool.outlives_master:
            return None

        def leave(whole: Snapshot) -> None:
            with suppress(OSError):  # no room: then it is the checkpoint
                left_with_nodes.write(self._job.run.path, Left(name, self._ring, whole.progress))

        return leave

    def _taken_up(self, run: Run) -> Snapshot | None:
        """What a killed master of this run left with its nodes, if it is worth more than the checkpoint. What a stream gave
        since then is not kept where the next master finds it."""
        left = self._left
        table = not isinstance(self._job.train, Stream)
        if left is None or left.run != run.index.run or not table or left.progress.step <= run.saving.step:
            return None
        return Snapshot(left.progress)

    def _begin_stream(self, run: Run) -> None:
        batches, progress = self._batches, run.saving.opened.progress
        if self._job.config.training.steps is None and batches.steps_per_epoch is None and batches.once:
            self._watcher.tell("the data is read once: training goes on until it ends, or give steps")
        batches.go_on(progress.step, progress.stream)
        if self._job.model is None and (reason := batches.not_ours) is not None:
            run.record.warn(
                f"{reason}: their order cannot be reproduced, so this run may see different batches than one that never "
                "stopped"
            )

    def _stop(self, leader: Leader, healing: Healing, reached: Progress) -> None:
        record = healing.record
        try:
            if self._outcome == "failed":  # somebody may be dead and never answer
                leader.stop(self._outcome, FAILED_STOP_LIMIT_S)
            else:
                healing.dismiss(leader, reached, self._outcome)
        except Exception as problem:  # a broken link must not hide why the run ended
            record.write(events.Warned(time.monotonic(), f"while stopping: {problem}"))
        record.write(leader.farewell())

    def _tell_of_removed(self, record: Record) -> None:
        """Somebody may have removed what the run itself never reads again."""
        run = self._job.run
        if self._begun and (missing := run.missing()):
            record.warn(
                f"{run.path} lacks {' and '.join(missing)}, removed while the run lasted: it cannot be resumed; "
                "checkpoints written since then load in plain PyTorch"
            )

    def _tell_of_unwritten(self, record: Record) -> None:
        log, file = record.log, self._job.run.events
        self.unwritten = log.unwritten
        if not self.unwritten and (news := log.news()) is not None:
            self._watcher.warn(news)
        if count := len(self.unwritten):
            text = f"{file} lacks the last {count} events, for which there was no room"
            if log.gone:
                text = f"{file} was removed and cannot be written again: its {count} events are in memory alone"
            self.unwritten.append(events.Warned(time.monotonic(), text))
            self._watcher.warn(text)


def _refuse_one_home(job: Job) -> None:
    """Settings of two homes and a way to the other go together; and both go through data that can be read again."""
    local_steps = job.config.ring.local_steps
    if local_steps is None and job.line is not None:
        raise UsageError(
            "--home-listen and --home-join need --local-steps: how many a home makes between two exchanges"
        )
    if local_steps is not None and job.line is None:
        raise UsageError(
            f"--local-steps {local_steps} needs another home: --home-listen ADDRESS in the one, --home-join TOKEN in the other"
        )
    if local_steps is not None and isinstance(job.train, Stream):
        raise UsageError(
            f"--local-steps {local_steps} needs data that can be read again from any step, and {job.train.name} is a stream"
        )
