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

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ringtmp.errors import ProtocolError
from ringtmp.metrics import events, this_device
from ringtmp.metrics.step_recorder import Recorder
from ringtmp.plan.route import MASTER
from ringtmp.runtime.clipping import total_norm
from ringtmp.runtime.endpoint import Endpoint, Mail
from ringtmp.runtime.worker import farewell, report
from ringtmp.strategies.data_parallel.message_checks import PartScrutiny, is_a
from ringtmp.strategies.data_parallel.replica import Replica
from ringtmp.strategies.data_parallel.trainer import Trainer
from ringtmp.strategies.ps.settings import AllReduceSettings, Roles
from ringtmp.wire.formats import ErrorFeedback, wire_format
from ringtmp.wire.messages import Enlist, Part

#: Layers are exchanged together until they have this many values: a message has its price.
BUCKET = 1 << 16
Finished = Callable[[int, int, torch.Tensor], None]


def buckets(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Adjacent layers that travel together, from the last layer down, as their gradients become ready."""
    found: list[tuple[int, ...]] = []
    group: list[int] = []
    for layer in reversed(range(len(sizes))):
        if sizes[layer]:
            group.append(layer)
        if group and (sum(sizes[each] for each in group) >= BUCKET or layer == 0):
            found.append(tuple(group))
            group = []
    return found


class Algorithm(Protocol):
    def start(self, step: int, bucket: int, vector: torch.Tensor) -> None: ...
    def part(self, mail: Mail) -> None: ...
    def due(self, sender: int, part: Part, size: int) -> int:
        """How many values a part of a bucket of this size has; ProtocolError: it is not this sender's to send."""
        ...


class AllReduceMember:
    def __init__(self, endpoint: Endpoint, plan: Enlist, settings: AllReduceSettings, roles: Roles) -> None:
        self.endpoint = endpoint
        self.emit: Callable[[events.Event], None] = self._report
        power = this_device.power(plan.recipe.threads)
        self._recorder = Recorder(endpoint.node, endpoint.clock, plan.detailed_steps, this_device.meter(), power)
        replica = Replica(plan.recipe, endpoint.node)
        sender = Sender(endpoint, plan.wire, self._recorder)
        self._exchange = exchange = Gradients(plan, replica, self._recorder)
        make = RingReduce if settings.algorithm == "ring" else TreeReduce
        self._algorithm: Algorithm = make(sender, roles.workers, exchange.finished)
        exchange.algorithm = self._algorithm
        scrutiny = PartScrutiny(
            lambda sender, part: self._algorithm.due(sender, part, exchange.bucket_size(part.bucket)),
            exchange.buckets, plan.wire, lambda: exchange.step,
        )  # fmt: skip
        endpoint.enter_plan(is_a(lambda: roles), scrutiny)
        self.trainer = Trainer(endpoint, plan, self._recorder, exchange, replica)
        self.trainer.emit = lambda event: self.emit(event)
        others = {peer: address for peer, address in plan.addresses.items() if peer not in (endpoint.node, MASTER)}
        endpoint.connect_all(others)

    @property
    def step(self) -> int:
        return self.trainer.step

    def handle(self, mail: Mail) -> None:
        message = mail.message
        self._recorder.heard(mail.arrived_at)
        if isinstance(message, Part):
            self._recorder.received(message.bucket, message.chunk, mail.first_at, mail.arrived_at, mail.payload_bytes)
            self._algorithm.part(mail)
        elif not self.trainer.handle(mail):
            raise ProtocolError(f"sent {type(message).__name__}, which nobody expects")

    def act(self) -> bool:
        return self.trainer.act()

    def leave(self) -> None:
        self.trainer.leave(self._exchange.step)

    def farewell(self) -> events.NodeEnded:
        return farewell(self.endpoint)

    def _report(self, event: events.Event) -> None:
        report(self.endpoint, event)


class Gradients:
    """Between the layers of a worker and the algorithm: gradients become buckets, sums become updates."""

    cause = "gradients"

    def __init__(self, plan: Enlist, replica: Replica, recorder: Recorder) -> None:
        self.algorithm: Algorithm
        self._plan = plan
        self._replica = replica
        self._recorder = recorder
        self._buckets = buckets(plan.sizes)
        self._bucket_of = {layer: number for number, group in enumerate(self._buckets) for layer in group}
        self.step = plan.step  # updates made
        self._own: dict[int, torch.Tensor] = {}
        self._summed = 0

    @property
    def buckets(self) -> int:
        return len(self._buckets)

    def bucket_size(self, bucket: int) -> int:
        return sum(self._plan.sizes[layer] for layer in self._buckets[bucket])

    def begin(self, fresh: bool) -> None: ...

    def ready(self, layer: int, step: int, training: bool) -> bool:
        if self._buckets and self.step < step:
            return False
        if training and layer == 0:
            self._replica.mark(step)
        return True

    def again(self, layer: int, step: int) -> bool:
        return True

    def used(self, layer: int) -> None: ...

    def overtaken(self, step: int) -> bool:
        return False

    def oldest(self) -> int | None:
        return None

    def gradient(self, layer: int, step: int, share: float, gradient: torch.Tensor) -> None:
        if layer not in self._bucket_of:
            return
        self._own[layer] = gradient
        number = self._bucket_of[layer]
        group = self._buckets[number]
        if layer == group[-1]:
            parts = [self._own.pop(each) for each in group]
            self.algorithm.start(step, number, parts[0] if len(parts) == 1 else torch.cat(parts))

    def finished(self, step: int, bucket: int, vector: torch.Tensor) -> None:
        """G of a bucket is there; the last one brings the update."""
        started = self._recorder.begin()
        if self._plan.recipe.clip_norm is not None:
            vector = vector.clone()  # clipping changes it in place, and parts of it may still be on their way out
        start = 0
        for layer in self._buckets[bucket]:
            self._replica.give_gradients(layer, vector[start : start + self._plan.sizes[layer]])
            start += self._plan.sizes[layer]
        self._summed += 1
        if self._summed == len(self._buckets):
            self._summed = 0
            self._update(step)
        self._recorder.end(started, "update", self._buckets[bucket][-1], -1)

    def _update(self, step: int) -> None:
        norm = None
        if self._plan.recipe.clip_norm is not None:
            norm = total_norm([norms for stage in self._replica.stages for norms in stage.gradient_norms(step)])
        for group in self._buckets:
            for layer in group:
                self._replica.stages[layer].step(step, norm)
        self.step = step + 1


class Sender:
    """Parts on the wire, with what rounding takes away added to the next."""

    def __init__(self, endpoint: Endpoint, wire: str, recorder: Recorder) -> None:
        self.me = endpoint.node
        self.wire = wire_format(wire)
        self._endpoint = endpoint
        self._recorder = recorder
        self._feedback = ErrorFeedback(self.wire)

    def encode(self, part: Part, values: torch.Tensor) -> list[torch.Tensor]:
        return self._feedback.encode((part.bucket, part.chunk, part.summed), values)

    def decode(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return self.wire.decode(tensors)

    def post(self, peer: int, part: Part, tensors: Sequence[torch.Tensor]) -> None:
        self._recorder.count_sent(sum(each.nbytes for each in tensors))
        self._endpoint.post(peer, part, tensors)


class RingReduce:
    def __init__(self, sender: Sender, workers: Sequence[int], finished: Finished) -> None:
        self._sender = sender
        self._n = len(workers)
        self._rank = workers.index(sender.me)
        self._next = workers[(self._rank + 1) % self._n]
        self._before = workers[self._rank - 1]
        self._finished = finished
        self._vectors: dict[tuple[int, int], torch.Tensor] = {}
        self._missing: dict[tuple[int, int], int] = {}
        self._early: dict[tuple[int, int], list[Mail]] = {}  # parts that came before our own gradient

    def start(self, step: int, bucket: int, vector: torch.Tensor) -> None:
        if self._n == 1:
            self._finished(step, bucket, vector)
            return
        self._vectors[step, bucket] = vector
        self._missing[step, bucket] = self._n
        part = Part(step, bucket, self._rank, 0, False)
        self._sender.post(self._next, part, self._sender.encode(part, self._chunk(part)))
        for mail in self._early.pop((step, bucket), ()):
            self.part(mail)

    def part(self, mail: Mail) -> None:
        part, tensors = mail.message, mail.present()
        assert isinstance(part, Part)
        if (part.step, part.bucket) not in self._vectors:
            self._early.setdefault((part.step, part.bucket), []).append(mail)
            return
        mine, onward = self._chunk(part), part.hop < self._n - 2
        if part.summed:
            mine.copy_(self._sender.decode(tensors))
            if onward:
                self._sender.post(self._next, Part(part.step, part.bucket, part.chunk, part.hop + 1, True), tensors)
            self._arrive(part)
            return
        torch.add(self._sender.decode(tensors), mine, out=mine)
        following = Part(part.step, part.bucket, part.chunk, part.hop + 1 if onward else 0, not onward)
        sent = self._sender.encode(following, mine)
        self._sender.post(self._next, following, sent)
        if not onward:
            if not self._sender.wire.exact:
                mine.copy_(self._sender.decode(sent))  # the total is what everyone else gets
            self._arrive(part)

    def due(self, sender: int, part: Part, size: int) -> int:
        """A chunk starts at the worker of its number; its sum starts at the one before that."""
        came_from = part.chunk + part.hop + (self._n - 1 if part.summed else 0)
        near = sender == self._before and (came_from - self._rank + 1) % self._n == 0
        if not (near and 0 <= part.chunk < self._n and 0 <= part.hop < self._n - 1):
            raise ProtocolError(f"sent chunk {part.chunk} after {part.hop} hops, which is not its to send")
        first, stop = self._bounds(part, size)
        return stop - first

    def _bounds(self, part: Part, size: int) -> tuple[int, int]:
        return size * part.chunk // self._n, size * (part.chunk + 1) // self._n

    def _chunk(self, part: Part) -> torch.Tensor:
        vector = self._vectors[part.step, part.bucket]
        first, stop = self._bounds(part, len(vector))
        return vector[first:stop]

    def _arrive(self, part: Part) -> None:
        name = (part.step, part.bucket)
        self._missing[name] -= 1
        if not self._missing[name]:
            del self._missing[name]
            self._finished(part.step, part.bucket, self._vectors.pop(name))


class TreeReduce:
    def __init__(self, sender: Sender, workers: Sequence[int], finished: Finished) -> None:
        self._sender = sender
        rank, n = workers.index(sender.me), len(workers)
        self._children: list[int] = []
        distance = 1
        while distance < n and rank % (2 * distance) == 0:
            if rank + distance < n:
                self._children.append(workers[rank + distance])
            distance *= 2
        self._parent = workers[rank - distance] if rank else None
        self._finished = finished
        self._vectors: dict[tuple[int, int], torch.Tensor] = {}
        self._arrived: dict[tuple[int, int], dict[int, torch.Tensor]] = {}

    def start(self, step: int, bucket: int, vector: torch.Tensor) -> None:
        self._vectors[step, bucket] = vector
        self._pass_up(step, bucket)

    def part(self, mail: Mail) -> None:
        part, tensors = mail.message, mail.present()
        assert isinstance(part, Part)
        if part.summed:
            self._pass_down(part.step, part.bucket, tensors)
        else:
            arrived = self._arrived.setdefault((part.step, part.bucket), {})
            arrived[mail.sender] = self._sender.decode(tensors)
            self._pass_up(part.step, part.bucket)

    def due(self, sender: int, part: Part, size: int) -> int:
        if sender != self._parent if part.summed else sender not in self._children:
            raise ProtocolError("sent a part that is not its to send")
        if part.chunk or part.hop or (part.summed and (part.step, part.bucket) not in self._vectors):
            raise ProtocolError(f"sent a part of step {part.step} out of turn")
        return size

    def _pass_up(self, step: int, bucket: int) -> None:
        vector, arrived = self._vectors.get((step, bucket)), self._arrived.get((step, bucket), {})
        if vector is None or len(arrived) < len(self._children):
            return
        for child in self._children:
            vector.add_(arrived[child])
        self._arrived.pop((step, bucket), None)
        part = Part(step, bucket, 0, 0, self._parent is None)
        if self._parent is not None:
            self._sender.post(self._parent, part, self._sender.encode(part, vector))
        elif self._children:
            self._pass_down(step, bucket, self._sender.encode(part, vector))
        else:
            self._finished(step, bucket, self._vectors.pop((step, bucket)))

    def _pass_down(self, step: int, bucket: int, tensors: Sequence[torch.Tensor]) -> None:
        for child in reversed(self._children):  # the one with the deepest tree below it first
            self._sender.post(child, Part(step, bucket, 0, 0, True), tensors)
        self._vectors.pop((step, bucket))
        self._finished(step, bucket, self._sender.decode(tensors))
