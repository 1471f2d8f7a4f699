"""A run's checkpoints: when the last was saved, and the next. A full disk costs a checkpoint, not the run."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from ringtmp.errors import CheckpointError
from ringtmp.metrics.events import CheckpointSaved
from ringtmp.ring.checkpoint import CheckpointWriter, Progress
from ringtmp.strategies.brief import Leader


class Saving:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._run = ""
        self.step = -1
        self.at = time.monotonic()

    def opened(self, run: str, step: int) -> None:
        """The run goes on from this checkpoint."""
        self._run, self.step = run, step

    def save(
        self, leader: Leader, progress: Progress, needed: bool, warn: Callable[[str], None]
    ) -> CheckpointSaved | None:
        """None if there was nothing to save, or no room for it."""
        if self.step == progress.step:
            return None
        started = time.monotonic()
        writer = None
        try:
            writer = CheckpointWriter(self._folder, self._run, progress)
            leader.save(writer)
            writer.commit()
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
