"""All-reduce of a model that is cut over the ranks: the library sums gradients and leaves every rank those of its shard.

    before a batch:       all ranks say that they have their share of it     (a sum of ones, while everyone listens)
    layer by layer up:    have it gathered, the next one begun to be; go forward, let go of it
    layer by layer down:  the same; go backward, G of this rank's rows <- sum over ranks     (`sharded_replica.py`)
    at the end:           w <- w - rate(t) G                                 every rank its own rows

Gathering waits for all ranks, and a rank that waits hears nothing. So nobody begins before all have what they need for the
whole batch; from there to its end ranks do the same in the same order, and need no message.
"""

from __future__ import annotations

from typing import Any

import torch

from ringtmp.metrics.step_recorder import Recorder
from ringtmp.runtime.clipping import parameter_order, total_norm
from ringtmp.strategies.allreduce.sharded_replica import ShardedReplica
from ringtmp.strategies.data_parallel.member import SummingExchange
from ringtmp.wire.messages import Enlist


class ShardedGradients(SummingExchange):
    cause = "gradients"

    def __init__(self, plan: Enlist, replica: ShardedReplica, recorder: Recorder, start: Any, count: Any) -> None:
        """`start` begins a sum over all ranks; `count` is told of bytes that the library exchanges, as gathering them does."""
        self._plan = plan
        self._replica = replica
        self._recorder = recorder
        self._start = start
        self._count = count
        self.step = plan.step
        self.rounds = 0  # how often all ranks came together
        self._asked = self._together = self._backward = False
        self._training = False

    def _all_here(self) -> bool:
        """Whether every rank has come as far as this one."""
        if not self._asked:
            self._asked = True
            self._start(self.rounds, 0, torch.ones(1))
        return self._together

    def _part(self) -> None:
        """The next time all must come together again."""
        self._asked = self._together = self._backward = False

    def summed(self, round: int, bucket: int, vector: torch.Tensor) -> None:
        self.rounds = round + 1
        self._together = True

    def ready(self, layer: int, step: int, training: bool) -> bool:
        if layer == 0 and not self._all_here():
            return False
        self._training = training
        self._hold(layer, layer + 1)
        return True

    def again(self, layer: int, step: int) -> bool:
        self._backward = True
        self._hold(layer, layer - 1)
        return True

    def _hold(self, layer: int, following: int) -> None:
        self._replica.hold(layer)
        if 0 <= following < len(self._plan.sizes):
            self._replica.expect(following)
        self._count(4 * self._plan.sizes[layer])

    def used(self, layer: int) -> None:
        last = layer == len(self._plan.sizes) - 1
        if not self._backward and not (last and self._training):  # the last layer goes backward at once
            self._replica.drop(layer)
        if last and not self._training:
            self._part()

    def gradient(self, layer: int, step: int, share: float, gradient: torch.Tensor) -> None:
        self._replica.hand_over(layer)
        self._count(4 * self._plan.sizes[layer])
        if layer == 0:
            self._part()
            self._update(step)

    def _update(self, step: int) -> None:
        started = self._recorder.begin()
        norm = None
        if self._plan.recipe.clip_norm is not None:
            norms = [each.sqrt().float() for each in self._replica.squared_norms(step)]
            norm = total_norm(norms, parameter_order(self._replica.layers))
        for stage in self._replica.stages:
            stage.step(step, norm)
        self.step = step + 1
        self._recorder.end(started, "update", 0, -1)

    def collected(self, layer: int, step: int, whole: bool) -> bool:
        if not self._all_here():
            return False
        self._replica.collect(layer)
        self._part()
        return True
