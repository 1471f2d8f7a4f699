"""A run's numbers for MLflow. Needs mlflow or mlflow-skinny, which comes with the extra `mlflow`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ringtmp.errors import UsageError
from ringtmp.metrics.events import Evaluated, Regrouped, RunEnded, RunStarted, StepDone
from ringtmp.run.what_to_train import Watcher
from ringtmp.watchers.values_to_log import forgiven, step_numbers, test_numbers

#: Numbers are sent together, at most this often: a request per step would make the ring wait.
_EVERY_S = 1.0
#: MLflow takes so many numbers, and settings, in one request.
_MOST_NUMBERS, _MOST_SETTINGS = 1000, 100
_STATUS = {"done": "FINISHED", "stopped early": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}


class MLflowWatcher(Watcher):
    """A run of the experiment `experiment`, named like the run directory: settings as parameters, numbers as metrics by step.

    `tracking_uri`: where MLflow keeps them, otherwise as MLflow itself decides (MLFLOW_TRACKING_URI).
    """

    only_logs = True

    def __init__(self, experiment: str = "ringtmp", tracking_uri: str | None = None) -> None:
        try:
            import mlflow.entities
            from mlflow import MlflowClient
        except ImportError:
            raise UsageError("MLflow is not installed: pip install 'ringtmp[mlflow]'") from None
        self.where, self.failed = f"the MLflow experiment {experiment}", False
        self._experiment = experiment
        self._entities = mlflow.entities
        try:
            self._client: Any = MlflowClient(tracking_uri)
        except Exception as error:  # of its own kinds, and of its stores'
            raise UsageError(f"MLflow does not work here: {' '.join(str(error).split())[:400]}") from error
        self._run = ""
        self._waiting: list[Any] = []
        self._sent = time.monotonic()

    @forgiven
    def started(self, run_dir: Path, event: RunStarted) -> None:
        found = self._client.get_experiment_by_name(self._experiment)
        number = found.experiment_id if found else self._client.create_experiment(self._experiment)
        self._run = self._client.create_run(number, run_name=run_dir.resolve().name).info.run_id
        settings = [self._entities.Param(name, str(value)[:500]) for name, value in _flat(event.config)]
        for first in range(0, len(settings), _MOST_SETTINGS):
            self._client.log_batch(self._run, params=settings[first : first + _MOST_SETTINGS])

    @forgiven
    def step(self, done: int, total: int | None, event: StepDone, idle: float) -> None:
        self._add(step_numbers(event, idle), done)
        if time.monotonic() - self._sent > _EVERY_S:
            self._send()

    @forgiven
    def evaluated(self, event: Evaluated) -> None:
        self._add(test_numbers(event), event.step)
        self._send()

    @forgiven
    def recovered(self, event: Regrouped) -> None:
        self._add({"recovery_seconds": event.seconds}, event.step)

    @forgiven
    def ended(self, event: RunEnded) -> None:
        if not self._run:  # it failed before it began
            return
        self._send()
        for name, value in (("weights_sha256", event.weights_sha256), ("error", event.error)):
            if value is not None:
                self._client.set_tag(self._run, name, value)
        self._client.set_terminated(self._run, _STATUS.get(event.outcome, "FAILED"))

    def _add(self, numbers: Mapping[str, float], step: int) -> None:
        now_ms = int(time.time() * 1000)
        self._waiting += [self._entities.Metric(name, float(value), now_ms, step) for name, value in numbers.items()]

    def _send(self) -> None:
        self._sent = time.monotonic()
        while self._waiting:
            some, self._waiting = self._waiting[:_MOST_NUMBERS], self._waiting[_MOST_NUMBERS:]
            self._client.log_batch(self._run, metrics=some)


def _flat(settings: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """training.lr = 0.1"""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value
