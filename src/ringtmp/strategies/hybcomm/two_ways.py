"""HybComm, the part of worker i, which also serves chunk i of every gradient that goes through servers.

    w <- the model, on every worker
    for t in 0, 1, 2, ...
      x <- share i of batch t;  forward
      from the last layer l down:
        l is a plain linear layer:
          X_i <- what entered its matrix, E_i <- errors of what left it;  R <- rows of all workers
          (n - 1) R (M + N) <= what the servers would send:
            send X_i, E_i to every other worker;  await X_j, E_j of every j
            G_l <- E^T X, of all rows in the order of workers
            next layer
          g_i <- E_i^T X_i
        send chunk j of g_i to every server j;  await chunk i of every g_j
        send sum over j of chunk i to every worker;  G_l <- all sums
      w <- w - rate(t) G                              when every G_l is there

    symbol    here
    n         workers; every one is a server (P1 = P2 in the paper)
    K         samples of one worker; R = n K, where a sample is one row
    M, N      outputs and inputs of the matrix

Departures. A server sends back the sum instead of new parameters, as many values, and every worker makes the update: so each
has all there is to go on with when another is lost. The choice is made for every step, from its samples, the rows that
the master has found a sample to make, and the workers that have samples: so it is the same on all of them, and the last batch
of an epoch may go another way. In the paper it is made once. Sums have the same
order on every worker, so all end with the same bits. On a lossy wire factors are rounded, on their sender too, and what
goes through servers makes up for rounding with the next step (error feedback). The optimizer of the run takes the place of
plain descent.

Lost worker: every worker has weights and optimizer state, at most one step apart. The others go on from the newest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ringtmp.errors import ProtocolError
from ringtmp.metrics.step_recorder import Recorder
from ringtmp.model.sufficient_factors import Factors as Caught
from ringtmp.runtime.clipping import parameter_order, total_norm
from ringtmp.strategies.data_parallel.linear_gradients import known, together
from ringtmp.strategies.data_parallel.replica import Replica
from ringtmp.strategies.data_parallel.sum_over_workers import buckets
from ringtmp.strategies.data_parallel.trainer import Exchange
from ringtmp.strategies.hybcomm.choose_way import by_factors, chunk, with_samples
from ringtmp.wire.formats import ErrorFeedback, wire_format
from ringtmp.wire.messages import Enlist, Factors, GradientPart

#: (to whom, message, its tensors)
Send = Callable[[int, GradientPart | Factors, Sequence[torch.Tensor]], None]


@dataclass
class _Sum:
    """Of one group of layers in one step."""

    came: dict[int, Caught | torch.Tensor | None] = field(default_factory=dict)  # by rank; None: it has no samples
    chunks: dict[int, torch.Tensor] = field(default_factory=dict)  # sums, by the rank that serves them
    served: bool = False  # our own among them
    #: How it travels, and the ranks that were dealt samples: known when this worker's own is among what came.
    factored: bool = False
    senders: tuple[int, ...] = ()


class TwoWays(Exchange):
    cause = "gradients"

    def __init__(
        self, plan: Enlist, replica: Replica, recorder: Recorder, send: Send,
        *, me: int, workers: Sequence[int], way: str, offended: Callable[[int, str], None],
    ) -> None:  # fmt: skip
        """`offended`: a worker broke the protocol, whoever's message it was that showed it."""
        self._offended = offended
        self.step = plan.step  # updates made
        self.linear = known(plan.linear)
        # Layers that may go by factors are alone, others travel together.
        others = [0 if layer in self.linear else size for layer, size in enumerate(plan.sizes)]
        self.groups = [*buckets(others), *((layer,) for layer in self.linear)]
        self.sizes = [sum(plan.sizes[layer] for layer in group) for group in self.groups]
        self._group_of = {layer: number for number, group in enumerate(self.groups) for layer in group}
        self._plan = plan
        self._replica = replica
        self._recorder = recorder
        self._send = send
        self._way = way
        self._workers = list(workers)
        self._rank = self._workers.index(me)
        self._wire = wire_format(plan.wire)
        self._feedback = ErrorFeedback(self._wire)
        self._senders: tuple[int, ...] = ()
        self._samples = 0  # of the batch under way
        self._own: dict[int, torch.Tensor] = {}  # gradients of a group whose other layers are under way
        self._sums: dict[tuple[int, int], _Sum] = {}  # by step and group
        self._there = 0  # groups of this step whose sums are there

    def dealt(self, microbatches: int, samples: int) -> None:
        self._samples = samples
        self._senders = with_samples(microbatches, len(self._workers))

    def ready(self, layer: int, step: int, training: bool) -> bool:
        if self.groups and self.step < step:
            return False
        if training and layer == 0:
            self._replica.mark(step)
        return True

    # -- what goes out ------------------------------------------------------------------------------------------------

    def gradient(self, layer: int, step: int, share: float, gradient: torch.Tensor) -> None:
        if layer not in self._group_of:
            return
        self._own[layer] = gradient
        number = self._group_of[layer]
        group = self.groups[number]
        if layer == group[-1]:
            parts = [self._own.pop(each) for each in group]
            self._to_servers(step, number, torch.cat(parts) if share else None)

    def factors(self, layer: int, step: int, share: float, factors: Sequence[Caught]) -> None:
        linear, number = self.linear[layer], self._group_of[layer]
        mine = together(linear, factors)
        size, workers = self.sizes[number], len(self._workers)
        rows = round(self._samples * self._plan.rows[layer])
        factored = by_factors(self._way, rows, linear.width, size, workers=workers, senders=self._senders)
        self._sum(step, number).factored = factored
        if share and not factored:
            self._to_servers(step, number, linear.gradient(0, size, *mine))
            return
        if not len(mine.rows):
            for peer in self._others():
                self._send(peer, Factors(step, layer, 0), [])
            self._take(step, number, self._rank, None)
            return
        sent = [*self._wire.encode(mine.rows), *self._wire.encode(mine.errors)]
        for peer in self._others():
            self._send(peer, Factors(step, layer, len(mine.rows)), sent)
        self._take(step, number, self._rank, self._decoded(sent))  # what everybody else has of it

    def _to_servers(self, step: int, number: int, vector: torch.Tensor | None) -> None:
        for rank, peer in enumerate(self._workers):
            if rank == self._rank:
                continue
            first, stop = chunk(self.sizes[number], len(self._workers), rank)
            name = (number, rank)
            sent = [] if vector is None else self._feedback.encode(name, vector[first:stop])
            self._send(peer, GradientPart(step, number, rank, 0, False), sent)
        first, stop = chunk(self.sizes[number], len(self._workers), self._rank)
        self._take(step, number, self._rank, None if vector is None else vector[first:stop])

    def _others(self) -> list[int]:
        return [peer for rank, peer in enumerate(self._workers) if rank != self._rank]

    # -- what comes in ------------------------------------------------------------------------------------------------

    def part(self, sender: int, part: GradientPart, tensors: Sequence[torch.Tensor]) -> None:
        rank = self._workers.index(sender)
        if not part.summed:
            self._take(
                part.step, part.bucket, rank, self._values(part.bucket, self._rank, tensors) if tensors else None
            )
            return
        waiting = self._sums.get((part.step, part.bucket))
        if waiting is None or not isinstance(waiting.came.get(self._rank, Caught), torch.Tensor | None):
            raise ProtocolError(f"sent a sum of step {part.step} that lacks this worker's gradient")
        waiting.chunks[rank] = self._values(part.bucket, rank, tensors)
        self._go_on(part.step, part.bucket, waiting)

    def arrived(self, sender: int, message: Factors, tensors: Sequence[torch.Tensor]) -> None:
        came = self._decoded(tensors) if message.rows else None
        self._take(message.step, self._group_of[message.layer], self._workers.index(sender), came)

    def _values(self, number: int, rank: int, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        first, stop = chunk(self.sizes[number], len(self._workers), rank)
        return self._wire.decode(tensors, stop - first)

    def _decoded(self, sent: Sequence[torch.Tensor]) -> Caught:
        half = len(sent) // 2
        return Caught(self._wire.decode(sent[:half]), self._wire.decode(sent[half:]))

    def _take(self, step: int, number: int, rank: int, came: Caught | torch.Tensor | None) -> None:
        waiting = self._sum(step, number)
        waiting.came[rank] = came
        if rank == self._rank:
            waiting.senders = self._senders
        self._go_on(step, number, waiting)

    def _sum(self, step: int, number: int) -> _Sum:
        return self._sums.setdefault((step, number), _Sum())

    def _go_on(self, step: int, number: int, waiting: _Sum) -> None:
        if len(waiting.came) < len(self._workers):
            return
        found = [each for _, each in sorted(waiting.came.items()) if each is not None]
        factors = [each for each in found if isinstance(each, Caught)]
        for rank, each in waiting.came.items():
            silent = each is None and rank in waiting.senders and not waiting.factored
            if silent or (each is not None and isinstance(each, Caught) != waiting.factored):
                self._offended(self._workers[rank], f"sent its gradient of step {step} another way than the others")
                return  # it goes on when the run has let go of that one
        if factors or not found:  # where nothing comes back to a layer, its gradient is zeros, as with every other way
            linear = self.linear[self.groups[number][0]]
            started = self._recorder.begin()
            vector = linear.gradient(0, self.sizes[number], *together(linear, factors))
            self._recorder.end(started, "reduce", self.groups[number][0], -1)
            self._finish(step, number, vector)
            return
        if not waiting.served:
            waiting.served = True
            self._serve(step, number, waiting, [each for each in found if isinstance(each, torch.Tensor)])
        if len(waiting.chunks) == len(self._workers):
            self._finish(step, number, torch.cat([waiting.chunks[rank] for rank in range(len(self._workers))]))

    def _serve(self, step: int, number: int, waiting: _Sum, chunks: Sequence[torch.Tensor]) -> None:
        total = chunks[0].clone()
        for each in chunks[1:]:
            total.add_(each)
        sent = self._feedback.encode((number, -1), total)
        for peer in self._others():
            self._send(peer, GradientPart(step, number, self._rank, 0, True), sent)
        waiting.chunks[self._rank] = self._wire.decode(sent, len(total))  # what everybody else has of it

    # -- update -------------------------------------------------------------------------------------------------------

    def _finish(self, step: int, number: int, vector: torch.Tensor) -> None:
        """G of a group is there; the last one brings the update."""
        del self._sums[step, number]
        start = 0
        for layer in self.groups[number]:
            self._replica.give_gradients(layer, vector[start : start + self._plan.sizes[layer]])
            start += self._plan.sizes[layer]
        self._there += 1
        if self._there == len(self.groups):
            self._there = 0
            self._update(step)

    def _update(self, step: int) -> None:
        started, norm = self._recorder.begin(), None
        if self._plan.recipe.clip_norm is not None:
            every = [norms for stage in self._replica.stages for norms in stage.gradient_norms(step)]
            norm = total_norm(every, parameter_order(self._replica.layers))
        for group in self.groups:
            for layer in group:
                self._replica.stages[layer].step(step, norm)
        self._recorder.end(started, "update", 0, -1)
        self.step = step + 1
