"""All-reduce as the library makes it: buckets of gradients go to torch.distributed, as in DistributedDataParallel.

S. Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020.

    from the last layer down:  as soon as a bucket of gradients is full, its all-reduce begins; the rank goes on computing
    when every sum is there:   w <- w - rate(t) G

Departures: the buckets are those of the other algorithms (256 KiB and more, DDP 25 MiB), because ranks here are small; and what
computes, deals, updates and saves stays ours, so that settings, order of data, events and checkpoints are those of every run. A
sum has its own order on every number of ranks; all ranks get the same bits, and the same again in another run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ringtmp.errors import ProtocolError, UsageError
from ringtmp.metrics.step_recorder import Recorder
from ringtmp.runtime.mailbox import Endpoint, Mail
from ringtmp.strategies.allreduce.gradients import Gradients
from ringtmp.strategies.base import Roles
from ringtmp.strategies.data_parallel.member import SummingExchange, WorkerMember
from ringtmp.strategies.data_parallel.replica import Replica
from ringtmp.strategies.data_parallel.sum_over_workers import Algorithm, Sender, Summed
from ringtmp.transport.sums_together import SumsTogether
from ringtmp.wire.messages import Enlist, GradientPart

NEEDED = (
    "allreduce:torch lets torch.distributed make the sums, and it has not started these nodes: start the run with torchrun, or "
    "use --strategy allreduce"
)


class SumsByTorch:
    def __init__(self, endpoint: Endpoint, sums: SumsTogether, recorder: Recorder, finished: Summed) -> None:
        self._endpoint = endpoint
        self._sums = sums
        self._recorder = recorder
        self._finished = finished

    def start(self, step: int, bucket: int, vector: torch.Tensor) -> None:
        self.count(2 * vector.nbytes)
        self._sums.start((step, bucket), vector)

    def act(self) -> bool:
        """Takes the sums that are there; False if there is none."""
        there = self._sums.there()
        for (step, bucket), vector in there:
            self._recorder.heard(self._endpoint.clock())
            self._finished(step, bucket, vector)
        return bool(there)

    def part(self, mail: Mail) -> None:
        raise ProtocolError("sent a part of a sum that torch makes")

    def due(self, sender: int, part: GradientPart, size: int) -> int:
        raise ProtocolError("sent a part of a sum that torch makes")

    def count(self, size: int) -> None:
        """So many bytes are summed over the ranks and left in parts, or gathered from parts: what a ring sends to the next rank
        for that is counted, because the library does not say what it sent."""
        ranks = self._sums.ranks
        sent = (ranks - 1) * size // ranks
        self._recorder.count_sent(sent)
        self._endpoint.traffic.count_elsewhere((self._endpoint.node + 1) % ranks, sent, sent)


class RankMember(WorkerMember):
    """A worker that also looks whether torch has finished a sum."""

    def __init__(self, endpoint: Endpoint, plan: Enlist, roles: Roles, shard: bool = False) -> None:
        """`shard`: no rank has more of the model than its part, and the layer it works on."""
        sums, mesh = endpoint.sums, endpoint.mesh
        if sums is None or (shard and mesh is None):
            raise UsageError(NEEDED)

        def by_torch(sender: Sender, workers: Sequence[int], exchange: SummingExchange) -> Algorithm:
            self._by_torch = SumsByTorch(endpoint, sums, self._recorder, exchange.summed)
            return self._by_torch

        if not shard:
            super().__init__(endpoint, plan, roles, Gradients, algorithm=by_torch, hands_over=True)
            return
        from ringtmp.strategies.allreduce.sharded_replica import ShardedReplica
        from ringtmp.strategies.allreduce.shards import ShardedGradients

        replica = ShardedReplica(plan.recipe, endpoint.node, mesh)

        def sharded(plan: Enlist, _: Replica, recorder: Recorder, start: Callable[..., None]) -> SummingExchange:
            return ShardedGradients(plan, replica, recorder, start, lambda size: self._by_torch.count(size))

        super().__init__(endpoint, plan, roles, sharded, algorithm=by_torch, replica=replica)

    def act(self) -> bool:
        return self._by_torch.act() or super().act()
