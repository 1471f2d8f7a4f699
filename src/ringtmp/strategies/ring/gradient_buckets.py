"""What of a stage's parameters travels together through a group, and, where its members share the optimizer state, who has
which of it. Pure: the master and every member come to the same answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ringtmp.model.portable_layer import Layer
from ringtmp.model.run_graph import dtype_of
from ringtmp.runtime.add_along_tree import Slots
from ringtmp.wire.tensors import ALIGNMENT

#: Tensors travel together until they have this many values.
BUCKET = 1 << 16


@dataclass(frozen=True)
class Bucket:
    """Whole tensors of one dtype, one after the other."""

    first: int
    stop: int
    slots: Slots
    size: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


def buckets(parameters: Sequence[torch.Tensor]) -> list[Bucket]:
    """Each tensor begins on a 64-byte boundary, as arithmetic with it must."""
    found: list[Bucket] = []
    first, slots, size = 0, list[tuple[int, int]](), 0
    for at, each in enumerate(parameters):
        slots.append((size, size + each.numel()))
        grain = ALIGNMENT // each.element_size()
        size += -(-each.numel() // grain) * grain
        following = parameters[at + 1].dtype if at + 1 < len(parameters) else None
        if following != each.dtype or size >= BUCKET:
            found.append(Bucket(first, at + 1, tuple(slots), size, each.dtype))
            first, slots, size = at + 1, [], 0
    return found


def owners(found: Sequence[Bucket], members: int) -> tuple[int, ...]:
    """By bucket the member (its rank) that keeps the optimizer state: the largest first, to whoever has least."""
    load, by = [0] * members, [0] * len(found)
    for at in sorted(range(len(found)), key=lambda at: (-found[at].nbytes, at)):
        rank = min(range(members), key=lambda each: (load[each], each))
        load[rank] += found[at].nbytes
        by[at] = rank
    return tuple(by)


def owned_by(layers: Sequence[Layer], members: int) -> list[dict[str, int]]:
    """For the layers of a stage: every trained parameter's owner."""
    named = [(at, each) for at, layer in enumerate(layers) for each in layer.tensors if each.trainable]
    described = [torch.empty(each.shape, dtype=dtype_of(each.dtype), device="meta") for _, each in named]
    result: list[dict[str, int]] = [{} for _ in layers]
    known = buckets(described)
    for bucket, rank in zip(known, owners(known, members), strict=True):
        for at, each in named[bucket.first : bucket.stop]:
            result[at][each.name] = rank
    return result
