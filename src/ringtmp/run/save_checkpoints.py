"""A run's checkpoints: when the last was saved, and the next. A full disk costs a checkpoint, not the run.

Training stops while layers are collected and written. Where it may (torchrun's ranks, on file systems that many share), it goes
on while what was written reaches the disk, is read back for its digests and becomes a checkpoint. Until then the newest is the
one before. Nothing is copied for that: what waits for the disk is in the system's page cache.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ringtmp.data.batches import TrainingBatches
from ringtmp.errors import CheckpointError
from ringtmp.metrics.events import CheckpointSaved
from ringtmp.run.record_events import Record
from ringtmp.runtime.checkpoint import Checkpoint, CheckpointWriter, Progress, Stamp, latest
from ringtmp.strategies.base import Leader


@dataclass(frozen=True)
class _UnderWay:
    """A checkpoint on its way to the disk."""

    committed: Future[Path]
    writer: CheckpointWriter
    progress: Progress
    paused_s: float  # of training


class Saving:
    """`step` is that of the newest checkpoint, saved or gone on from; `at` when it was."""

    def __init__(
        self, folder: Path, run: str, batches: TrainingBatches, record: Record, behind: ThreadPoolExecutor | None = None
    ) -> None:
        """`behind`: where a checkpoint goes to the disk while training goes on; None: it waits for each."""
        self._folder = folder
        self._run = run
        self._batches = batches
        self._record = record
        self._behind = behind
        self._under_way: _UnderWay | None = None
        self._sound: set[Stamp] = set()
        self.at = time.monotonic()
        self.opened = self.open()

    def open(self) -> Checkpoint:
        """The newest that is sound: the run goes on from this one."""
        self.settle()
        self.opened, problems = latest(self._folder, self._run)
        self.step, self._newest = self.opened.progress.step, self.opened.folder
        for problem in problems:
            self._record.warn(f"checkpoint {problem}; going back to step {self.step}")
        return self.opened

    def newest(self) -> Checkpoint:
        """The one the run went on from or saved last, and no other. CheckpointError: it is damaged, or was removed."""
        self.settle()
        return Checkpoint(self._newest)

    def begin(self, leader: Leader, progress: Progress) -> bool:
        """Save, and go on as soon as layers may change again. False: there was no room."""
        if self._behind is None:
            return self.save(leader, progress)
        self.settle()
        if self.step == progress.step:
            return True
        progress = msgspec.structs.replace(progress, stream=self._batches.place(progress.step))
        started = time.monotonic()
        try:
            writer = self._filled(leader, progress, behind=True)
        except OSError as error:
            self._lacks(progress, error)
            return False
        self.at = time.monotonic()
        self._under_way = _UnderWay(self._behind.submit(writer.commit), writer, progress, self.at - started)
        return True

    def settle(self, wait: bool = True) -> None:
        """What has reached the disk meanwhile is the newest from here on. Without `wait`: if it has."""
        under_way = self._under_way
        if under_way is None or not (wait or under_way.committed.done()):
            return
        self._under_way, progress = None, under_way.progress
        try:
            self._newest = under_way.committed.result()
        except OSError as error:
            under_way.writer.abandon()
            self._lacks(progress, error)
            return
        self.step = progress.step
        self._batches.forget(self.step)
        self._record.write(CheckpointSaved(time.monotonic(), self.step, under_way.paused_s, under_way.writer.bytes))

    def close(self) -> None:
        """Nothing is on its way to the disk any more."""
        self.settle()
        if self._behind is not None:
            self._behind.shutdown()

    def _lacks(self, progress: Progress, error: OSError) -> None:
        self._record.warn(f"no checkpoint of step {progress.step}: {error.strerror}; the one before is kept")

    def save(self, leader: Leader, progress: Progress, needed: bool = False) -> bool:
        """Whether there is a checkpoint of this very step; unless it is `needed`, a full disk is no reason to end the run."""
        self.settle()
        if self.step == progress.step and not (needed and self._newest_is_lost()):
            return True
        progress = msgspec.structs.replace(progress, stream=self._batches.place(progress.step))
        started = time.monotonic()
        try:
            writer = self._filled(leader, progress)
            self._newest = self._committed(writer)
        except OSError as error:
            if needed:
                raise CheckpointError(
                    f"the checkpoint of step {progress.step} cannot be written: {error.strerror}; the last one kept is of "
                    f"step {self.step}"
                ) from error
            self._lacks(progress, error)
            return False
        self.step, self.at = progress.step, time.monotonic()
        self._batches.forget(self.step)
        self._record.write(CheckpointSaved(self.at, progress.step, self.at - started, writer.bytes))
        return True

    def writer(self, progress: Progress, behind: bool = False) -> CheckpointWriter:
        """Of a checkpoint that somebody else fills, and `take` commits."""
        self.settle()
        return CheckpointWriter(self._folder, self._run, progress, self._sound, behind=behind)

    def take(self, writer: CheckpointWriter, progress: Progress) -> None:
        """From here on the run's newest, in the place of another of the same step."""
        started = time.monotonic()
        try:
            self._newest = self._committed(writer)
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint of step {progress.step} cannot be written: {error.strerror}"
            ) from error
        self.step, self.at = progress.step, time.monotonic()
        self._record.write(CheckpointSaved(self.at, progress.step, self.at - started, writer.bytes))

    def _filled(self, leader: Leader, progress: Progress, behind: bool = False) -> CheckpointWriter:
        writer = self.writer(progress, behind)
        try:
            leader.save(writer)
        except BaseException:
            writer.abandon()
            raise
        return writer

    def _committed(self, writer: CheckpointWriter) -> Path:
        try:
            return writer.commit()
        except BaseException:
            writer.abandon()
            raise

    def _newest_is_lost(self) -> bool:
        try:
            self.newest()
        except CheckpointError:
            return True
        return False
