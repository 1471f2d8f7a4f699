"""The minimum of one worker's smooth objective, gradient after gradient: L-BFGS with a line search on slopes.

What is minimised may change between two searches by a linear term, as duals and neighbours' models make it: pairs of steps and
gradient changes are then as true as before and are kept. Near the minimum gradients are mostly rounding, and pairs of them
would lead astray: a pair must show at least the curvature that is known to be there. The answer is never a point in the middle
of a line search. Pure: a gradient in, the next point to be tried out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

PAIRS = 10
#: A step along a direction is good where the slope has fallen to this part of the first.
CURVATURE = 0.5
MOST_TRIALS = 10
FURTHEST = 10.0
#: Below this part of the gradient of the loss, what is left of it and the pull of neighbours is rounding: both are of float32.
NOISE = 1e-6


@dataclass
class _Line:
    """A line search: from `base`, where the gradient is `gradient`, along `direction`; slopes at the nearest points."""

    base: torch.Tensor
    gradient: torch.Tensor
    direction: torch.Tensor
    slope: float
    low: tuple[float, float]
    high: tuple[float, float] | None = None
    trials: int = 0


class Descent:
    def __init__(self, tolerance: float, most: int, curvature: float) -> None:
        """`curvature`: there is at least so much of it everywhere."""
        self._tolerance = tolerance
        self._most = most
        self._curvature = curvature
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._line: _Line | None = None
        self._first = 0.0  # the norm with which this search began
        self._count = 0

    def next(self, point: torch.Tensor, gradient: torch.Tensor, noise: float) -> tuple[torch.Tensor, bool]:
        """A point, and whether it is to be tried; else it is the answer, because it is good enough or there were as many tries
        as there may be. `noise`: how much of the gradient may be rounding."""
        norm = float(gradient.norm())
        if not self._count:
            self._first = norm
        self._count += 1
        line = self._line
        slope = 0.0 if line is None else float(gradient @ line.direction)
        good = line is None or abs(slope) <= CURVATURE * abs(line.slope)
        done = norm <= max(self._tolerance * self._first, noise)
        if line is not None and (good or done):
            self._learn(point - line.base, gradient - line.gradient)
        if done or (self._count >= self._most and good):
            return point, False
        if good or line is None:
            return self._turn(point, gradient), True
        if line.trials >= MOST_TRIALS:  # slopes are rounding here, or pairs mislead
            self._pairs = []
        if line.trials >= MOST_TRIALS or self._count >= self._most:
            return line.base, False
        return self._along(float((point - line.base).norm() / line.direction.norm()), slope), True

    def rest(self) -> None:
        """The search is over; the next one may have another linear term."""
        self._line, self._count = None, 0

    def _learn(self, step: torch.Tensor, change: torch.Tensor) -> None:
        bent = float(step @ change)
        if bent > 1e-10 * float(change @ change) and bent >= 0.5 * self._curvature * float(step @ step):
            self._pairs = [*self._pairs, (step, change)][-PAIRS:]

    def _turn(self, point: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        direction = self._two_loops(gradient)
        slope = float(direction @ gradient)
        if slope >= 0:
            self._pairs, direction, slope = [], -gradient, -float(gradient @ gradient)
        self._line = _Line(point, gradient, direction, slope, (0.0, slope))
        first = 1.0 if self._pairs else min(1.0, 1.0 / max(float(gradient.norm()), 1e-30))
        return self._try(first)

    def _along(self, at: float, slope: float) -> torch.Tensor:
        """Where the straight line through the two nearest slopes is zero."""
        line = self._line
        assert line is not None
        before = line.low
        if slope < 0:
            line.low = (at, slope)
        else:
            line.high = (at, slope)
        if line.high is not None:
            (a, down), (b, up) = line.low, line.high
            edge = 1e-3 * (b - a)
            return self._try(min(max(a - down * (b - a) / (up - down), a + edge), b - edge))
        rise = slope - before[1]
        further = at - slope * (at - before[0]) / rise if rise > 0 else FURTHEST * at
        return self._try(min(further, FURTHEST * at))

    def _try(self, at: float) -> torch.Tensor:
        assert self._line is not None
        self._line.trials += 1
        return self._line.base + at * self._line.direction

    def _two_loops(self, gradient: torch.Tensor) -> torch.Tensor:
        q, kept = gradient.clone(), []
        for s, y in reversed(self._pairs):
            alpha = float(s @ q) / float(s @ y)
            q.sub_(y, alpha=alpha)
            kept.append(alpha)
        if self._pairs:
            s, y = self._pairs[-1]
            q.mul_(float(s @ y) / float(y @ y))
        for (s, y), alpha in zip(self._pairs, reversed(kept), strict=True):
            q.add_(s, alpha=alpha - float(y @ q) / float(s @ y))
        return q.neg_()
