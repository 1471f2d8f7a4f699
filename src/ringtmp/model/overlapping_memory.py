"""Which tensors lie in the same bytes of memory, and which of those a model may not have.

One Parameter under two names is one tensor here as well. Two Parameters in one memory are not: in one process every
update of one changes the other, and on a ring each has memory of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ringtmp.errors import UsageError

#: A name in errors, and the tensor.
Named = tuple[str, torch.Tensor]


def refuse_overlapping(tensors: Iterable[Named]) -> None:
    """Of a model's parameters and buffers: what training changes lies where nothing else does."""
    for (one, first), (other, second) in overlaps(tensors):
        if _is_trained(first) or _is_trained(second):
            raise UsageError(
                f"{one} and {other} are two tensors in the same memory, so training one would change the other, and on a "
                "ring each has memory of its own. If they are meant to be one, share the Parameter itself "
                "(decoder.weight = encoder.weight); otherwise give one a copy (.clone())"
            )


def overlaps(tensors: Iterable[Named]) -> Iterator[tuple[Named, Named]]:
    """Pairs of different tensors with a byte in common. Of tensors that lie apart, each is looked at once."""
    spans = sorted(
        ((*span, place, each) for place, each in enumerate(tensors) if (span := _span(each[1])) is not None),
        key=lambda item: item[:3],
    )
    reaching: list[tuple[int, Named, int]] = []  # those that reach further than the start of the next, in their order
    for start, end, place, each in spans:
        reaching = [item for item in reaching if item[2] > start]
        for before, other, _ in reaching:
            if each[1] is not other[1] and overlapping(each[1], other[1]):
                yield (other, each) if before < place else (each, other)
        reaching.append((place, each, end))


def overlapping(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether any element of one lies where an element of the other does."""
    one, other = _span(a), _span(b)
    if one is None or other is None:
        return False
    (first, stop), (start, end) = one, other
    if stop <= start or end <= first:
        return False
    size, lowest = a.dtype.itemsize, min(first, start)
    if size != b.dtype.itemsize or (first - start) % size:
        return True  # one memory, two kinds of numbers: not worth telling apart
    taken = torch.zeros((max(stop, end) - lowest) // size, dtype=torch.bool)
    taken.as_strided(a.shape, a.stride(), (first - lowest) // size).fill_(True)
    return bool(taken.as_strided(b.shape, b.stride(), (start - lowest) // size).any())


def named_tensors(module: nn.Module, prefix: str = "") -> Iterator[Named]:
    """Its parameters and buffers."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        yield prefix + name, tensor


def _is_trained(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and tensor.requires_grad


def _span(tensor: torch.Tensor) -> tuple[int, int] | None:
    """The address of its first byte, and of the one after the last; None where it lies nowhere, as on the meta device."""
    if is_lazy(tensor) or tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
        return None
    try:
        start = tensor.data_ptr()
    except RuntimeError:  # a tensor made of others, which has no memory of its own
        return None
    if not start:
        return None
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + extent * tensor.dtype.itemsize
