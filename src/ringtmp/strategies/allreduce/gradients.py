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
    halving            at distance 1, 2, 4, ... each of a pair adds up one half of what it has; then all get all

Symbols: n workers, share m = the m-th part of the batch's microbatches. Departures: the optimizer of the run takes the
place of plain descent. A chunk is summed in the order of its journey and the sum is made in one place, so every worker
ends with the same bits; they are not the bits of one process, whose sum runs in the order of microbatches, but for halving
with a tree of sums (plan/sum_tree.py). On a lossy
wire what a node rounds away it adds to its own part of the next step (error feedback), and the total is what its maker
sent, on the maker too. Updates wait for the last sum, so that a worker is always before a step or after it, and workers
are at most one step apart: when one is lost the others have all there is to go on with.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ringtmp.metrics.step_recorder import Recorder
from ringtmp.plan.sum_tree import SumTree, equal_shares, one_part_each
from ringtmp.runtime.add_along_tree import Slots, flat_sum
from ringtmp.runtime.clipping import parameter_order, total_norm
from ringtmp.runtime.gradient_sums import Sums
from ringtmp.strategies.base import Roles
from ringtmp.strategies.data_parallel import parameter_keys
from ringtmp.strategies.data_parallel.member import MakeAlgorithm, MakeExchange, SummingExchange
from ringtmp.strategies.data_parallel.recursive_halving import HalvingReduce
from ringtmp.strategies.data_parallel.replica import Replica
from ringtmp.strategies.data_parallel.sum_over_workers import Algorithm, Sender, buckets
from ringtmp.wire.messages import Enlist


def bucket_slots(plan: Enlist, group: Sequence[int]) -> Slots:
    """Where the tensors of a bucket's layers lie in its vector; one of all, where nobody asks which got a gradient."""
    found: list[tuple[int, int]] = []
    start = 0
    for layer in group:
        if plan.slots:
            found += parameter_keys.ranges(plan.slots[layer], start)
        start += plan.sizes[layer]
    return found or [(0, start)]


def by_halving(plan: Enlist, roles: Roles, me: int) -> tuple[MakeExchange, MakeAlgorithm]:
    """With a tree of sums workers hold whole parts of it; else each one's share is a part."""
    parts, workers = plan.recipe.sum_tree, roles.workers
    adding = equal_shares(SumTree(parts), len(workers)) if parts > 1 else one_part_each(len(workers))
    nodes = adding.tree.whole(adding.shares[workers.index(me)]) if parts > 1 else ()
    groups = buckets(plan.sizes)
    sizes = [sum(plan.sizes[layer] for layer in group) for group in groups]
    slots = [bucket_slots(plan, group) for group in groups]

    def algorithm(sender: Sender, everyone: Sequence[int], exchange: SummingExchange) -> Algorithm:
        return HalvingReduce(sender, everyone, exchange.summed_in_parts, adding, sizes=sizes, slots=slots)

    return partial(Gradients, nodes=nodes), algorithm


class Gradients(SummingExchange):
    """Between the layers of a worker and the sums: gradients become buckets, sums become updates."""

    cause = "gradients"

    def __init__(
        self, plan: Enlist, replica: Replica, recorder: Recorder, start: Any, nodes: tuple[int, ...] = ()
    ) -> None:
        self._plan = plan
        self._start = start
        self.nodes = nodes
        self._parts: dict[int, list[Sums | None]] = {}
        self._replica = replica
        self._recorder = recorder
        self._buckets = buckets(plan.sizes)
        self._bucket_of = {layer: number for number, group in enumerate(self._buckets) for layer in group}
        self.step = self.rounds = plan.step  # updates made; there is a round in every step
        self._own: dict[int, torch.Tensor] = {}
        self._sums = 0

    def begin(self, fresh: bool) -> None:
        """Every step begins alike."""

    def used(self, layer: int) -> None:
        """Parameters stay where they are."""

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

    def sums(self, layer: int, step: int, share: float, sums: list[Sums | None]) -> None:
        if layer not in self._bucket_of:
            return
        self._parts[layer] = sums
        number = self._bucket_of[layer]
        group = self._buckets[number]
        if layer == group[-1]:
            mine = [self._parts.pop(each) for each in group]
            slots, size = bucket_slots(self._plan, group), sum(self._plan.sizes[each] for each in group)
            self._start(step, number, {
                node: flat_sum([tensor for each in mine for tensor in each[at] or ()], slots, size)
                for at, node in enumerate(self.nodes)
                if mine[0][at] is not None
            })  # fmt: skip

    def summed(self, round: int, bucket: int, vector: torch.Tensor) -> None:
        """G of a bucket is there; the last one brings the update."""
        self.summed_in_parts(round, bucket, vector, ())

    def summed_in_parts(self, round: int, bucket: int, vector: torch.Tensor, there: tuple[bool, ...]) -> None:
        started = self._recorder.begin()
        if self._plan.recipe.clip_norm is not None:
            vector = vector.clone()  # clipping changes it in place, and parts of it may still be on their way out
        start, has = 0, list(there) if self.nodes else []
        for layer in self._buckets[bucket]:
            tensors = len(self._replica.layouts[layer].slots) if has else 0
            self._replica.give_gradients(layer, vector[start : start + self._plan.sizes[layer]], has[:tensors])
            start, has = start + self._plan.sizes[layer], has[tensors:]
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
