"""Test-then-train: the error on samples the model had not learned from, over time. Pure: steps in, Predicted out."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from ringtmp.metrics.events import StepDone

#: Into how many stretches of equal length a run is divided.
STRETCHES = 10


class Stretch(msgspec.Struct, frozen=True):
    """Steps that follow each other; means are over their samples."""

    last_step: int  # counted from 1
    samples: int
    loss: float
    accuracy: float | None


class Predicted(msgspec.Struct, frozen=True):
    """Every sample counts once, predicted before it was learned."""

    samples: int
    loss: float
    accuracy: float | None
    over_time: tuple[Stretch, ...]  # the last one says how good the model is now


def predicted(steps: Sequence[StepDone]) -> Predicted | None:
    """None where no step was predicted."""
    known = [each for each in steps if each.predicted_loss is not None]
    if not known:
        return None
    whole = _stretch(known)
    return Predicted(whole.samples, whole.loss, whole.accuracy, in_stretches(known, STRETCHES))


def in_stretches(steps: Sequence[StepDone], count: int) -> tuple[Stretch, ...]:
    known = [each for each in steps if each.predicted_loss is not None]
    edges = [len(known) * place // count for place in range(count + 1)]
    return tuple(_stretch(known[a:b]) for a, b in itertools.pairwise(edges) if a < b)


def _stretch(steps: Sequence[StepDone]) -> Stretch:
    samples = sum(each.samples for each in steps)
    loss = sum((each.predicted_loss or 0.0) * each.samples for each in steps) / max(1, samples)
    counted = [each for each in steps if each.predicted_accuracy is not None]
    right = sum((each.predicted_accuracy or 0.0) * each.samples for each in counted)
    of = sum(each.samples for each in counted)
    return Stretch(steps[-1].step + 1, samples, loss, right / of if of else None)
