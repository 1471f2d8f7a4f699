"""Nodes that break the protocol once, in memory: what they send is bent, or something is slipped in between."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import torch

from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.runtime.mailbox import Endpoint
from ringtmp.wire.messages import Message
from test_healing import Ticking

Tensors = Sequence[torch.Tensor | None]
#: What is posted instead: (peer, message, tensors) as it was -> as it goes out; None: not this one.
Bend = Callable[[int, Message, Tensors], tuple[int, Message, Tensors] | None]


class CrookedEndpoint(Endpoint):
    bend: Bend | None = None

    def post(self, peer: int, message: Message, tensors: Tensors = ()) -> None:
        bent = self.bend(peer, message, tensors) if self.bend is not None and peer != self.node else None
        if bent is not None:
            self.bend = None  # once
            peer, message, tensors = bent
        super().post(peer, message, tensors)


class Crooked(InMemoryPool):
    """One node is crooked until it is replaced."""

    def __init__(self, nodes: int, bad: int, bend: Bend, seed: int = 0) -> None:
        super().__init__(nodes, seed, clock=Ticking())
        self._bad, self._bend = bad, bend
        self.spoke = False

    def _endpoint(self, node: int, ring: str, generation: int) -> Endpoint:
        honest = super()._endpoint(node, ring, generation)
        if node != self._bad or generation > 1:
            return honest
        made = CrookedEndpoint(honest._transport, ring, generation, self._clock, honest.limit_bytes, honest.snapshots)
        made.bend = self._once
        return made

    def _once(self, peer: int, message: Message, tensors: Tensors) -> tuple[int, Message, Tensors] | None:
        bent = self._bend(peer, message, tensors)
        self.spoke = self.spoke or bent is not None
        return bent


def other_values(value: Any) -> Iterator[Any]:
    """What a field of an honest message might be in a crooked one."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (-1, value + 1, 10**6, 2**60)
    elif isinstance(value, float):
        yield from (-1.0, math.nan, math.inf, 1e300)
    elif isinstance(value, str):
        yield from ("", "\x1b[2J\nwarning: all is lost\r\u202e", "x" * 10_000)
    elif isinstance(value, bytes):
        yield from (b"", b"\xff" * 50, value[:-1], value.replace(b":", b":-1"), b'{"type":"node_step"}')
    elif isinstance(value, tuple):
        yield from ((), value[:-1], value + value)
        if value and isinstance(value[0], int) and not isinstance(value[0], bool):
            yield tuple(-each for each in value)
        if value and isinstance(value[0], bytes):
            yield from ((each,) for each in other_values(value[0]))
        if value and isinstance(value[0], bool):
            yield tuple(not each for each in value)


def other_tensors(tensors: Tensors) -> Iterator[Tensors]:
    there = [each for each in tensors if each is not None]
    yield []
    yield [*tensors, torch.zeros(3)]
    if there:
        first = there[0]
        yield [None, *tensors[1:]]
        yield [torch.zeros(3, 5, 7), *tensors[1:]]
        yield [torch.zeros(first.shape, dtype=torch.int64), *tensors[1:]]
        if first.dim():
            yield [first[:0], *tensors[1:]]
            yield [torch.cat([first, first]), *tensors[1:]]


def bent(message: Message, tensors: Tensors) -> Iterator[tuple[str, Message, Tensors]]:
    """Every field in turn as it must not be, then the tensors."""
    for field in message.__struct_fields__:
        if field == "tensors":
            continue
        for number, value in enumerate(other_values(getattr(message, field))):
            yield f"{field}-{number}", msgspec.structs.replace(message, **{field: value}), tensors
    if "tensors" in message.__struct_fields__:
        for number, others in enumerate(other_tensors(tensors)):
            yield f"tensors-{number}", message, others
