"""The gradient of a linear layer as what it is made of: the rows that entered its matrix and the errors of what left it.

    gradient of the matrix = errors^T rows        gradient of the bias = the sum of errors

For few rows the two are smaller than the gradient. A layer is plain where one product with a matrix, and what is added to it,
is all that is trained in it; what else it does (flatten, ReLU, dropout) does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ringtmp.model.compute_formats import rounded
from ringtmp.model.deferred_gradients import Job, Recording, aten, waiting_variants
from ringtmp.model.portable_layer import Layer, Ref
from ringtmp.model.run_graph import Program

LINEAR = "aten.linear.default"


class Factors(NamedTuple):
    """Of one microbatch: row r of the one belongs to row r of the other."""

    rows: torch.Tensor  # (rows, inputs)
    errors: torch.Tensor  # (rows, outputs)


class Catching(Recording):
    """Instead of work that waits: the factors of linear operators. All others go through ordinary autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0  # of the newest product

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        self.rows = x.numel() // weight.shape[1]
        caught: Any = _Caught
        return caught.apply(x if x.device.type == "meta" else rounded(x), weight, bias, self.jobs)

    def embedding(self, *given: Any) -> Any:
        return aten.embedding.default(*given)

    def convolution(self, dimensions: int) -> Callable[..., Any]:
        ordinary: Callable[..., Any] = (aten.conv1d, aten.conv2d, aten.conv3d)[dimensions - 1].default
        return ordinary


class _Caught(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, jobs: list[Job]) -> Any:
        near = weight.to(x.dtype)
        ctx.save_for_backward(x, near)
        ctx.jobs, ctx.dtype = jobs, weight.dtype
        return aten.linear.default(x, near, None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        rows, errors = x.detach().reshape(-1, weight.shape[1]), gradient.reshape(-1, weight.shape[0])
        ctx.jobs.append(Factors(rows.contiguous().to(ctx.dtype), errors.contiguous().to(ctx.dtype)))
        return gradient @ weight if ctx.needs_input_grad[0] else None, None, None, None


class Linear(NamedTuple):
    """Which of a plain layer's tensors are the matrix and what is added."""

    matrix: str
    bias: str | None


def plain_linear(layer: Layer) -> Linear | None:
    """None: the layer is none."""
    graph = layer.train
    trained = {each.name for each in layer.tensors if each.trainable}
    products = [at for at in waiting_variants(graph, Catching()) if graph.ops[at].target == LINEAR]
    if not trained or len(products) != 1:
        return None
    owned = [graph.inputs[each.slot].name for each in graph.ops[products[0]].args[1:3] if isinstance(each, Ref)]
    if set(owned) != trained or len(owned) != len(trained):
        return None
    return Linear(owned[0], owned[1] if len(owned) > 1 else None)


def factor_values(
    layer: Layer, entering: Sequence[torch.Tensor], tensors: Mapping[str, torch.Tensor], samples: int
) -> float:
    """Values in the factors of one sample, by shapes alone; 0: the layer is not plain. An operator whose shapes depend on
    values cannot tell: then what enters the layer is taken to be what meets its matrix."""
    linear = plain_linear(layer)
    if linear is None:
        return 0.0
    outputs, inputs = tensors[linear.matrix].shape
    catching = Catching()
    program = Program(layer.train, "meta", recording=catching)
    owned = {name: each.detach().to("meta") for name, each in tensors.items()}
    try:
        with torch.no_grad():
            program.run([each.detach().to("meta") for each in entering], owned, [])
        rows = catching.rows / samples
    except (NotImplementedError, RuntimeError):
        rows = entering[0].numel() / inputs / samples
    return rows * (inputs + outputs)
