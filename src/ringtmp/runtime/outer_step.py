"""The outer step of two homes: their mean change of a round, as the gradient of an optimizer over rounds.

A. Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models, 2023, algorithm 1.

    every home i:  w_i <- N steps of its own optimizer from theta, on its own data
    g     <- theta - mean over i of w_i                     symbol   here
    v     <- mu v + g                                       N        local_steps      v     velocity
    theta <- theta - eta (g + mu v)                         eta      outer_lr         mu    outer_momentum

The last line is computed as `mean + (g - eta (g + mu v))`, which is the same number with one rounding less to suffer from:
with eta = 1 and mu = 0 it is the mean, to the bit. Every operation is rounded by itself (no fused multiply and add), so homes
with unlike processors end in the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Outer(NamedTuple):
    lr: float
    momentum: float


def mean_of(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """In the order of homes."""
    return first.add(second).mul(0.5)


def outer_step(
    begun: torch.Tensor, mean: torch.Tensor, velocity: torch.Tensor, outer: Outer
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights the next round begins with, and the velocity then."""
    change = begun.sub(mean)
    velocity = velocity.mul(outer.momentum).add(change)
    update = velocity.mul(outer.momentum).add(change).mul(outer.lr)
    return mean.add(change.sub(update)), velocity
