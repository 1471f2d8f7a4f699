"""All-reduce: every node has the whole model, and every step ends with the same sum of gradients on all of them.

P. Patarasuk, X. Yuan, Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations, 2009 (ring: Baidu, Horovod);
F. Iandola et al., FireCaffe, CVPR 2016 (binomial tree).

    for t in 0, 1, 2, ...      on every worker m
      x <- share m of batch t
      from the last layer down:  g_m <- gradient;  as soon as a bucket of layers is full:  G <- all-reduce(g_m)
      w <- w - rate(t) G                           when every G is there

    ring, n chunks     chunk c starts at worker c; each adds its own and passes it on; after n - 1 hops worker c - 1 has the
                       sum and sends it around: 2 (n - 1) / n of the gradient leave every worker
    tree               sums go up to worker 0 (children m + 1, m + 2, m + 4, ...), the total comes down again

Symbols: n workers, share m = the m-th part of the batch's microbatches. Departures: the optimizer of the run takes the
place of plain descent. A chunk is summed in the order of its journey and the sum is made in one place, so every worker
ends with the same bits; they are not the bits of one process, whose sum runs in the order of microbatches. On a lossy
wire what a node rounds away it adds to its own part of the next step (error feedback), and the total is what its maker
sent, on the maker too. Updates wait for the last sum, so that a worker is always before a step or after it, and workers
are at most one step apart: when one is lost the others have all there is to go on with.
"""

from __future__ import annotations

import torch

from ringtmp.metrics.step_recorder import Recorder
from ringtmp.runtime.clipping import parameter_order, total_norm
from ringtmp.strategies.data_parallel.member import SummingExchange
from ringtmp.strategies.data_parallel.replica import Replica
from ringtmp.strategies.data_parallel.sum_over_workers import Summed, buckets
from ringtmp.wire.messages import Enlist


class Gradients(SummingExchange):
    """Between the layers of a worker and the sums: gradients become buckets, sums become updates."""

    cause = "gradients"

    def __init__(self, plan: Enlist, replica: Replica, recorder: Recorder, start: Summed) -> None:
        self._plan = plan
        self._start = start
        self._replica = replica
        self._recorder = recorder
        self._buckets = buckets(plan.sizes)
        self._bucket_of = {layer: number for number, group in enumerate(self._buckets) for layer in group}
        self.step = self.rounds = plan.step  # updates made; there is a round in every step
        self._own: dict[int, torch.Tensor] = {}
        self._sums = 0

    def ready(self, layer: int, step: int, training: bool) -> bool:
        if self._buckets and self.step < step:
            return False
        if training and layer == 0:
            self._replica.mark(step)
        return True

    def gradient(self, layer: int, step: int, share: float, gradient: torch.Tensor) -> None:
        if layer not in self._bucket_of:
            return
        self._own[layer] = gradient
        number = self._bucket_of[layer]
        group = self._buckets[number]
        if layer == group[-1]:
            parts = [self._own.pop(each) for each in group]
            self._start(step, number, parts[0] if len(parts) == 1 else torch.cat(parts))

    def summed(self, round: int, bucket: int, vector: torch.Tensor) -> None:
        """G of a bucket is there; the last one brings the update."""
        started = self._recorder.begin()
        if self._plan.recipe.clip_norm is not None:
            vector = vector.clone()  # clipping changes it in place, and parts of it may still be on their way out
        start = 0
        for layer in self._buckets[bucket]:
            self._replica.give_gradients(layer, vector[start : start + self._plan.sizes[layer]])
            start += self._plan.sizes[layer]
        self._sums += 1
        if self._sums == len(self._buckets):
            self._sums = 0
            self._update(round)
        self._recorder.end(started, "update", self._buckets[bucket][-1], -1)

    def _update(self, step: int) -> None:
        norm = None
        if self._plan.recipe.clip_norm is not None:
            every = [norms for stage in self._replica.stages for norms in stage.gradient_norms(step)]
            norm = total_norm(every, parameter_order(self._replica.layers))
        for group in self._buckets:
            for layer in group:
                self._replica.stages[layer].step(step, norm)
        self.step = self.rounds = step + 1
