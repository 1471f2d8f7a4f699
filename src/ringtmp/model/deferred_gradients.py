"""Operators whose weight gradient waits: backward gives the gradient of what entered at once and leaves the rest as a job.

Only the neighbour's gradient is urgent; a weight's is needed at the update and fills the time a node would wait. A job
makes the very kernel call autograd would have made, on operands laid out alike, and adds its result to the parameter
as autograd does: the same bits. Where that does not hold, an operator goes through ordinary autograd:

    a parameter that is read more than once    its gradients are summed within the microbatch first
    operands with unusual strides              autograd picks another kernel call

A large weight's gradient is computed where the one before it was: the C library gives memory of that size back at once, and
every page of it would be faulted in again for every microbatch.

Parameters are held as they are, not as saved tensors: a saved tensor may come back as another object with no `grad`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ringtmp.model.portable_layer import Graph, Op, Ref
from ringtmp.system.resources import REUSED_UP_TO_BYTES

aten = torch.ops.aten


class Job(NamedTuple):
    """Deferred work, with its size."""

    size: int  # multiply-adds
    work: Callable[[], None]
    parameters: tuple[torch.Tensor, ...]  # whose gradients it adds to


class DoneAtOnce(list[Job]):
    """Jobs of a node that has nothing to gain from waiting. `done` hears of each."""

    def __init__(self, done: Callable[[Job], None]) -> None:
        super().__init__()
        self._done = done

    def append(self, job: Job) -> None:
        job.work()
        self._done(job)


class Room(threading.local):
    """Memory for a large product that is added to something right away and then needed no more, one of each thread."""

    memory: torch.Tensor | None = None

    def product(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Good until the next one."""
        shape = (left.shape[0], right.shape[1])
        count = math.prod(shape)
        if left.device.type != "cpu" or count * left.element_size() <= REUSED_UP_TO_BYTES:
            return left.mm(right)
        if self.memory is None or self.memory.dtype != left.dtype or len(self.memory) < count:
            self.memory = None  # before there are two
            self.memory = torch.empty(count, dtype=left.dtype)
        return torch.mm(left, right, out=self.memory[:count].view(shape))

    def leave(self) -> None:
        self.memory = None


ROOM = Room()


def at_once(
    parameters: Iterable[torch.Tensor], done: Callable[[Job], None] = lambda job: None
) -> list[Job] | None:  # fmt: skip
    """Where jobs of a node that does not wait go, if there is anything to gain from not leaving them to autograd."""
    return DoneAtOnce(done) if any(map(_large, parameters)) else None


def _large(parameter: torch.Tensor) -> bool:
    candidate = parameter.dim() == 2 and parameter.requires_grad and parameter.device.type == "cpu"
    return candidate and parameter.nbytes > REUSED_UP_TO_BYTES


class Recording:
    """Where the jobs of the microbatch being run go. A program has one and is run by one thread."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        rows = x.dim() - 1
        width = weight.shape[1]
        plain = rows in (1, 2) and x.is_contiguous() and x.stride()[-2:] == (width, 1) and weight.stride() == (width, 1)
        if not (plain and weight.requires_grad):
            return aten.linear.default(x, weight, bias)
        if rows == 1:
            return _apply(_Linear, x, weight, bias, self.jobs)
        # What torch does with three dimensions, and where: outside, so that what leaves may be changed in place.
        flat = _apply(_Linear, x.view(-1, width), weight, bias, self.jobs)
        return flat.view(x.shape[0], x.shape[1], weight.shape[0])

    def embedding(
        self,
        weight: torch.Tensor,
        indices: torch.Tensor,
        padding_idx: int = -1,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Any:
        if sparse or not weight.requires_grad:
            return aten.embedding.default(weight, indices, padding_idx, scale_grad_by_freq, sparse)
        return _apply(_Embedding, weight, indices, padding_idx, scale_grad_by_freq, self.jobs)

    def convolution(self, dimensions: int) -> Callable[..., Any]:
        ordinary = (aten.conv1d, aten.conv2d, aten.conv3d)[dimensions - 1].default

        def run(
            x: torch.Tensor,
            weight: torch.Tensor,
            bias: torch.Tensor | None = None,
            stride: Sequence[int] = (1,),
            padding: Sequence[int] = (0,),
            dilation: Sequence[int] = (1,),
            groups: int = 1,
        ) -> Any:
            if x.dim() != dimensions + 2 or not weight.requires_grad:
                return ordinary(x, weight, bias, stride, padding, dilation, groups)
            spread = [list(each) * (dimensions // len(each)) for each in (stride, padding, dilation)]
            return _apply(_Convolution, x, weight, bias, (*spread, False, [0] * dimensions, groups), self.jobs)

        return run


def waiting_variants(graph: Graph, recording: Recording) -> dict[int, Callable[..., Any]]:
    """For the operations whose weight gradient may wait, by position: what to call instead."""
    reads: dict[int, int] = {}
    for value in (*(each for op in graph.ops for each in _flat(op)), *graph.outputs):
        if isinstance(value, Ref):
            reads[value.slot] = reads.get(value.slot, 0) + 1
    alone = {
        slot
        for slot, each in enumerate(graph.inputs)
        if each.kind == "parameter" and not each.kept and reads.get(slot, 0) == 1
    }  # fmt: skip
    variants: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
        "aten.linear.default": (recording.linear, (1, 2)),
        "aten.embedding.default": (recording.embedding, (0,)),
        "aten.conv1d.default": (recording.convolution(1), (1, 2)),
        "aten.conv2d.default": (recording.convolution(2), (1, 2)),
        "aten.conv3d.default": (recording.convolution(3), (1, 2)),
    }
    found: dict[int, Callable[..., Any]] = {}
    for position, op in enumerate(graph.ops):
        if op.target not in variants or op.kwargs:
            continue
        function, owned = variants[op.target]
        operands = [op.args[index] for index in owned if index < len(op.args) and op.args[index] is not None]
        if all(isinstance(each, Ref) and each.slot in alone for each in operands):
            found[position] = function
    return found


def _flat(op: Op) -> list[Any]:
    """Every reference an operation makes, those in lists included."""
    found: list[Any] = []
    rest: list[Any] = [*op.args, *op.kwargs.values()]
    while rest:
        value = rest.pop()
        if isinstance(value, Ref):
            found.append(value)
        else:
            rest.extend(getattr(value, "values", ()))
    return found


def _apply(function: Any, *arguments: Any) -> Any:
    return function.apply(*arguments)


def _accumulate(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """As autograd does at a leaf: the first gradient is kept, laid out like the parameter; later ones are added."""
    if parameter.grad is not None:
        parameter.grad.add_(gradient)
    elif gradient.stride() == parameter.stride():
        parameter.grad = gradient
    else:
        parameter.grad = torch.empty_like(parameter).copy_(gradient)


def _those(*parameters: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    return tuple(each for each in parameters if each is not None)


class _Linear(torch.autograd.Function):
    """x (rows, width), both dense; weight (out, width), dense."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, jobs: list[Job]) -> Any:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.jobs = weight, bias, jobs
        turned = weight.t()
        return torch.mm(x, turned) if bias is None else torch.addmm(bias, x, turned)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x = ctx.saved_tensors[0].detach()  # else a job would hold on to the whole graph before it
        weight, bias = ctx.weight, ctx.bias

        def work() -> None:
            with torch.no_grad():
                turned = gradient.t()
                # The first gradient stays with the parameter.
                _accumulate(weight, turned.mm(x) if weight.grad is None else ROOM.product(turned, x))
                if bias is not None and bias.requires_grad:
                    _accumulate(bias, gradient.sum(0))

        ctx.jobs.append(Job(x.shape[0] * weight.numel(), work, _those(weight, bias)))
        return gradient.mm(weight) if ctx.needs_input_grad[0] else None, None, None, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, indices: torch.Tensor, padding: int, scaled: bool, jobs: list[Job]
    ) -> Any:
        ctx.save_for_backward(indices)
        ctx.weight, ctx.padding, ctx.scaled, ctx.jobs = weight, padding, scaled, jobs
        return aten.embedding.default(weight, indices, padding, scaled)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (indices,) = ctx.saved_tensors
        weight, padding, scaled = ctx.weight, ctx.padding, ctx.scaled

        def work() -> None:
            with torch.no_grad():
                _accumulate(
                    weight, aten.embedding_dense_backward.default(gradient, indices, len(weight), padding, scaled)
                )

        ctx.jobs.append(Job(gradient.numel(), work, (weight,)))
        return None, None, None, None, None


class _Convolution(torch.autograd.Function):
    """`settings`: stride, padding, dilation, transposed, output padding, groups."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        settings: tuple[Any, ...],
        jobs: list[Job],
    ) -> Any:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.settings, ctx.jobs = weight, bias, settings, jobs
        return aten.convolution.default(x, weight, bias, *settings)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x = ctx.saved_tensors[0].detach()
        weight, bias, settings = ctx.weight, ctx.bias, ctx.settings
        sizes = None if bias is None else list(bias.shape)

        def work() -> None:
            with torch.no_grad():
                mask = [False, True, bias is not None and bias.requires_grad]
                _, of_weight, of_bias = aten.convolution_backward.default(gradient, x, weight, sizes, *settings, mask)
                _accumulate(weight, of_weight)
                if bias is not None and bias.requires_grad:
                    _accumulate(bias, of_bias)

        ctx.jobs.append(Job(gradient.numel() * math.prod(weight.shape[1:]), work, _those(weight, bias)))
        entering = None
        if ctx.needs_input_grad[0]:
            mask = [True, False, False]
            entering = aten.convolution_backward.default(gradient, x, weight, sizes, *settings, mask)[0]
        return entering, None, None, None, None
