"""Which weights are updated in a step: drawn by importance, then thinned until those left disturb each other little. Pure.

    c_j <- |last change of weight j| + eta                                    importance; 1 before its first update
    C   <- U' weights, drawn without replacement, each with a chance proportional to c_j
    S   <- in the order they were drawn, those j for which |cosine(x_j, x_k)| <= rho for every k in S so far

x_j is what weight j is multiplied with, over all samples: the second derivative between two weights of one output is the
product of theirs. Every worker draws the same: chance is a function of the seed and the step.
"""

from __future__ import annotations

import torch


def draw(importance: torch.Tensor, count: int, seed: int, step: int) -> torch.Tensor:
    """Numbers of weights. Each runs for a time of chance at the speed of its importance; the first ones win."""
    chance = torch.Generator().manual_seed(seed * 1_000_003 + step)
    times = -torch.rand(len(importance), generator=chance, dtype=torch.float64).log() / importance
    return times.topk(min(count, len(importance)), largest=False).indices


def independent(cosines: torch.Tensor, most: float) -> list[int]:
    """Places of those that are kept; the first always is."""
    kept: list[int] = []
    for place in range(len(cosines)):
        if not kept or float(cosines[place, kept].abs().max()) <= most:
            kept.append(place)
    return kept


def soft(values: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    """S(v, t): the minimum of (x - v)^2 / 2 + t |x|."""
    return values.sign() * (values.abs() - threshold).clamp(min=0)
