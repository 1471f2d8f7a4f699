"""A portable layer as an ordinary `nn.Module` again: the user's names, trainable, no need of the user's class."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ringtmp.model.output_tree import leaves_of, nest
from ringtmp.model.portable_layer import Layer
from ringtmp.model.run_graph import Program

#: Kinds of operators that are named when a layer is printed.
_MOST_NAMED = 6
Shapes = tuple[tuple[int, ...], ...]


class PortableLayer(nn.Module):
    """Runs the layer's training graph in training mode and its evaluation graph in evaluation mode. Prints as the operators
    it consists of, what leaves it for a sample, and its tensors."""

    def __init__(self, layer: Layer, tensors: Sequence[torch.Tensor], leaving: Shapes = ()) -> None:
        """`leaving`: the shape of every output, of one sample."""
        super().__init__()
        self._output = layer.output
        self._said = operators_text(layer) + (f" -> {', '.join(map(shape_text, leaving))}" if leaving else "")
        self._train_program = Program(layer.train)
        self._evaluate_program = Program(layer.evaluate)
        self._constants: dict[str, torch.Tensor] = {}
        for each, tensor in zip(layer.tensors, tensors, strict=True):
            if each.kind == "constant":
                self._constants[each.name] = tensor
                continue
            *path, last = each.name.split(".")
            owner = descend(self, path, Tensors)
            if each.kind == "parameter":
                owner.register_parameter(last, nn.Parameter(tensor, requires_grad=each.trainable))
            else:
                owner.register_buffer(last, tensor, persistent=each.saved)

    def forward(self, x: Any) -> Any:
        owned = {**self._constants, **dict(self.named_buffers()), **dict(self.named_parameters())}
        program = self._train_program if self.training else self._evaluate_program
        return nest(self._output, program.run(leaves_of(x), owned))

    def extra_repr(self) -> str:
        own = tensors_text(self)
        return f"{self._said}; {own}" if own else self._said


class Tensors(nn.Module):
    """Tensors of a module inside a layer, under its name. Their layer computes with them; this cannot."""

    def extra_repr(self) -> str:
        return tensors_text(self)


def revive(layers: Sequence[tuple[Layer, Sequence[torch.Tensor]]], leaving: Sequence[Shapes] = ()) -> nn.Sequential:
    """The whole model, named as the user's was. `leaving`: the shapes of each layer's outputs, where they are known."""
    known = list(leaving) if len(leaving) == len(layers) else [()] * len(layers)
    return in_sequence(
        (layer.name, PortableLayer(layer, tensors, shapes))
        for (layer, tensors), shapes in zip(layers, known, strict=True)
    )


def in_sequence(layers: Iterable[tuple[str, nn.Module]]) -> nn.Sequential:
    """A name with dots is a place in a sequence within the sequence."""
    model = nn.Sequential()
    for name, module in layers:
        *path, last = name.split(".")
        descend(model, path, nn.Sequential).add_module(last, module)
    return model


def descend(module: nn.Module, path: Sequence[str], kind: type[nn.Module]) -> nn.Module:
    for name in path:
        if name not in module._modules:
            module.add_module(name, kind())
        module = module.get_submodule(name)
    return module


def operators_text(layer: Layer) -> str:
    """aten.linear.default, aten.relu.default -> 'linear, relu'; each once, in the order they come."""
    targets = [op.target.split(".")[1] for op in layer.train.ops if op.target.startswith("aten.")]
    names = list(dict.fromkeys(name.strip("_") for name in targets))
    shown = ", ".join(names[:_MOST_NAMED]) or "identity"
    return f"{shown}, ... ({len(targets)} operators)" if len(names) > _MOST_NAMED else shown


def tensors_text(module: nn.Module) -> str:
    """Those of the module itself, without what lies in the modules inside."""
    parts = [
        f"{name} {shape_text(each.shape)}{'' if each.requires_grad else ' (frozen)'}"
        for name, each in module.named_parameters(recurse=False)
    ]
    parts += [f"{name} {shape_text(each.shape)}" for name, each in module.named_buffers(recurse=False)]
    return ", ".join(parts)


def shape_text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "number"
