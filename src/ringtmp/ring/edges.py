"""Autograd at the edges of a segment: gradients leave it as they would pass through in one process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

Gradient = torch.Tensor | None


class _Entering(torch.autograd.Function):
    """A tensor enters. Its gradient is caught here as it comes: a leaf's `grad` would be laid out anew like the leaf, and
    the layer before the cut, which must compute with what it would have got in one process, would give other bits."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, caught: list[Gradient], position: int) -> Any:
        ctx.set_materialize_grads(False)
        ctx.caught, ctx.position = caught, position
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Gradient) -> Any:
        ctx.caught[ctx.position] = gradient
        return None, None, None


def enter(tensors: Sequence[torch.Tensor], wants: Sequence[bool]) -> tuple[list[Any], list[Gradient]]:
    """The tensors as a segment takes them in training, and where their gradients will be."""
    caught: list[Gradient] = [None] * len(tensors)
    values: list[Any] = []
    for position, (tensor, wanted) in enumerate(zip(tensors, wants, strict=True)):
        leaf = tensor.detach().requires_grad_(wanted)
        values.append(_entering(leaf, caught, position) if wanted else leaf)
    return values, caught


def _entering(leaf: torch.Tensor, caught: list[Gradient], position: int) -> Any:
    function: Any = _Entering
    return function.apply(leaf, caught, position)


class Saved:
    """What autograd stores; memory two operators share counts once, that of `known` tensors not at all."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        self.total = 0
        self._seen = {each.untyped_storage().data_ptr() for each in known}

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.total += storage.nbytes()
        # Not the tensor itself: an operator that saves what it gives would hold itself, until a garbage collection.
        return tensor.detach()


@contextmanager
def saved_bytes(known: Iterable[torch.Tensor]) -> Iterator[Saved]:
    saved = Saved(known)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        yield saved


def run_backward(roots: Sequence[torch.Tensor], seeds: Sequence[torch.Tensor]) -> None:
    """What `torch.autograd.backward(roots, seeds)` does once it has compared shapes, for which it imports a computer
    algebra system (0.6 s on every node); we have compared them ourselves."""
    torch.autograd.Variable._execution_engine.run_backward(
        tuple(roots), tuple(seeds), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def gradients_of(root: torch.Tensor, inputs: Sequence[torch.Tensor]) -> list[Gradient]:
    """Of a scalar, with respect to tensors it was made from; None where it does not depend on one."""
    caught: Sequence[Gradient] = torch.autograd.Variable._execution_engine.run_backward(
        (root,), (torch.ones_like(root),), False, False, tuple(inputs), allow_unreachable=True, accumulate_grad=False
    )
    return list(caught)
