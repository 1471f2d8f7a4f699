"""Autograd at the edges of a segment: gradients leave it as they would pass through in one process."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ringtmp.errors import ProtocolError
from ringtmp.wire.tensors import ALIGNMENT

Gradient = torch.Tensor | None


class WrongGradient(ProtocolError):  # noqa: N818
    """A gradient does not have the shape of what it belongs to: the tensor at `position` among those that left."""

    def __init__(self, position: int, given: tuple[int, ...], wanted: tuple[int, ...]) -> None:
        super().__init__(f"a gradient of shape {given} for an output of {wanted}")
        self.position = position


class _Entering(torch.autograd.Function):
    """A tensor enters. Its gradient is caught here as it comes: a leaf's `grad` would be copied to the layout of the leaf, and
    the layer before the cut, which must compute with what it would have got in one process, would give other bits."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, caught: list[Gradient], position: int, copied: bool) -> Any:
        ctx.set_materialize_grads(False)
        ctx.caught, ctx.position = caught, position
        return copied_alike(tensor) if copied else tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Gradient) -> Any:
        ctx.caught[ctx.position] = gradient
        return None, None, None, None


def enter(
    tensors: Sequence[torch.Tensor], wants: Sequence[bool], written: Container[int] = ()
) -> tuple[list[Any], list[Gradient]]:
    """The tensors as a segment takes them in training, and where their gradients will be. One that comes several times
    enters once: its gradients add up in the order of its users, as they would in one process. `written`: positions of those
    that the segment may change in place, which it does to a copy."""
    caught: list[Gradient] = [None] * len(tensors)
    values: list[Any] = []
    entered: dict[int, Any] = {}
    same = first_of(tensors)
    copied = {first for position, first in enumerate(same) if position in written}
    for position, (tensor, wanted) in enumerate(zip(tensors, wants, strict=True)):
        if same[position] == position:
            leaf = tensor.detach().requires_grad_(wanted)
            if wanted:
                entered[position] = _entering(leaf, caught, position, position in copied)
            else:
                entered[position] = copied_alike(leaf) if position in copied else leaf
        values.append(entered[same[position]])
    return values, caught


def _entering(leaf: torch.Tensor, caught: list[Gradient], position: int, copied: bool) -> Any:
    function: Any = _Entering
    return function.apply(leaf, caught, position, copied)


def copied_alike(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the strides and the distance from a 64-byte boundary of the original, on which kernels depend."""
    tensor = tensor.detach()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    offset = tensor.data_ptr() % ALIGNMENT // tensor.element_size()
    if tensor.numel() == 0 or (offset == 0 and extent == tensor.numel()):
        return tensor.clone()
    storage = torch.empty(offset + extent, dtype=tensor.dtype).untyped_storage()
    # Not a view of a larger tensor: what is computed from it may be changed in place like anything else.
    copy = torch.empty(0, dtype=tensor.dtype).set_(storage, offset, tensor.shape, tensor.stride())
    once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())
    copy[once].copy_(tensor[once])
    return copy


def first_of(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """For each of these, the position of the first that is the same tensor: its own, for most."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(each), position) for position, each in enumerate(tensors))


def detached(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Leaves with the values of these, wanting gradients where they do. What is one tensor stays one."""
    made: dict[int, torch.Tensor] = {}
    for position, first in enumerate(first_of(tensors)):
        if position == first:
            made[position] = tensors[position].detach().requires_grad_(tensors[position].requires_grad)
    return [made[first] for first in first_of(tensors)]


def once_each(tensors: Sequence[torch.Tensor]) -> tuple[tuple[int, ...], list[torch.Tensor | None]]:
    """What is one tensor travels once: which are the same (nothing, if none are), and holes where one comes again."""
    same = first_of(tensors)
    if same == tuple(range(len(tensors))):
        return (), list(tensors)
    return same, [each if first == at else None for at, (first, each) in enumerate(zip(same, tensors, strict=True))]


def whole(tensors: Sequence[torch.Tensor | None], same: Sequence[int], wants: Sequence[bool]) -> list[torch.Tensor]:
    """The tensors that `once_each` took apart."""
    same = same or range(len(tensors))
    if not len(same) == len(tensors) == len(wants):
        raise ProtocolError(
            f"{len(tensors)} tensors came with {len(wants)} wishes, and {len(same)} say which are the same"
        )
    found: list[torch.Tensor] = []
    for position, first in enumerate(same):
        tensor = tensors[first] if 0 <= first <= position else None
        if tensor is None or (first < position and tensors[position] is not None) or wants[first] != wants[position]:
            raise ProtocolError(f"tensor {position} is said to be the same as tensor {first}, which it cannot be")
        found.append(tensor)
    return found


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


@contextmanager
def nothing_saved() -> Iterator[None]:
    """Forward as with gradients, which for some operators (LSTM) is another kernel with other bits than without, and
    nothing is stored: there will be no backward."""
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing):
        yield


def roots_and_seeds(
    outputs: Sequence[torch.Tensor], arriving: Sequence[Gradient]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Where backward begins, and with what: of outputs that want a gradient those that get one."""
    roots, seeds = [], []
    for position, (output, gradient) in enumerate(zip(outputs, arriving, strict=True)):
        if output.requires_grad and gradient is not None:
            if gradient.shape != output.shape:
                raise WrongGradient(position, tuple(gradient.shape), tuple(output.shape))
            roots.append(output)
            seeds.append(gradient.to(output.device))
    return roots, seeds


def run_backward(roots: Sequence[torch.Tensor], seeds: Sequence[torch.Tensor]) -> None:
    """What `torch.autograd.backward(roots, seeds)` does once it has compared shapes, for which it imports a computer
    algebra system (0.6 s on every node); we have compared them ourselves."""
    torch.autograd.Variable._execution_engine.run_backward(
        tuple(roots), tuple(seeds), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def add_together(parameters: Sequence[torch.Tensor], backward: Callable[[], None]) -> None:
    """The gradients that this backward pass gives are added to those before it by one call, which an accelerator hears sooner
    than one for every parameter. The bits are the same."""
    before = [each.grad for each in parameters]
    for each in parameters:
        each.grad = None
    backward()
    sums, more = [], []
    for parameter, known in zip(parameters, before, strict=True):
        if known is not None and parameter.grad is not None:
            sums.append(known)
            more.append(parameter.grad)
        if known is not None:
            parameter.grad = known
    if sums:
        with torch.no_grad():
            torch._foreach_add_(sums, more)
