"""How a run went, step by step and epoch by epoch, over all its parts. Pure: parts in, History out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from ringtmp.errors import UsageError
from ringtmp.metrics.events import Evaluated, StepDone
from ringtmp.metrics.fold_events import Part
from ringtmp.units import rows_text, seconds_text

#: Of more epochs than this, `str` shows the first and the last.
_MOST_ROWS = 10
_FIRST_ROWS = 3


@dataclass(frozen=True)
class Row:
    """A step, or an epoch. `step` and `epoch` count from 1: so many are done."""

    step: int
    epoch: int
    loss: float  # on the training data: of the step, or the mean over the epoch's samples
    test_loss: float | None  # after it; None where there was no test
    accuracy: float | None  # on the test part, 0 to 1
    bits_per_byte: float | None
    perplexity: float | None
    rate: float  # learning rate of the (last) step
    samples: int
    seconds: float  # in training steps
    at_s: float  # since the run first began, without the time between its parts
    part: int  # 1, and one more with every time the run was resumed


@dataclass(frozen=True)
class History:
    """Steps that were done again, after a loss or a resumption, are here once."""

    steps: tuple[Row, ...]
    epochs: tuple[Row, ...]

    def columns(self, of: Literal["steps", "epochs"] = "steps") -> dict[str, list[Any]]:
        """Column by column, as `pandas.DataFrame` and plots take it: {"step": [1, 2, …], "loss": […], …}."""
        if of not in ("steps", "epochs"):
            raise UsageError(f"the history has columns of steps and of epochs, not of {of!r}")
        rows = self.steps if of == "steps" else self.epochs
        return {each.name: [getattr(row, each.name) for row in rows] for each in fields(Row)}

    def __str__(self) -> str:
        return "\n".join(rows_text(_TITLES, [_cells(each) for each in self.epochs], _MOST_ROWS, _FIRST_ROWS))


_TITLES = ("epoch", "step", "loss", "test loss", "accuracy", "rate", "time")


def history_of(parts: Sequence[Part]) -> History:
    tests = {each.step: each for part in parts for each in part.evaluations}
    steps = [
        row_of(each, tests.get(each.step + 1), part.run_s(each.at), number)
        for number, part in enumerate(parts, start=1)
        for each in part.steps
    ]
    epochs: list[Row] = []
    first = 0
    for place, row in enumerate(steps):
        if place + 1 == len(steps) or steps[place + 1].epoch != row.epoch:
            epochs.append(epoch_of(steps[first : place + 1]))
            first = place + 1
    return History(tuple(steps), tuple(epochs))


def row_of(step: StepDone, test: Evaluated | None, at_s: float, part: int) -> Row:
    row = Row(
        step=step.step + 1, epoch=step.epoch + 1, loss=step.loss, test_loss=None, accuracy=None, bits_per_byte=None,
        perplexity=None, rate=step.lr, samples=step.samples, seconds=step.wall_s, at_s=at_s, part=part,
    )  # fmt: skip
    return row if test is None else tested(row, test)


def tested(row: Row, test: Evaluated) -> Row:
    """The same step, with what a test after it gave."""
    return replace(
        row, test_loss=test.loss, accuracy=test.accuracy, bits_per_byte=test.bits_per_byte, perplexity=test.perplexity
    )


def epoch_of(rows: Sequence[Row]) -> Row:
    """The test is the epoch's last, which may not be that of its last step."""
    last = rows[-1]
    test = next((each for each in reversed(rows) if each.test_loss is not None), last)
    samples = sum(each.samples for each in rows)
    loss = sum(each.loss * each.samples for each in rows) / samples if samples else last.loss
    return Row(
        step=last.step, epoch=last.epoch, loss=loss, test_loss=test.test_loss, accuracy=test.accuracy,
        bits_per_byte=test.bits_per_byte, perplexity=test.perplexity, rate=last.rate, samples=samples,
        seconds=sum(each.seconds for each in rows), at_s=last.at_s, part=last.part,
    )  # fmt: skip


def _cells(row: Row) -> tuple[str, ...]:
    accuracy = "" if row.accuracy is None else f"{row.accuracy:.1%}"
    if row.bits_per_byte is not None:
        accuracy = f"{row.bits_per_byte:.3f} bits/byte"
    test = "" if row.test_loss is None else f"{row.test_loss:.4f}"
    return (
        str(row.epoch), str(row.step), f"{row.loss:.4f}", test, accuracy, f"{row.rate:.3g}", seconds_text(row.seconds),
    )  # fmt: skip
