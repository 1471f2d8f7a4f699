"""Frozen weights in a smaller kind of number, converted to float32 wherever an operator uses them.

    bfloat16    the nearest bfloat16
    int8        of every output channel: scale = max |w| / 127, and round(w / scale); the scale is a tensor of its own

A weight is by definition what it is converted to: a run has the bits of eager mode with weights that were rounded so first.
The float32 copy lives while the operator runs. Autograd, which would keep it for backward, keeps the small tensor instead and
converts it once more (`nothing_large_saved`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ringtmp.errors import UsageError
from ringtmp.model.frozen_formats import FrozenAs

LARGEST = 127
#: Behind the name of a weight: the name of its scale.
SCALE = ".scale"


class KeptSmall(NamedTuple):
    """A weight as it is kept; `scale` has its dimensions, all but one of size 1."""

    values: torch.Tensor
    scale: torch.Tensor | None

    def converted(self) -> torch.Tensor:
        """Fresh memory, laid out as the small tensor is."""
        whole = self.values.to(torch.float32)
        return whole if self.scale is None else whole.mul_(self.scale)

    def rows(self, embedding: Any, indices: torch.Tensor, *rest: Any) -> torch.Tensor:
        """`embedding` of the converted weight, of which only the rows asked for are converted."""
        found: torch.Tensor = embedding(self.values, indices, *rest).to(torch.float32)
        if self.scale is None:
            return found
        by_row = self.scale.shape[0] > 1 or self.values.shape[0] == 1
        return found.mul_(embedding(self.scale, indices, *rest) if by_row else self.scale)


def kept_small(name: str, tensor: torch.Tensor, kept: FrozenAs, axis: int = 0) -> KeptSmall:
    """UsageError for a weight that is not finite, which has no scale."""
    tensor, dtype = tensor.detach(), getattr(torch, kept.name)
    if not kept.scaled:
        return KeptSmall(tensor.to(dtype), None)
    others = [each for each in range(tensor.dim()) if each != axis]
    largest = torch.linalg.vector_norm(tensor, float("inf"), dim=others, keepdim=True)
    if not bool(torch.isfinite(largest).all()):
        raise UsageError(
            f"--frozen-as {kept.name}: {name} has values that are not finite; such a weight cannot be kept so"
        )
    scale = largest / LARGEST
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    values = (tensor / scale).round_().clamp_(-LARGEST, LARGEST).to(dtype)
    return KeptSmall(values, scale)


def of_owned(name: str, owned: Mapping[str, torch.Tensor]) -> KeptSmall:
    return KeptSmall(owned[name], owned.get(f"{name}{SCALE}"))


class Converted:
    """The float32 copies that are in use, by their memory. A program has one, and is run by one thread."""

    def __init__(self) -> None:
        # As long as something refers to a piece of memory weakly, no other gets its identity.
        self._sources: dict[StorageWeakRef, KeptSmall] = {}

    def of(self, small: KeptSmall) -> torch.Tensor:
        made = small.converted()
        self._sources[_memory(made)] = small
        return made

    @contextmanager
    def nothing_large_saved(self) -> Iterator[None]:
        """While a program runs: for a copy, or a view of one, autograd keeps what it was made from. Whatever else is to be
        done with what autograd saves is done to the rest, as before."""
        sources = self._sources
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)

        def pack(tensor: torch.Tensor) -> Any:
            source = sources.get(_memory(tensor))
            if source is not None:
                return _View(source, tensor.shape, tensor.stride(), int(tensor.storage_offset()))
            # Not the tensor itself: an operator that saves what it gives would hold itself.
            return tensor.detach() if outer is None else outer[0](tensor)

        def unpack(saved: Any) -> Any:
            if isinstance(saved, _View):
                return saved.source.converted().as_strided(saved.shape, saved.stride, saved.offset)
            return saved if outer is None else outer[1](saved)

        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                yield
        finally:
            sources.clear()


def _memory(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


class _View(NamedTuple):
    source: KeptSmall
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
