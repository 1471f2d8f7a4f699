"""One vector of gradients added up over several nodes along the tree of sums, so that all of them end with the same bits.

Knows nothing of messages: `TreeAddition` is told which partial sums are here and what others sent, and says what to send to
whom. Who adds up which chunk is decided in `plan/sum_tree.py` (`Adding`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ringtmp.plan.sum_tree import ROOT, Adding

#: (start, stop) of every tensor in the vector: what is between them is padding.
Slots = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Partial:
    """A sum of some parts. `there`: which tensors of the vector got a gradient; the others have no values."""

    values: torch.Tensor
    there: tuple[bool, ...]

    @property
    def absent(self) -> bool:
        return not any(self.there)

    def chunk(self, first: int, stop: int) -> Partial:
        return replace(self, values=self.values[first:stop])


class Send(NamedTuple):
    """A chunk of a partial sum for another worker (by its rank); `node` of the tree, the root's is the total."""

    to: int
    node: int
    chunk: int
    sum: Partial


def flat_sum(
    tensors: Sequence[torch.Tensor | None], slots: Slots, size: int, dtype: torch.dtype = torch.float32
) -> Partial:
    """Tensors, or holes, end to end."""
    vector = torch.zeros(size, dtype=dtype)
    for tensor, (start, stop) in zip(tensors, slots, strict=True):
        if tensor is not None:
            vector[start:stop].view(tensor.shape).copy_(tensor)
    return Partial(vector, tuple(tensor is not None for tensor in tensors))


class TreeAddition:
    """Of one vector, on the worker of this rank. `mine`: what its parts add up to, by node of the tree (`SumTree.whole`).
    Nothing given is changed: it may still be on its way out. Done when `total` is not None."""

    def __init__(
        self, adding: Adding, rank: int, mine: Mapping[int, Partial], slots: Slots, size: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        self._adding = adding
        self._rank = rank
        self._slots = slots
        self._size = size
        self._mine = dict(mine)
        self._waiting: dict[tuple[int, int], Partial] = {}  # by node and chunk: its sibling is not here yet
        self._wanted = adding.whole_at in (None, rank)
        self._vector = torch.empty(size if self._wanted else 0, dtype=dtype)
        self._dtype = dtype
        self._there: tuple[bool, ...] | None = None
        self._missing = adding.chunks
        self._to_add = sum(adding.owner(node, 0) == rank for node in adding.split()) if not self._wanted else 0

    @property
    def done(self) -> bool:
        """This worker has the total, or if it is another's, has done its share of the work."""
        return self.total is not None if self._wanted else not self._to_add

    @property
    def total(self) -> Partial | None:
        if self._missing or self._there is None:
            return None
        return Partial(self._vector, self._there)

    def begin(self) -> list[Send]:
        """What this worker can do alone, and what it sends."""
        found: list[Send] = []
        split = set(self._adding.split())
        tops = [child for node in split for child in (2 * node, 2 * node + 1) if child not in split] or [ROOT]
        for node in sorted(tops):
            if self._adding.owner(node, 0) != self._rank:
                continue
            whole = self._below(node) or self._nothing()
            for chunk in range(self._adding.chunks):
                found += self._have(node, chunk, whole.chunk(*self._adding.bounds(chunk, self._size)))
        return found

    def take(self, node: int, chunk: int, given: Partial) -> list[Send]:
        """Something another worker sent: a partial sum, or a chunk of the total."""
        if node == ROOT:
            return self._settle(chunk, given)
        return self._offer(node, chunk, given)

    def _nothing(self) -> Partial:
        return Partial(torch.zeros(self._size, dtype=self._dtype), (False,) * len(self._slots))

    def _below(self, node: int) -> Partial | None:
        """The sum below a node all of whose parts are here; None: there is none."""
        if node in self._mine:
            return self._mine.pop(node)
        if node >= self._adding.tree.parts:
            return None
        left, right = self._below(2 * node), self._below(2 * node + 1)
        if left is None or right is None:
            return right if left is None else left
        return self._added(left, right, 0)

    def _have(self, node: int, chunk: int, found: Partial) -> list[Send]:
        """The sum below a node is made, of one chunk."""
        if node == ROOT:
            everyone = range(len(self._adding.shares)) if self._adding.whole_at is None else ()
            others = [rank for rank in everyone if rank != self._rank]
            return self._settle(chunk, found) + [Send(rank, ROOT, chunk, found) for rank in others]
        owner = self._adding.owner(node >> 1, chunk)
        return self._offer(node, chunk, found) if owner == self._rank else [Send(owner, node, chunk, found)]

    def _offer(self, node: int, chunk: int, found: Partial) -> list[Send]:
        other = self._waiting.pop((node ^ 1, chunk), None)
        if other is None:
            self._waiting[node, chunk] = found
            return []
        left, right = (other, found) if node & 1 else (found, other)
        self._to_add -= 1
        return self._have(node >> 1, chunk, self._added(left, right, self._adding.bounds(chunk, self._size)[0]))

    def _added(self, left: Partial, right: Partial, start: int) -> Partial:
        """In memory of its own. What is absent passes the other on."""
        if left.absent or right.absent:
            return right if left.absent else left
        if left.there == right.there:
            return Partial(left.values + right.values, left.there)
        values = torch.zeros_like(left.values)
        for slot, *both in zip(self._slots, left.there, right.there, strict=True):
            first, stop = (min(max(edge - start, 0), len(values)) for edge in slot)
            here = [each.values[first:stop] for each, there in zip((left, right), both, strict=True) if there]
            if here:
                values[first:stop] = here[0] if len(here) == 1 else here[0] + here[1]
        return Partial(values, tuple(a or b for a, b in zip(left.there, right.there, strict=True)))

    def _settle(self, chunk: int, total: Partial) -> list[Send]:
        self.correct(chunk, total)
        self._there = total.there
        self._missing -= 1
        return []

    def correct(self, chunk: int, total: Partial) -> None:
        """A chunk of the total is this: on a lossy wire its maker has what the others get."""
        first, stop = self._adding.bounds(chunk, self._size)
        if total.absent:
            self._vector[first:stop].zero_()
        else:
            self._vector[first:stop] = total.values
