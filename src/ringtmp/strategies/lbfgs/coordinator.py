"""What the coordinator of an L-BFGS decides from inner products alone: how far to go along a direction, and where next.

Every vector is written in a basis of 2 k + 3 vectors, k pairs being kept:

    s_1 .. s_k   steps that were made          g_0   the gradient where the direction begins
    y_1 .. y_k   the changes of the gradient   g     the gradient at the point that is tried
                                               d     the direction

`gram` has the inner product of any two of them, so the two loops of Nocedal (1980) run on 2 k + 3 numbers (W. Chen et al.,
Large-scale L-BFGS using MapReduce, NIPS 2014). The line search looks for a slope g d near zero by the secant rule, which is
exact after one trial where the objective is quadratic. Pure: float64 in, a decision out; every worker comes to the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

#: Points tried along one direction before it is left as it is.
MOST_TRIALS = 20
#: How much further the next trial may be.
FURTHEST = 100.0


@dataclass(frozen=True)
class Search:
    """A line search under way: points along the direction as (distance, slope)."""

    at: float  # the distance that is being tried
    low: tuple[float, float]  # the furthest point that still goes down
    high: tuple[float, float] | None = None  # the nearest that goes up
    trials: int = 1


@dataclass(frozen=True)
class Further:
    """Try another point along the same direction."""

    search: Search


@dataclass(frozen=True)
class Turn:
    """The point is good: go on from it along a new direction, `coefficients` of the basis."""

    coefficients: torch.Tensor
    search: Search
    keep: bool  # the step and the change of the gradient are a pair worth keeping
    forget: bool  # the pairs so far mislead


def first(gram: torch.Tensor, length: float = 1.0) -> Turn:
    """Nothing is known but the gradient: go down, by a step of this length."""
    g = _unit(gram, _G)
    slope = -float(g @ gram @ g)
    return Turn(-g, _begun(slope, length / math.sqrt(max(-slope, 1e-30))), keep=False, forget=False)


def decide(gram: torch.Tensor, search: Search, curvature: float) -> Further | Turn:
    g0, g, d = (_unit(gram, at) for at in (_G0, _G, _D))
    slope0, slope = float(g0 @ gram @ d), float(g @ gram @ d)
    if abs(slope) > curvature * abs(slope0) and search.trials < MOST_TRIALS:
        return Further(_next(search, slope))
    pairs = [(_unit(gram, at), _unit(gram, at + _pairs(gram))) for at in range(_pairs(gram))]
    step, change = search.at * d, g - g0
    good = float(step @ gram @ change) > 1e-10 * float(change @ gram @ change)
    direction = two_loops(gram, [*pairs, (step, change)] if good else pairs, g)
    down = float(direction @ gram @ g)
    if down >= 0 or not math.isfinite(down):
        turn = first(gram, search.at * math.sqrt(float(d @ gram @ d)))  # no further than the last time
        return Turn(turn.coefficients, turn.search, keep=False, forget=True)
    return Turn(direction, _begun(down, 1.0), keep=good, forget=False)


def two_loops(
    gram: torch.Tensor, pairs: list[tuple[torch.Tensor, torch.Tensor]], gradient: torch.Tensor
) -> torch.Tensor:
    """-H g, where H is what the pairs know of the inverse of the second derivative."""
    q, kept = gradient.clone(), []
    for s, y in reversed(pairs):
        rho = 1 / float(s @ gram @ y)
        alpha = rho * float(s @ gram @ q)
        q = q - alpha * y
        kept.append((alpha, rho))
    if pairs:
        s, y = pairs[-1]
        q = q * (float(s @ gram @ y) / float(y @ gram @ y))
    for (s, y), (alpha, rho) in zip(pairs, reversed(kept), strict=True):
        q = q + (alpha - rho * float(y @ gram @ q)) * s
    return -q


#: Places in the basis, from its end.
_G0, _G, _D = -3, -2, -1


def _unit(gram: torch.Tensor, at: int) -> torch.Tensor:
    found = torch.zeros(len(gram), dtype=torch.float64)
    found[at] = 1.0
    return found


def _pairs(gram: torch.Tensor) -> int:
    return (len(gram) - 3) // 2


def _begun(slope: float, at: float) -> Search:
    return Search(at, low=(0.0, slope))


def _next(search: Search, slope: float) -> Search:
    """The zero of the straight line through the two nearest slopes."""
    here = (search.at, slope)
    if slope < 0:
        before, low, high = search.low, here, search.high
    else:
        before, low, high = search.low, search.low, here
    if high is not None:
        (a, down), (b, up) = low, high
        at = a - down * (b - a) / (up - down)
        edge = 1e-3 * (b - a)
        at = min(max(at, a + edge), b - edge)
    else:
        rise = slope - before[1]
        at = search.at - slope * (search.at - before[0]) / rise if rise > 0 else math.inf
        at = min(at, FURTHEST * search.at)
    return Search(at, low, high, search.trials + 1)
