"""What a run is given: what to train, who looks on, who may want it to stop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ringtmp.config import RunConfig
from ringtmp.data.sources import Source
from ringtmp.metrics import events
from ringtmp.model.layers import Model
from ringtmp.ring.losses import LossFunction
from ringtmp.ring.rundir import RunDirectory


class Interruption(Protocol):
    """Whether the user wants to stop. Armed while there is something to save, deaf while the run is being ended."""

    armed: bool
    deaf: bool

    def __call__(self) -> bool: ...


class Watcher(Protocol):
    """Someone who looks on: a progress bar, or nobody."""

    def phase(self, text: str) -> None: ...
    def step(self, done: int, total: int | None, event: events.StepDone, idle: float) -> None: ...
    def evaluated(self, event: events.Evaluated) -> None: ...
    def warn(self, text: str) -> None: ...

    def expect(self, lines: Sequence[str]) -> None:
        """What a plan forecasts."""
        ...

    def tell(self, text: str) -> None: ...


@dataclass(frozen=True)
class Job:
    """What to train, besides the settings."""

    config: RunConfig
    model: Model | None  # None: the layers are in the run directory already
    train: Source
    test: Source | None
    loss: LossFunction
    loss_name: str
    run: RunDirectory
