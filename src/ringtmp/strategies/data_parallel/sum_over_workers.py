"""Vectors summed over all workers, so that each ends with the same bits: in chunks around a ring, or whole up and down a tree.
A third way is in `recursive_halving.py`.

Whoever uses it cuts the model into `buckets`, starts a sum of each with its own vector, and is told when the sum is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ringtmp.errors import ProtocolError
from ringtmp.metrics.step_recorder import Recorder
from ringtmp.runtime.mailbox import Endpoint, Mail
from ringtmp.wire.formats import ErrorFeedback, wire_format
from ringtmp.wire.messages import GradientPart

#: Layers are exchanged together until they have this many values: a message has its price.
BUCKET = 1 << 16
#: (round, bucket, vector)
Summed = Callable[[int, int, torch.Tensor], None]


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
    def start(self, step: int, bucket: int, vector: Any) -> None: ...
    def part(self, mail: Mail) -> None: ...
    def due(self, sender: int, part: GradientPart, size: int) -> int:
        """How many values a part of a bucket of this size has; ProtocolError: it is not this sender's to send."""
        ...


class Sender:
    """Parts on the wire, with what rounding takes away added to the next."""

    def __init__(self, endpoint: Endpoint, wire: str, recorder: Recorder) -> None:
        self.me = endpoint.node
        self.wire = wire_format(wire)
        self._endpoint = endpoint
        self._recorder = recorder
        self._feedback = ErrorFeedback(self.wire)

    def encode(self, part: GradientPart, values: torch.Tensor) -> list[torch.Tensor]:
        return self._feedback.encode((part.bucket, part.chunk, part.hop, part.summed), values)

    def decode(self, tensors: Sequence[torch.Tensor], size: int) -> torch.Tensor:
        return self.wire.decode(tensors, size)

    def post(self, peer: int, part: GradientPart, tensors: Sequence[torch.Tensor]) -> None:
        self._recorder.count_sent(sum(each.nbytes for each in tensors))
        self._endpoint.post(peer, part, tensors)


class RingReduce:
    def __init__(self, sender: Sender, workers: Sequence[int], finished: Summed) -> None:
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
        part = GradientPart(step, bucket, self._rank, 0, False)
        self._sender.post(self._next, part, self._sender.encode(part, self._chunk(part)))
        for mail in self._early.pop((step, bucket), ()):
            self.part(mail)

    def part(self, mail: Mail) -> None:
        part, tensors = mail.message, mail.present()
        assert isinstance(part, GradientPart)
        if (part.step, part.bucket) not in self._vectors:
            self._early.setdefault((part.step, part.bucket), []).append(mail)
            return
        mine, onward = self._chunk(part), part.hop < self._n - 2
        if part.summed:
            mine.copy_(self._sender.decode(tensors, len(mine)))
            if onward:
                self._sender.post(
                    self._next, GradientPart(part.step, part.bucket, part.chunk, part.hop + 1, True), tensors
                )
            self._arrive(part)
            return
        torch.add(self._sender.decode(tensors, len(mine)), mine, out=mine)
        following = GradientPart(part.step, part.bucket, part.chunk, part.hop + 1 if onward else 0, not onward)
        sent = self._sender.encode(following, mine)
        self._sender.post(self._next, following, sent)
        if not onward:
            if not self._sender.wire.exact:
                mine.copy_(self._sender.decode(sent, len(mine)))  # the total is what everyone else gets
            self._arrive(part)

    def due(self, sender: int, part: GradientPart, size: int) -> int:
        """A chunk starts at the worker of its number; its sum starts at the one before that."""
        came_from = part.chunk + part.hop + (self._n - 1 if part.summed else 0)
        near = sender == self._before and (came_from - self._rank + 1) % self._n == 0
        if not (near and 0 <= part.chunk < self._n and 0 <= part.hop < self._n - 1):
            raise ProtocolError(f"sent chunk {part.chunk} after {part.hop} hops, which is not its to send")
        first, stop = self._bounds(part, size)
        return stop - first

    def _bounds(self, part: GradientPart, size: int) -> tuple[int, int]:
        return size * part.chunk // self._n, size * (part.chunk + 1) // self._n

    def _chunk(self, part: GradientPart) -> torch.Tensor:
        vector = self._vectors[part.step, part.bucket]
        first, stop = self._bounds(part, len(vector))
        return vector[first:stop]

    def _arrive(self, part: GradientPart) -> None:
        name = (part.step, part.bucket)
        self._missing[name] -= 1
        if not self._missing[name]:
            del self._missing[name]
            self._finished(part.step, part.bucket, self._vectors.pop(name))


class TreeReduce:
    def __init__(self, sender: Sender, workers: Sequence[int], finished: Summed) -> None:
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
        self._arrived: dict[tuple[int, int], dict[int, Sequence[torch.Tensor]]] = {}  # as they came

    def start(self, step: int, bucket: int, vector: torch.Tensor) -> None:
        self._vectors[step, bucket] = vector
        self._pass_up(step, bucket)

    def part(self, mail: Mail) -> None:
        part, tensors = mail.message, mail.present()
        assert isinstance(part, GradientPart)
        if part.summed:
            self._pass_down(part.step, part.bucket, tensors)
        else:
            arrived = self._arrived.setdefault((part.step, part.bucket), {})
            arrived[mail.sender] = tensors
            self._pass_up(part.step, part.bucket)

    def due(self, sender: int, part: GradientPart, size: int) -> int:
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
            vector.add_(self._sender.decode(arrived[child], len(vector)))
        self._arrived.pop((step, bucket), None)
        part = GradientPart(step, bucket, 0, 0, self._parent is None)
        if self._parent is not None:
            self._sender.post(self._parent, part, self._sender.encode(part, vector))
        elif self._children:
            self._pass_down(step, bucket, self._sender.encode(part, vector))
        else:
            self._finished(step, bucket, self._vectors.pop((step, bucket)))

    def _pass_down(self, step: int, bucket: int, tensors: Sequence[torch.Tensor]) -> None:
        for child in reversed(self._children):  # the one with the deepest tree below it first
            self._sender.post(child, GradientPart(step, bucket, 0, 0, True), tensors)
        size = len(self._vectors.pop((step, bucket)))
        self._finished(step, bucket, self._sender.decode(tensors, size))
