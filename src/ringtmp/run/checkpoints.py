"""A run's checkpoints: when the last was saved, and the next. A full disk costs a checkpoint, not the run."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from ringtmp.errors import CheckpointError
from ringtmp.metrics.events import CheckpointSaved
from ringtmp.runtime.checkpoint import Checkpoint, CheckpointWriter, Progress, Stamp
from ringtmp.strategies.base import Leader


class Saving:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._run = ""
        self._newest: Path | None = None
        self._sound: set[Stamp] = set()
        self.step = -1
        self.at = time.monotonic()

    def opened(self, checkpoint: Checkpoint) -> None:
        """The run goes on from this one."""
        self._run, self.step, self._newest = checkpoint.manifest.run, checkpoint.progress.step, checkpoint.folder

    def newest(self) -> Checkpoint:
        """The one the run went on from or saved last, and no other. CheckpointError: it is damaged, or was removed."""
        assert self._newest is not None, "a run opens a checkpoint first"
        return Checkpoint(self._newest)

    def save(
        self, leader: Leader, progress: Progress, needed: bool, warn: Callable[[str], None]
    ) -> CheckpointSaved | None:
        """None if there was nothing to save, or no room for it."""
        if self.step == progress.step and not (needed and self._newest_is_lost()):
            return None
        started = time.monotonic()
        writer = None
        try:
            writer = CheckpointWriter(self._folder, self._run, progress, self._sound)
            leader.save(writer)
            self._newest = writer.commit()
        except OSError as error:
            if writer is not None:
                writer.abandon()
            if needed:
                raise CheckpointError(
                    f"the checkpoint of step {progress.step} cannot be written: {error.strerror}; the last one kept is of "
                    f"step {self.step}"
                ) from error
            warn(f"no checkpoint of step {progress.step}: {error.strerror}; the one before is kept")
            return None
        except BaseException:
            if writer is not None:
                writer.abandon()
            raise
        self.step, self.at = progress.step, time.monotonic()
        return CheckpointSaved(self.at, progress.step, self.at - started, writer.bytes)

    def _newest_is_lost(self) -> bool:
        try:
            self.newest()
        except CheckpointError:
            return True
        return False
