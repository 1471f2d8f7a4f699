"""The whole model against its graphs, where it is in memory anyway: what one layer leaves for another past their tensors.

Layer by layer a tensor that one keeps in a Python list for another looks like a constant. In a row it does not: the live
layers and their graphs go forward and backward once on the same samples, and every gradient must have equal bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ringtmp.errors import UsageError
from ringtmp.model.call_module import called
from ringtmp.model.check_layer import Found, buffers_kept, trained, without_gradients
from ringtmp.model.output_tree import leaves_of, nest
from ringtmp.model.portable_layer import Layer
from ringtmp.model.run_graph import Program
from ringtmp.system.resources import free_memory_bytes

_SEED = 21
#: Of the trained parameters: their gradients twice over, and what is made of them on the way.
_ROOM = 4


def fits(modules: Sequence[nn.Module], stored_bytes: float | None = None) -> bool:
    """Whether gradients of all that is trained fit beside the model, and what a pass stores; by default as much as the
    parameters take."""
    parameters = [each for module in modules for each in module.parameters()]
    needed = _ROOM * sum(each.nbytes for each in parameters if each.requires_grad)
    if stored_bytes is None:
        stored_bytes = sum(each.nbytes for each in parameters if not each.requires_grad)
    return needed + stored_bytes < free_memory_bytes()


def check_whole(
    modules: Sequence[nn.Module], layers: Sequence[tuple[Layer, Mapping[str, torch.Tensor]]], sample: Any
) -> None:
    """UsageError where the layers, run together, compute anything else than their graphs do."""
    names = [layer.name for layer, _ in layers]
    with torch.random.fork_rng(devices=[]):
        expected = _eager(names, modules, sample)
        found = _graphs(layers, sample)
    wrong = [what for what in expected if found.get(what) != expected[what]]
    if wrong:
        raise UsageError(
            "run together, the layers do not train as they do in eager mode: "
            f"{', '.join(wrong[:3])} comes out different. Does a layer hand a tensor to another one by other means than its "
            "return value (a list, an attribute, a global)? Return it instead"
        )


def _eager(names: Sequence[str], modules: Sequence[nn.Module], sample: Any) -> Found:
    whole = nn.ModuleList(modules).train()
    parameters = {
        f"{name}.{local}": each
        for name, module in zip(names, modules, strict=True)
        for local, each in module.named_parameters()
    }
    with without_gradients(parameters), buffers_kept(whole):
        value = pytree.tree_map(torch.clone, sample)
        for position, module in enumerate(modules):
            torch.default_generator.manual_seed(_SEED + position)
            value = called(module, value)
        return trained([], leaves_of(value), parameters, {})


def _graphs(layers: Sequence[tuple[Layer, Mapping[str, torch.Tensor]]], sample: Any) -> Found:
    value = pytree.tree_map(torch.clone, sample)
    parameters: dict[str, torch.Tensor] = {}
    for position, (layer, tensors) in enumerate(layers):
        owned: dict[str, torch.Tensor] = {}
        for each in layer.tensors:
            tensor = tensors[each.name].detach()
            owned[each.name] = tensor.requires_grad_(each.trainable) if each.kind == "parameter" else tensor.clone()
            if each.kind == "parameter":
                parameters[f"{layer.name}.{each.name}"] = owned[each.name]
        torch.default_generator.manual_seed(_SEED + position)
        value = nest(layer.output, Program(layer.train).run(pytree.tree_leaves(value), owned))
    return trained([], leaves_of(value), parameters, {})
