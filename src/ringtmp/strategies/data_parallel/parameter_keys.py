"""Parameters as keys: each layer's trainable tensors laid end to end, cut into ranges, ranges dealt to servers.

Pure. A tensor starts on a 64-byte boundary of its layer's flat vector, because views of it enter arithmetic and matrix
kernels change bits with alignment. The padding travels too: at most 15 values a tensor.

    layer 3   [ weight ........................ | bias .. ]      one flat vector
              [ key 7      | key 8      | key 9           ]      ranges of at most `most` values
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

GRAIN = 16  # float32 values in 64 bytes
LARGEST_KEY = 1 << 18  # values: 1 MiB of float32, so that a push of one key overlaps the pull of another
SMALLEST_KEY = 1 << 10


@dataclass(frozen=True)
class Slot:
    """A tensor's place in its layer's flat vector."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)


@dataclass(frozen=True)
class Flat:
    """A layer's trainable tensors end to end."""

    slots: tuple[Slot, ...]
    size: int


@dataclass(frozen=True)
class Key:
    """A range of a layer's flat vector: what a server holds and a message carries."""

    number: int
    layer: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def flat(tensors: Sequence[tuple[str, tuple[int, ...]]]) -> Flat:
    slots, end = [], 0
    for name, shape in tensors:
        slots.append(Slot(name, shape, end))
        end += _rounded(math.prod(shape))
    return Flat(tuple(slots), end)


def cut(sizes: Sequence[int], servers: int) -> tuple[Key, ...]:
    """Ranges of every layer, in layer order: small enough that `servers` shards come out even."""
    most = min(LARGEST_KEY, max(SMALLEST_KEY, sum(sizes) // (4 * servers)))
    keys: list[Key] = []
    for layer, size in enumerate(sizes):
        pieces = -(-size // most)
        for piece in range(pieces):
            start, stop = (_rounded(size * edge // pieces) for edge in (piece, piece + 1))
            keys.append(Key(len(keys), layer, start, min(stop, size)))
    return tuple(keys)


def table(sizes: Sequence[int], slots: Sequence[Sequence[int]], servers: int) -> tuple[Key, ...]:
    """The keys of a run: whole tensors, where there are `slots`."""
    return cut_at_tensors(slots) if slots else cut(sizes, servers)


def cut_at_tensors(slots: Sequence[Sequence[int]]) -> tuple[Key, ...]:
    """One for every trainable tensor, of whose values `slots` has the numbers by layer. Optimizers give a whole tensor the bits
    that they give it in one process; of ranges that begin elsewhere they do not."""
    keys: list[Key] = []
    for layer, sizes in enumerate(slots):
        for start, stop in ranges(sizes):
            keys.append(Key(len(keys), layer, start, stop))
    return tuple(keys)


def ranges(sizes: Sequence[int], start: int = 0) -> list[tuple[int, int]]:
    """Where tensors of these sizes lie in their layer's flat vector; in one that it begins at `start` of."""
    found = []
    for size in sizes:
        found.append((start, start + size))
        start += _rounded(size)
    return found


def deal(keys: Sequence[Key], servers: int) -> tuple[int, ...]:
    """The server of each key, balanced by bytes: the largest first, always to the one with least."""
    loads = [(0, server) for server in range(servers)]
    owners = [0] * len(keys)
    for key in sorted(keys, key=lambda each: (-each.size, each.number)):
        load, server = heapq.heappop(loads)
        owners[key.number] = server
        heapq.heappush(loads, (load + key.size, server))
    return tuple(owners)


def following(servers: Sequence[int], node: int) -> int:
    """The server that keeps a replica of this one's shard."""
    return servers[(servers.index(node) + 1) % len(servers)]


def _rounded(values: int) -> int:
    return -(-values // GRAIN) * GRAIN
