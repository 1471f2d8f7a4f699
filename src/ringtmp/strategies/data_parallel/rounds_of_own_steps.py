"""Rounds: every worker makes steps of its own from where all begin, then the mean of their changes is made known to all.

What a strategy does with that mean is its own (`Merge`). Changes travel, not parameters: a coarse wire rounds little then,
and what it rounds away is part of the next change. All have the same bits at the end of a round, and keep them until the
next: when a worker is lost, the others go on from there and do the steps since again.
"""

from __future__ import annotations

from collections.abc import Sequence
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

    @property
    def tells(self) -> int:
        """How many numbers each worker tells all others at the end of a round."""
        ...

    def ends(self, step: int) -> bool: ...

    def loss(self, value: float) -> None:
        """The mean loss of a step of this worker."""
        ...

    def tell(self) -> Sequence[float]: ...

    def begun(self, step: int, told: Sequence[Sequence[float]]) -> None:
        """The next round begins with this step; what every worker has told, in the order of their ranks."""
        ...


class EverySoManySteps:
    tells = 0

    def __init__(self, tau: int) -> None:
        self._tau = tau

    def ends(self, step: int) -> bool:
        return (step + 1) % self._tau == 0

    def loss(self, value: float) -> None:
        pass

    def tell(self) -> Sequence[float]:
        return ()

    def begun(self, step: int, told: Sequence[Sequence[float]]) -> None:
        pass


def summed_sizes(sizes: Sequence[int], workers: int, length: RoundLength) -> list[int]:
    """Of everything that is summed in a round: the changes of all layers, and what workers tell each other."""
    model = [sum(sizes[layer] for layer in group) for group in buckets(sizes)]
    return [*model, workers * length.tells] if length.tells else model


class Rounds(SummingExchange):
    cause = "means"

    def __init__(
        self, plan: Enlist, replica: Replica, recorder: Recorder, start: Summed,
        *, rank: int, workers: int, merge: Merge, length: RoundLength,
    ) -> None:  # fmt: skip
        self.step = plan.step
        self.rounds = 0
        self._plan = plan
        self._replica = replica
        self._start = start
        self._rank, self._workers = rank, workers
        self._merge = merge
        self._length = length
        self._own = OwnUpdates(plan, replica, recorder)
        self._recorder = recorder
        self._buckets = buckets(plan.sizes)
        self._begun: list[torch.Tensor] = []  # where all began the round; empty before the first step
        self._whole = plan.step  # the step with which the round began
        self._missing = 0
        self._told: list[list[float]] = []
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

    def loss(self, value: float) -> None:
        self._length.loss(value)

    def gradient(self, layer: int, step: int, share: float, gradient: torch.Tensor) -> None:
        if not self._own.take(layer, share, gradient):
            return
        self._own.make(step)
        if not self._length.ends(step) or not self._buckets:
            self.step = step + 1
            return
        told = self._length.tell()
        self._missing, self._ends_with = len(self._buckets) + bool(told), step
        for number, group in enumerate(self._buckets):
            changes = [self._replica.values[each] - self._begun[each] for each in group]
            self._start(self.rounds, number, torch.cat(changes).div_(self._workers))
        if told:  # each in a place of its own, so that the sum is what everyone told
            room = torch.zeros(self._workers, len(told))
            room[self._rank] = torch.tensor(told)
            self._start(self.rounds, len(self._buckets), room.reshape(-1))

    def summed(self, round: int, bucket: int, vector: torch.Tensor) -> None:
        """The mean change of some layers is there; the last one ends the round."""
        started = self._recorder.begin()
        if bucket == len(self._buckets):
            self._told = vector.view(self._workers, -1).tolist()
        else:
            self._take_change(self._buckets[bucket], vector)
        self._missing -= 1
        if not self._missing:
            self._end_round()
        self._recorder.end(started, "update", -1, -1)

    def _take_change(self, group: tuple[int, ...], vector: torch.Tensor) -> None:
        for layer, change in zip(group, torch.split(vector, [self._plan.sizes[each] for each in group]), strict=True):
            self._merge(layer, self._begun[layer], change)
            self._replica.values[layer].copy_(self._begun[layer])

    def _end_round(self) -> None:
        self.rounds += 1
        self.step = self._whole = self._ends_with + 1
        self._replica.keep(self.step)
        self._length.begun(self.step, self._told)


def rounds(rank: int, workers: int, merge: Merge, length: RoundLength) -> MakeExchange:
    def make(plan: Enlist, replica: Replica, recorder: Recorder, start: Summed) -> Rounds:
        return Rounds(plan, replica, recorder, start, rank=rank, workers=workers, merge=merge, length=length)

    return make
