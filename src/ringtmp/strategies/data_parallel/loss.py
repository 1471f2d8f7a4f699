"""A loss of the user's own where every worker needs it: exported as a layer is, so that it travels as data and no code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ringtmp.errors import ProtocolError, UsageError
from ringtmp.model.export import EXAMPLE_BATCH, Exporter
from ringtmp.model.output_tree import leaves_of, nest
from ringtmp.model.portable_layer import Layer, OutputTree
from ringtmp.model.run_graph import Program, dtype_of
from ringtmp.runtime.losses import LossFunction
from ringtmp.wire.messages import Crossing


class _Flat(nn.Module):
    """The loss of flat tensors: what leaves the last layer, then the targets."""

    def __init__(self, loss: LossFunction, tree: OutputTree) -> None:
        super().__init__()
        self.loss = loss
        self._tree = tree

    def forward(self, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return self.loss(nest(self._tree, tensors[:-1], own=True), tensors[-1])


def exported(
    loss: LossFunction, last: Layer, leaving: Sequence[Crossing], targets: torch.Tensor
) -> tuple[Layer, list[torch.Tensor]]:
    """The loss as a layer that takes what leaves the last one, and the targets (`EXAMPLE_BATCH` of them are given)."""
    shapes = [(EXAMPLE_BATCH, *each.rest) if each.per_sample else each.rest for each in leaving]
    outputs = [torch.zeros(shape, dtype=dtype_of(each.dtype)) for shape, each in zip(shapes, leaving, strict=True)]
    layer, tensors = Exporter().export("loss", _Flat(loss, last.output), (*outputs, targets))
    if any(each.trainable for each in layer.tensors):
        raise UsageError("the loss has its own parameters, which would not be trained: move them into the model")
    return layer, list(tensors.values())


class Criterion:
    """The loss on a worker."""

    def __init__(self, layer: Layer, tensors: Sequence[torch.Tensor | None]) -> None:
        self._program = Program(layer.train)
        self._owned = {
            each.name: tensor for each, tensor in zip(layer.tensors, tensors, strict=True) if tensor is not None
        }

    def __call__(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        entering = [*leaves_of(outputs), targets]
        if self._program.changes_inputs:
            entering = [each.clone() for each in entering]
        (value,) = self._program.run(entering, self._owned)
        assert isinstance(value, torch.Tensor)
        return value


def not_there(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    raise ProtocolError("there is work to do, and the loss has not come")
