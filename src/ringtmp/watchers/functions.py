"""Functions of the user's as a watcher: `on_step`, `on_epoch`, `on_recovery`, `on_end`."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringtmp.errors import UsageError
from ringtmp.metrics.events import Evaluated, Regrouped, RunEnded, RunStarted, StepDone
from ringtmp.metrics.history import Row, epoch_of, row_of, tested
from ringtmp.run.what_to_train import Watcher


@dataclass(frozen=True)
class Functions:
    """Each may be None. What they get is in docs/api.md."""

    on_step: Callable[[int, float], Any] | None = None
    on_epoch: Callable[[Row], Any] | None = None
    on_recovery: Callable[[Regrouped], Any] | None = None
    on_end: Callable[[RunEnded], Any] | None = None

    def checked(self) -> Functions:
        for name, (takes, example, values) in _TAKES.items():
            _check(name, getattr(self, name), takes, example, values)
        return self

    @property
    def any(self) -> bool:
        return any(getattr(self, name) is not None for name in _TAKES)


_TAKES: dict[str, tuple[str, str, tuple[Any, ...]]] = {
    "on_step": ("the step number and its loss", "lambda step, loss: ...", (1, 0.0)),
    "on_epoch": ("one row of the history", "lambda row: print(row.epoch, row.loss)", (None,)),
    "on_recovery": ("one event", "lambda event: print(event.lost)", (None,)),
    "on_end": ("one event", "lambda event: print(event.outcome)", (None,)),
}


def _check(name: str, function: Any, takes: str, example: str, values: tuple[Any, ...]) -> None:
    if function is None:
        return
    if not callable(function):
        raise UsageError(f"{name} is a {type(function).__name__}: give a function of {takes}, like {example}")
    try:
        inspect.signature(function).bind(*values)
    except TypeError as error:
        raise UsageError(f"{name} must accept {takes}, like {example}; yours does not ({error})") from None
    except ValueError:  # a built-in does not say what it takes
        pass


class Calling(Watcher):
    """Calls them. An epoch is told when its test is done, or without a test when the next one begins or the run ends; one that
    is done again after a loss is told again."""

    def __init__(self, functions: Functions) -> None:
        self._call = functions
        self._steps: list[Row] = []  # of this epoch
        self._began = time.monotonic()

    def started(self, run_dir: Path, event: RunStarted) -> None:
        self._began = time.monotonic()

    def step(self, done: int, total: int | None, event: StepDone, idle: float) -> None:
        if self._steps and self._steps[-1].epoch != event.epoch + 1:
            self._end_epoch()
        self._steps.append(row_of(event, None, time.monotonic() - self._began, 1))
        if self._call.on_step is not None:
            self._call.on_step(done, event.loss)

    def evaluated(self, event: Evaluated) -> None:
        if self._steps:
            self._steps[-1] = tested(self._steps[-1], event)
            self._end_epoch()

    def recovered(self, event: Regrouped) -> None:
        self._steps = [row for row in self._steps if row.step <= event.step]
        if self._call.on_recovery is not None:
            self._call.on_recovery(event)

    def ended(self, event: RunEnded) -> None:
        if self._steps and event.outcome in ("done", "stopped early"):
            self._end_epoch()
        if self._call.on_end is not None:
            self._call.on_end(event)

    def _end_epoch(self) -> None:
        rows, self._steps = self._steps, []
        if self._call.on_epoch is not None:
            self._call.on_epoch(epoch_of(rows))
