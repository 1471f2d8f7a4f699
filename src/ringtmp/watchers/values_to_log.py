"""What every log keeps of a step and of a test, by one set of names, and what becomes of a log that fails."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from ringtmp.errors import UsageError
from ringtmp.metrics.events import Evaluated, StepDone
from ringtmp.untrusted import printable


def step_numbers(event: StepDone, idle: float) -> dict[str, float]:
    """`idle` is the share of all nodes' time so far, `seconds` how long the step took."""
    speed = event.samples / event.wall_s if event.wall_s > 0 else 0.0
    return {
        "loss": event.loss, "rate": event.lr, "samples": event.samples, "seconds": event.wall_s, "samples_per_s": speed,
        "idle": idle,
    }  # fmt: skip


def test_numbers(event: Evaluated) -> dict[str, float]:
    """Those that mean something for this kind of data."""
    found = {
        "test_loss": event.loss, "accuracy": event.accuracy, "bits_per_byte": event.bits_per_byte,
        "perplexity": event.perplexity,
    }  # fmt: skip
    return {name: value for name, value in found.items() if value is not None}


#: Every name the two above use, in the order of a table.
NUMBERS = (
    "loss", "rate", "samples", "seconds", "samples_per_s", "idle", "test_loss", "accuracy", "bits_per_byte", "perplexity",
)  # fmt: skip


class Log(Protocol):
    """`where` names it to people; `failed` is set for good when it takes no more."""

    where: str
    failed: bool


P = ParamSpec("P")
L = TypeVar("L", bound=Log)


def forgiven(method: Callable[Concatenate[L, P], Any]) -> Callable[Concatenate[L, P], None]:
    """A full disk or a server that is gone ends the log, never the run: one line on stderr, and silence."""

    @functools.wraps(method)
    def calls(self: L, /, *args: P.args, **kwargs: P.kwargs) -> None:
        if self.failed:
            return
        try:
            method(self, *args, **kwargs)
        except UsageError:
            raise
        except Exception as error:  # libraries of others raise what they like
            self.failed = True
            problem = printable(" ".join(f"{type(error).__name__}: {error}".split())[:300])
            print(f"warning: {self.where} takes no more: {problem}; training goes on without it", file=sys.stderr)

    return calls
