"""A layer whose frozen weights are kept small (small_frozen_weights.py), and back: what its tensors and graphs say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ringtmp.errors import ProtocolError
from ringtmp.model.frozen_formats import FLOAT32, FROZEN_AS, FrozenAs
from ringtmp.model.frozen_parameters import frozen_names
from ringtmp.model.portable_layer import Graph, Input, Layer, OwnedTensor, count
from ringtmp.model.small_frozen_weights import SCALE, kept_small, of_owned

_ACROSS = (nn.Linear, nn.Embedding, nn.EmbeddingBag, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def channel_axes(module: nn.Module) -> dict[str, int]:
    """Frozen float32 weights of linear, embedding and convolution layers, under all their names, and the dimension of their
    output channels."""
    found: dict[int, int] = {}
    for child in module.modules():
        axis = 1 if isinstance(child, _TRANSPOSED) or type(child).__name__ == "Conv1D" else 0
        names = ["weight"] if isinstance(child, (*_ACROSS, *_TRANSPOSED)) or axis == 1 else []
        if isinstance(child, nn.MultiheadAttention):
            names += ["in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"]
        for weight in map(child._parameters.get, names):  # as an attribute it may be computed, which may change buffers
            if (
                isinstance(weight, nn.Parameter)
                and not is_lazy(weight)
                and weight.dim() > 1
                and weight.dtype == torch.float32
            ):
                found.setdefault(id(weight), axis)
    own = module.named_parameters(remove_duplicate=False)
    return {name: found[id(each)] for name, each in own if id(each) in found and not each.requires_grad}


def shrink(
    layer: Layer, tensors: Mapping[str, torch.Tensor], kept: FrozenAs, axes: Mapping[str, int]
) -> tuple[Layer, dict[str, torch.Tensor]]:
    """The layer with its frozen weights kept so. `axes`: which, by their name in the model or else in the layer."""
    frozen = frozen_names(layer)
    small = {each.name for each in layer.tensors if each.name in frozen and (each.full or each.name) in axes}
    if not kept.small or not small:
        return layer, dict(tensors)
    described: list[OwnedTensor] = []
    made: dict[str, torch.Tensor] = {}
    for each in layer.tensors:
        if each.name not in small:
            described.append(each)
            made[each.name] = tensors[each.name]
            continue
        values, scale = kept_small(layer.full_name(each), tensors[each.name], kept, axes[each.full or each.name])
        described.append(msgspec.structs.replace(each, dtype=kept.name))
        made[each.name] = values
        if scale is not None:
            name, full = f"{each.name}{SCALE}", f"{each.full}{SCALE}" if each.full else ""
            shape = tuple(scale.shape)
            described.append(
                OwnedTensor(name, "scale", FLOAT32, shape, trainable=False, saved=True, full=full)
            )  # fmt: skip
            made[name] = scale
    train, evaluate = (_said(graph, small, kept.name) for graph in (layer.train, layer.evaluate))
    return msgspec.structs.replace(layer, train=train, evaluate=evaluate, tensors=tuple(described)), made


def _said(graph: Graph, small: set[str], kept: str) -> Graph:
    inputs = tuple(
        msgspec.structs.replace(each, kept=kept if each.kind != "input" and each.name in small else "")
        for each in graph.inputs
    )
    return msgspec.structs.replace(graph, inputs=inputs)


def _small(layer: Layer) -> set[str]:
    """Names of the weights that are kept so."""
    return {each.name for graph in (layer.train, layer.evaluate) for each in graph.inputs if each.kept}


def whole_layer(layer: Layer) -> Layer:
    """The layer with all its weights in float32, as if it had never been otherwise."""
    small = _small(layer)
    if not small:
        return layer
    described = (each for each in layer.tensors if each.kind != "scale")
    tensors = tuple(msgspec.structs.replace(each, dtype=FLOAT32) if each.name in small else each for each in described)
    train, evaluate = (_said(graph, set(), "") for graph in (layer.train, layer.evaluate))
    return msgspec.structs.replace(layer, train=train, evaluate=evaluate, tensors=tensors)


def enlarged(layer: Layer, tensors: Sequence[torch.Tensor]) -> tuple[Layer, list[torch.Tensor]]:
    """`whole_layer` with its tensors: for whoever asks for the model."""
    whole = whole_layer(layer)
    if whole is layer:
        return layer, list(tensors)
    there = {each.name: tensor for each, tensor in zip(layer.tensors, tensors, strict=True)}
    small = _small(layer)
    made = [
        of_owned(each.name, there).converted() if each.name in small else there[each.name] for each in whole.tensors
    ]
    return whole, made


def largest_converted_bytes(layer: Layer) -> int:
    """Of the float32 copies, of which there is one at a time."""
    small = {each.name for each in layer.train.inputs if each.kept}
    return max((4 * count(each.shape) for each in layer.tensors if each.name in small), default=0)


def check_kept(layer: Layer) -> None:
    """ProtocolError unless what a received layer says about its weights fits its tensors."""
    there = {each.name: each for each in layer.tensors}
    for each in (*layer.train.inputs, *layer.evaluate.inputs):
        if each.kept and not _fits(each, there):
            raise ProtocolError(f"layer {layer.name} says that {each.name} is kept as {each.kept}, and it is not")


def _fits(said: Input, there: Mapping[str, OwnedTensor]) -> bool:
    weight, scale = there.get(said.name), there.get(f"{said.name}{SCALE}")
    kinds = ("parameter", "constant")  # the latter: a copy of what another cell owns
    if weight is None or weight.kind not in kinds or said.kind not in kinds:
        return False
    if (weight.dtype, weight.trainable) != (said.kept, False):
        return False
    kept = FROZEN_AS.get(said.kept)
    if kept is None or not kept.small:
        return False
    if not kept.scaled:
        return True
    if scale is None or (scale.kind, scale.dtype, scale.trainable) != ("scale", FLOAT32, False):
        return False
    pairs = zip(scale.shape, weight.shape, strict=False)
    return len(scale.shape) == len(weight.shape) and all(size in (1, own) for size, own in pairs)
