"""Medians with bootstrap intervals. Pure, seeded: the same samples give the same interval.

A case is measured in repeats, a repeat has steps. Its figure is the median over repeats of each repeat's centre: the
median of its steps, their mean, or, of steps that are pairs, the sum of the first over the sum of the second. The
interval draws twice: repeats with replacement, and within each drawn repeat its steps (Davison and Hinkley 1997, section
3.8), so that one slow repeat widens it as much as it should.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np

Centre = Literal["median", "mean", "ratio"]
#: A value; for a ratio, what is above and below the line.
Step = float | tuple[float, float]
#: repeats, each with its steps
Samples = Sequence[Sequence[Step]]

DRAWS = 2000
COVERAGE = 0.95


class Interval(msgspec.Struct, frozen=True):
    middle: float
    low: float
    high: float


def interval(samples: Samples, centre: Centre, seed: int) -> Interval:
    return _interval(middle(samples, centre), _draws(samples, centre, np.random.default_rng([seed, 0])))


def ratio(over: Samples, over_centre: Centre, under: Samples, under_centre: Centre, seed: int) -> Interval:
    """How many times `under` is `over`? Both are drawn independently."""
    drawn = _draws(over, over_centre, np.random.default_rng([seed, 0]))
    drawn /= _draws(under, under_centre, np.random.default_rng([seed, 1]))
    return _interval(middle(over, over_centre) / middle(under, under_centre), drawn)


def _interval(middle: float, drawn: np.ndarray[Any, Any]) -> Interval:
    low, high = np.quantile(drawn, [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
    return Interval(middle, float(low), float(high))


def middle(samples: Samples, centre: Centre) -> float:
    """The figure alone."""
    return float(np.median([_centre(np.asarray([steps], float), centre)[0] for steps in samples]))


def _draws(samples: Samples, centre: Centre, random: np.random.Generator) -> np.ndarray[Any, Any]:
    """DRAWS values of the figure, each from resampled repeats of resampled steps."""
    repeats = [np.asarray(steps, float) for steps in samples]
    slots = []
    for _ in repeats:
        redone = [_centre(steps[random.integers(len(steps), size=(DRAWS, len(steps)))], centre) for steps in repeats]
        slots.append(np.stack(redone)[random.integers(len(repeats), size=DRAWS), np.arange(DRAWS)])
    drawn: np.ndarray[Any, Any] = np.median(np.stack(slots), axis=0)
    return drawn


def _centre(rows: np.ndarray[Any, Any], centre: Centre) -> np.ndarray[Any, Any]:
    if centre == "ratio":
        above, below = rows[..., 0].sum(axis=1), rows[..., 1].sum(axis=1)
        shares: np.ndarray[Any, Any] = np.divide(above, below, out=np.zeros_like(above), where=below > 0)
        return shares
    found: np.ndarray[Any, Any] = np.median(rows, axis=1) if centre == "median" else np.mean(rows, axis=1)
    return found
