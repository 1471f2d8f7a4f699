"""What a run is given: what to train, who looks on, who may want it to stop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ringtmp.config import RunConfig
from ringtmp.data.sources import Source
from ringtmp.metrics import events
from ringtmp.model.layers import Model
from ringtmp.runtime.losses import LossFunction
from ringtmp.runtime.run_directory import RunDirectory


class Watcher:
    """Someone who looks on. Every method is empty: write a subclass with those you want.

    They are called in the master's process, between steps: the ring waits for what takes long. An exception ends the run,
    which can be resumed from its last checkpoint.
    """

    def phase(self, text: str) -> None:
        """What happens before the first step and between steps: "reading the model", "saving"."""

    def step(self, done: int, total: int | None, event: events.StepDone, idle: float) -> None:
        """A step is done, the `done`-th of `total` (None: until the data ends). `event` has `loss`, `lr`, `epoch` (from 0),
        `samples` and `wall_s`, the seconds it took; `idle` is the share of all nodes' time so far, 0 to 1."""

    def evaluated(self, event: events.Evaluated) -> None:
        """The test part was run through, after `event.step` steps: `loss`, `accuracy` (0 to 1), `bits_per_byte` and
        `perplexity`, each None where it means nothing, `epoch` (from 0), `samples`."""

    def warn(self, text: str) -> None:
        """Something a person should know, in a sentence."""

    def expect(self, lines: Sequence[str]) -> None:
        """What the plan forecasts, line by line."""

    def tell(self, text: str) -> None:
        """News: the line to run on each device, who came, what was lost and healed."""


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

    @property
    def how_to_go_on(self) -> str:
        if self.config.training.data == "given":
            return f"resume with Ring(...).resume({str(self.run.path)!r}, data)"
        return f"resume with ringtmp train --resume {self.run.path}"
