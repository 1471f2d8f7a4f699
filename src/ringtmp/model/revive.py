"""A portable layer as an ordinary `nn.Module` again: the user's names, trainable, no need of the user's class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ringtmp.model.execute import Program
from ringtmp.model.export import nest
from ringtmp.model.portable import Layer


class PortableLayer(nn.Module):
    """Runs the layer's training graph in training mode and its evaluation graph in evaluation mode."""

    def __init__(self, layer: Layer, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._output = layer.output
        self._train_program = Program(layer.train)
        self._evaluate_program = Program(layer.evaluate)
        self._constants: dict[str, torch.Tensor] = {}
        for each, tensor in zip(layer.tensors, tensors, strict=True):
            if each.kind == "constant":
                self._constants[each.name] = tensor
                continue
            *path, last = each.name.split(".")
            owner = _descend(self, path, nn.Module)
            if each.kind == "parameter":
                owner.register_parameter(last, nn.Parameter(tensor, requires_grad=each.trainable))
            else:
                owner.register_buffer(last, tensor, persistent=each.saved)

    def forward(self, x: Any) -> Any:
        owned = {**self._constants, **dict(self.named_buffers()), **dict(self.named_parameters())}
        program = self._train_program if self.training else self._evaluate_program
        return nest(self._output, program.run(pytree.tree_leaves(x), owned))


def revive(layers: Sequence[tuple[Layer, Sequence[torch.Tensor]]]) -> nn.Sequential:
    """The whole model, named as the user's was."""
    model = nn.Sequential()
    for layer, tensors in layers:
        *path, last = layer.name.split(".")
        _descend(model, path, nn.Sequential).add_module(last, PortableLayer(layer, tensors))
    return model


def _descend(module: nn.Module, path: Sequence[str], kind: type[nn.Module]) -> nn.Module:
    for name in path:
        if name not in module._modules:
            module.add_module(name, kind())
        module = module.get_submodule(name)
    return module
