"""A run's numbers for TensorBoard. Needs the package tensorboard, which comes with the extra of that name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ringtmp.errors import UsageError
from ringtmp.metrics.events import Evaluated, Regrouped, RunEnded, RunStarted, StepDone
from ringtmp.run.what_to_train import Watcher
from ringtmp.watchers.values_to_log import forgiven, step_numbers, test_numbers


class TensorBoardWatcher(Watcher):
    """Scalars `train/loss`, `train/rate`, …, `test/loss`, `test/accuracy`, …, by steps from 1; settings and recoveries as text.

    Each run has a folder of its own under `log_dir`, named like its run directory, so that TensorBoard shows runs side by side.
    Steps that are done again, after a loss or a resumption, take the place of those before.
    """

    only_logs = True

    def __init__(self, log_dir: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UsageError("TensorBoard's package is not installed: pip install 'ringtmp[tensorboard]'") from None
        self.where, self.failed = f"the TensorBoard log in {log_dir}", False
        self._make = SummaryWriter
        self._folder = Path(log_dir)
        self._writer: Any = None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot write {log_dir}: {error.strerror}") from error

    @forgiven
    def started(self, run_dir: Path, event: RunStarted) -> None:
        self._folder = self._folder / run_dir.resolve().name
        self._open(event.first_step)
        self._writer.add_text("settings", f"```\n{json.dumps(event.config, indent=2)}\n```", event.first_step)

    @forgiven
    def step(self, done: int, total: int | None, event: StepDone, idle: float) -> None:
        self._scalars("train", step_numbers(event, idle), done)

    @forgiven
    def evaluated(self, event: Evaluated) -> None:
        self._scalars("test", test_numbers(event), event.step)
        self._writer.flush()

    @forgiven
    def recovered(self, event: Regrouped) -> None:
        self._writer.close()
        self._open(event.step)
        self._writer.add_text("recoveries", event.reason, event.step)

    @forgiven
    def ended(self, event: RunEnded) -> None:
        if self._writer is not None:  # it may have failed before it began
            self._writer.add_text("end", event.error or event.outcome, event.step)
            self._writer.close()

    def _open(self, step: int) -> None:
        # What has a step from here on comes again: TensorBoard then forgets what it had.
        self._writer = self._make(str(self._folder), purge_step=step + 1 if step else None)

    def _scalars(self, group: str, numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(f"{group}/{name.removeprefix('test_')}", value, step)
