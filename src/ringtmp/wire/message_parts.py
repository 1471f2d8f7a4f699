"""What messages are made of: how nodes train, and what crosses a cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from ringtmp.model.frozen_formats import FLOAT32
from ringtmp.wire.formats import PLAIN, WireFormat
from ringtmp.wire.tensors import TensorSpec

Specs = tuple[TensorSpec | None, ...]
#: What the random generator is seeded for: every random operator; or every layer, as in runs of versions before.
Randomness = Literal["operator", "layer"]


class Recipe(msgspec.Struct, frozen=True):
    """How every node trains: the same for all, whatever the number of nodes."""

    seed: int
    threads: int
    optimizer: str
    optimizer_settings: dict[str, Any]
    schedule: dict[str, Any]  # learning rate over steps
    clip_norm: float | None = None
    staleness: int = 0  # 1: every gradient is taken at the weights one update ago
    randomness: Randomness = "operator"
    sum_tree: int = 1  # parts of a batch that are added up as a tree (plan/sum_tree.py)
    compiled: bool = False  # layers are handed to torch.compile in training
    compute: str = FLOAT32  # what goes forward is computed in (model/compute_formats.py)
    deterministic: bool = True  # no kernel that may give other bits the next time


#: In a crossing tensor's shape: a size that depends on the number of samples.
FREE = -1


class Crossing(msgspec.Struct, frozen=True, array_like=True):
    """A tensor that crosses a cut, as the plan knows it: everything but the number of samples."""

    dtype: str
    rest: tuple[int, ...]  # the shape behind the samples
    per_sample: bool  # whether the first dimension counts samples; else `rest` is the whole shape

    def allows(self, spec: TensorSpec, wire: WireFormat = PLAIN) -> bool:
        shape = spec.shape[1:] if self.per_sample else spec.shape
        known = len(shape) == len(self.rest) and all(a in (FREE, b) for a, b in zip(self.rest, shape, strict=True))
        whole = known and (not self.per_sample or len(spec.shape) > 0)
        return whole and (spec.dtype, spec.shape) == wire.travels(self.dtype, spec.shape)[0]


class Edge(msgspec.Struct, frozen=True, array_like=True):
    """Tensors that go from one visit of the route to another, which need not be the next; their gradients come back."""

    training: bool  # in training or in evaluation
    source: int
    target: int
    values: tuple[tuple[int, int], ...]
    crossings: tuple[Crossing, ...] = ()  # empty: not known


def fits(crossings: Sequence[Crossing], specs: Specs, wire: WireFormat) -> bool:
    """Whether these tensors are what crosses a cut on this wire; any may be missing."""
    if len(specs) != wire.width * len(crossings):
        return False
    for position, crossing in enumerate(crossings):
        sent = specs[wire.width * position : wire.width * (position + 1)]
        first = sent[0]
        if first is not None and not crossing.allows(first, wire):
            return False
        beside = [None if each is None else (each.dtype, each.shape) for each in sent[1:]]
        if beside != ([None] * len(beside) if first is None else wire.travels(crossing.dtype, first.shape)[1:]):
            return False
    return True
