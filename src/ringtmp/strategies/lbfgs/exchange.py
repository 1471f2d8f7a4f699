"""L-BFGS on a worker: the gradient of the whole data is summed, and each worker keeps a shard of what the direction needs.

J. Dean et al., Large Scale Distributed Deep Networks, NIPS 2012 (Sandblaster L-BFGS); J. Nocedal, Updating Quasi-Newton
Matrices with Limited Storage, 1980; W. Chen et al., Large-scale L-BFGS using MapReduce, NIPS 2014.

    in every step, on worker r of n                                       what travels
      g <- sum over workers of the gradient of a share of the data        P values, all-reduce
      inner products of s, y, g_0, g, d over shard r; their sum over r    2 n (2 m + 3)^2 values, all-reduce
      the coordinator: another point along d, or a new direction d        nothing: everyone decides the same
      w <- w_0 + distance * d, over shard r; put together                 P values, all-reduce with zeros elsewhere

Symbols: m pairs kept, P parameters. A step is one evaluation of the gradient; an iteration takes one or more of them.

Departures. Sandblaster's coordinator is a process of its own that tells parameter servers what to multiply and add; here the
same scalar arithmetic runs on every worker (`coordinator.py`), with the same bits, so nobody waits for a message from it. The
paper balances load by handing out small pieces of the data; here shares are equal. The line search looks at slopes only. A
resumed run, and one that has lost a worker, goes on from the saved parameters with an empty history.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ringtmp.metrics.step_recorder import Recorder
from ringtmp.strategies.data_parallel.member import SummingExchange
from ringtmp.strategies.data_parallel.replica import Replica
from ringtmp.strategies.data_parallel.sum_over_workers import Summed, buckets
from ringtmp.strategies.lbfgs import LbfgsSettings
from ringtmp.strategies.lbfgs.coordinator import Further, Search, Turn, decide, first
from ringtmp.wire.messages import Enlist


def bucket_sizes(sizes: Sequence[int], products: int) -> list[int]:
    """Of everything that is summed in a step: gradients, inner products, parameters."""
    model = [sum(sizes[layer] for layer in group) for group in buckets(sizes)]
    return [*model, products, *model]


class Descent(SummingExchange):
    cause = "gradients"

    def __init__(
        self, plan: Enlist, replica: Replica, recorder: Recorder, start: Summed,
        *, settings: LbfgsSettings, rank: int, workers: int,
    ) -> None:  # fmt: skip
        self.step = self.rounds = plan.step
        self._plan = plan
        self._replica = replica
        self._recorder = recorder
        self._start = start
        self._settings = settings
        self._rank, self._workers = rank, workers
        self._buckets = buckets(plan.sizes)
        self._bucket_of = {layer: number for number, group in enumerate(self._buckets) for layer in group}
        size = sum(plan.sizes)
        self._first, self._stop = size * rank // workers, size * (rank + 1) // workers
        self._own: dict[int, torch.Tensor] = {}
        self._sums: dict[int, torch.Tensor] = {}
        # Shards, as everything below: pairs, the point a direction begins at, its gradient, the direction.
        self._steps: list[torch.Tensor] = []
        self._changes: list[torch.Tensor] = []
        self._base = self._base_gradient = self._direction = torch.zeros(0)
        self._gradient = torch.zeros(0)
        self._search: Search | None = None

    def ready(self, layer: int, step: int, training: bool) -> bool:
        return self.step >= step

    def gradient(self, layer: int, step: int, share: float, gradient: torch.Tensor) -> None:
        if layer not in self._bucket_of:
            return
        self._own[layer] = gradient
        number = self._bucket_of[layer]
        if layer == self._buckets[number][-1]:
            self._start(step, number, torch.cat([self._own.pop(each) for each in self._buckets[number]]))

    def summed(self, round: int, bucket: int, vector: torch.Tensor) -> None:
        started = self._recorder.begin()
        count = len(self._buckets)
        if bucket == count:
            self._move(round, vector)
        else:
            self._sums[bucket % (count + 1)] = vector
            if len(self._sums) == count:
                whole = torch.cat([self._sums.pop(each) for each in range(count)])
                if bucket < count:
                    self._multiply(round, whole)
                else:
                    self._arrive(round, whole)
        self._recorder.end(started, "update", -1, -1)

    # -- the three parts of a step ------------------------------------------------------------------------------------

    def _multiply(self, step: int, gradient: torch.Tensor) -> None:
        """Inner products over this shard; each in two float32, so that nothing is lost on the way."""
        self._gradient = gradient[self._first : self._stop].clone()
        basis = torch.stack(self._basis()).double()
        found = (basis @ basis.T).reshape(-1)
        room = torch.zeros(self._workers, 2, self._settings.products(self._workers) // (2 * self._workers))
        room[self._rank, 0, : len(found)] = found.float()
        room[self._rank, 1, : len(found)] = (found - found.float().double()).float()
        self._start(step, len(self._buckets), room.reshape(-1))

    def _basis(self) -> list[torch.Tensor]:
        zero = torch.zeros_like(self._gradient)
        known = self._search is not None
        first_three = (self._base_gradient if known else zero, self._gradient, self._direction if known else zero)
        return [*self._steps, *self._changes, *first_three]

    def _move(self, step: int, products: torch.Tensor) -> None:
        width = 2 * len(self._steps) + 3
        parts = products.view(self._workers, 2, -1)[:, :, : width * width].double()
        gram = torch.zeros(width * width, dtype=torch.float64)
        for rank in range(self._workers):  # in one order, on everyone
            gram += parts[rank, 0] + parts[rank, 1]
        gram = gram.view(width, width)
        decision: Further | Turn
        if self._search is None:
            self._base = self._values()[self._first : self._stop].clone()
            decision = first(gram)
        else:
            decision = decide(gram, self._search, self._settings.curvature)
        if isinstance(decision, Turn):
            self._turn(decision)
        self._search = decision.search
        point = self._base + self._search.at * self._direction
        start = 0
        for number, group in enumerate(self._buckets):
            size = sum(self._plan.sizes[layer] for layer in group)
            vector = torch.zeros(size)
            low, high = max(self._first, start), min(self._stop, start + size)
            if low < high:
                vector[low - start : high - start] = point[low - self._first : high - self._first]
            start += size
            self._start(step, len(self._buckets) + 1 + number, vector)

    def _turn(self, turn: Turn) -> None:
        basis = torch.stack(self._basis()).double()
        direction = (turn.coefficients @ basis).float()
        if self._search is not None:
            moved = self._search.at * self._direction
            self._base = self._base + moved
            if turn.forget:
                self._steps, self._changes = [], []
            elif turn.keep:
                keep = self._settings.memory
                self._steps = [*self._steps, moved][-keep:]
                self._changes = [*self._changes, self._gradient - self._base_gradient][-keep:]
        self._base_gradient, self._direction = self._gradient, direction

    def _arrive(self, step: int, values: torch.Tensor) -> None:
        start = 0
        for layer in self._order():
            size = self._plan.sizes[layer]
            self._replica.values[layer].copy_(values[start : start + size])
            start += size
        self.step = self.rounds = step + 1

    def _order(self) -> list[int]:
        return [layer for group in self._buckets for layer in group]

    def _values(self) -> torch.Tensor:
        return torch.cat([self._replica.values[layer] for layer in self._order()])
