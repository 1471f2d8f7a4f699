"""What a run is given: what to train, who looks on, who may want it to stop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ringtmp.config import RunConfig
from ringtmp.data.tables_and_streams import Source
from ringtmp.metrics import events
from ringtmp.model.layers import Model
from ringtmp.run.meet_home import Line
from ringtmp.runtime.losses import LossFunction
from ringtmp.runtime.run_directory import RunDirectory


class Watcher:
    """Someone who looks on. Every method is empty: write a subclass with those you want.

    They are called in the master's process, between steps: the ring waits for what takes long. An exception ends the run,
    which can be resumed from its last checkpoint.
    """

    #: It keeps numbers for another tool and shows people nothing: progress is shown as if it were not there.
    only_logs: bool = False

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

    def started(self, run_dir: Path, event: events.RunStarted) -> None:
        """The first step comes next: `event` has the settings (`config`) and `first_step`, which is 0 unless the run was
        resumed."""

    def recovered(self, event: events.Regrouped) -> None:
        """The ring has changed: a node was lost (`lost`), came, left, or layers were moved. Steps from `event.step` on are
        done again where they were done before."""

    def ended(self, event: events.RunEnded) -> None:
        """The last call, also when the run fails: `outcome` is "done", "stopped early", "interrupted" or "failed"; `step`,
        `weights_sha256` and `error` are None where there is none."""


#: Opens the line to the other home, with what the user is to be told of it.
OpenLine = Callable[[Callable[[str], None]], Line]


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
    line: OpenLine | None = None  # None: there is one home

    @property
    def how_to_go_on(self) -> str:
        if self.config.training.data == "given":
            return f"resume with Ring(...).resume({str(self.run.path)!r}, data)"
        return f"resume with ringtmp train --resume {self.run.path}"
