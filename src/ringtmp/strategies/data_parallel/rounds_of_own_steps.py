"""Rounds: every worker makes steps of its own from where all begin, then the mean of their changes is made known to all.

What a strategy does with that mean is its own (`Merge`). Changes travel, not parameters: a coarse wire rounds little then,
and what it rounds away is part of the next change. All have the same bits at the end of a round, and keep them until the
next: when a worker is lost, the others go on from there and do the steps since again.
"""

from __future__ import annotations

from typing import Protocol

import torch

from ringtmp.metrics.step_recorder import Recorder
from ringtmp.strategies.data_parallel.member import MakeExchange, SummingExchange
from ringtmp.strategies.data_parallel.own_updates import OwnUpdates
from ringtmp.strategies.data_parallel.replica import Replica
from ringtmp.strategies.data_parallel.sum_over_workers import Summed, buckets
from ringtmp.wire.messages import Enlist


class Merge(Protocol):
    """What becomes of the mean change of a round."""

    def __call__(self, layer: int, begun: torch.Tensor, change: torch.Tensor) -> None:
        """Move `begun`, where all of them began the round, to where all of them begin the next one."""
        ...


class RoundLength(Protocol):
    """Whether a round ends with a step."""

    def ends(self, step: int) -> bool: ...

    def begun(self, step: int) -> None:
        """The next round begins with this step."""
        ...


class EverySoManySteps:
    def __init__(self, tau: int) -> None:
        self._tau = tau

    def ends(self, step: int) -> bool:
        return (step + 1) % self._tau == 0

    def begun(self, step: int) -> None:
        pass


class Rounds(SummingExchange):
    cause = "means"

    def __init__(
        self, plan: Enlist, replica: Replica, recorder: Recorder, start: Summed,
        *, workers: int, merge: Merge, length: RoundLength,
    ) -> None:  # fmt: skip
        self.step = plan.step
        self.rounds = 0
        self._plan = plan
        self._replica = replica
        self._start = start
        self._workers = workers
        self._merge = merge
        self._length = length
        self._own = OwnUpdates(plan, replica, recorder)
        self._recorder = recorder
        self._buckets = buckets(plan.sizes)
        self._begun: list[torch.Tensor] = []  # where all began the round; empty before the first step
        self._whole = plan.step  # the step with which the round began
        self._missing = 0
        self._ends_with = plan.step

    def whole(self) -> int:
        return self._whole

    def ready(self, layer: int, step: int, training: bool) -> bool:
        if self.step < step:
            return False
        if training and not self._begun:
            self._begun = [values.clone() for values in self._replica.values]
            self._replica.keep(step)
        return True

    def gradient(self, layer: int, step: int, share: float, gradient: torch.Tensor) -> None:
        if not self._own.take(layer, share, gradient):
            return
        self._own.make(step)
        if not self._length.ends(step) or not self._buckets:
            self.step = step + 1
            return
        self._missing, self._ends_with = len(self._buckets), step
        for number, group in enumerate(self._buckets):
            changes = [self._replica.values[each] - self._begun[each] for each in group]
            self._start(self.rounds, number, torch.cat(changes).div_(self._workers))

    def summed(self, round: int, bucket: int, vector: torch.Tensor) -> None:
        """The mean change of some layers is there; the last one ends the round."""
        started = self._recorder.begin()
        group = self._buckets[bucket]
        for layer, change in zip(group, torch.split(vector, [self._plan.sizes[each] for each in group]), strict=True):
            self._merge(layer, self._begun[layer], change)
            self._replica.values[layer].copy_(self._begun[layer])
        self._missing -= 1
        if not self._missing:
            self._end_round()
        self._recorder.end(started, "update", group[-1], -1)

    def _end_round(self) -> None:
        self.rounds += 1
        self.step = self._whole = self._ends_with + 1
        self._replica.keep(self.step)
        self._length.begun(self.step)


def rounds(workers: int, merge: Merge, length: RoundLength) -> MakeExchange:
    def make(plan: Enlist, replica: Replica, recorder: Recorder, start: Summed) -> Rounds:
        return Rounds(plan, replica, recorder, start, workers=workers, merge=merge, length=length)

    return make
