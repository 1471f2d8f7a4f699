"""A run's checkpoints: when the last was saved, and the next. A full disk costs a checkpoint, not the run."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from ringtmp.data.batches import TrainingBatches
from ringtmp.errors import CheckpointError
from ringtmp.metrics.events import CheckpointSaved
from ringtmp.run.record_events import Record
from ringtmp.runtime.checkpoint import Checkpoint, CheckpointWriter, Progress, Stamp, latest
from ringtmp.strategies.base import Leader


class Saving:
    """`step` is that of the newest checkpoint, saved or gone on from; `at` when it was."""

    def __init__(self, folder: Path, run: str, batches: TrainingBatches, record: Record) -> None:
        self._folder = folder
        self._run = run
        self._batches = batches
        self._record = record
        self._sound: set[Stamp] = set()
        self.at = time.monotonic()
        self.opened = self.open()

    def open(self) -> Checkpoint:
        """The newest that is sound: the run goes on from this one."""
        self.opened, problems = latest(self._folder, self._run)
        self.step, self._newest = self.opened.progress.step, self.opened.folder
        for problem in problems:
            self._record.warn(f"checkpoint {problem}; going back to step {self.step}")
        return self.opened

    def newest(self) -> Checkpoint:
        """The one the run went on from or saved last, and no other. CheckpointError: it is damaged, or was removed."""
        return Checkpoint(self._newest)

    def save(self, leader: Leader, progress: Progress, needed: bool = False) -> bool:
        """Whether there is a checkpoint of this very step; unless it is `needed`, a full disk is no reason to end the run."""
        if self.step == progress.step and not (needed and self._newest_is_lost()):
            return True
        progress = msgspec.structs.replace(progress, stream=self._batches.place(progress.step))
        started = time.monotonic()
        try:
            size = self._write(leader, progress)
        except OSError as error:
            if needed:
                raise CheckpointError(
                    f"the checkpoint of step {progress.step} cannot be written: {error.strerror}; the last one kept is of "
                    f"step {self.step}"
                ) from error
            self._record.warn(f"no checkpoint of step {progress.step}: {error.strerror}; the one before is kept")
            return False
        self.step, self.at = progress.step, time.monotonic()
        self._batches.forget(self.step)
        self._record.write(CheckpointSaved(self.at, progress.step, self.at - started, size))
        return True

    def writer(self, progress: Progress) -> CheckpointWriter:
        """Of a checkpoint that somebody else fills, and `take` commits."""
        return CheckpointWriter(self._folder, self._run, progress, self._sound)

    def take(self, writer: CheckpointWriter, progress: Progress) -> None:
        """From here on the run's newest, in the place of another of the same step."""
        started = time.monotonic()
        try:
            self._newest = writer.commit()
        except OSError as error:
            writer.abandon()
            raise CheckpointError(
                f"the checkpoint of step {progress.step} cannot be written: {error.strerror}"
            ) from error
        self.step, self.at = progress.step, time.monotonic()
        self._record.write(CheckpointSaved(self.at, progress.step, self.at - started, writer.bytes))

    def _write(self, leader: Leader, progress: Progress) -> int:
        """Returns its bytes."""
        writer = self.writer(progress)
        try:
            leader.save(writer)
            self._newest = writer.commit()
        except BaseException:
            writer.abandon()
            raise
        return writer.bytes

    def _newest_is_lost(self) -> bool:
        try:
            self.newest()
        except CheckpointError:
            return True
        return False
