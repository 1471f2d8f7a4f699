"""What every node is told of a run: the strategy's settings, what the model takes, and how its weights are cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch

from ringtmp.model.portable_layer import Graph, Layer, OwnedTensor
from ringtmp.model.run_graph import dtype_of
from ringtmp.model.whole_graph import whole_graph
from ringtmp.strategies.tensor.choose_cuts import best_cuts, shapes_of
from ringtmp.strategies.tensor.cut_tensors import Cut, part_shape
from ringtmp.strategies.tensor.cutting import Cuts, Cutting, Way
from ringtmp.strategies.tensor.local_program import LocalProgram
from ringtmp.wire.messages import Crossing

#: Samples with which shapes are worked out; no size of a model is likely to be the same.
TRIED_WITH = 13


class Told(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The `settings` of the plan that goes to the nodes."""

    least: int
    inputs: tuple[Crossing, ...]
    cuts: dict[str, tuple[int, int]]

    def every_cut(self) -> Cuts:
        return {name: Cut(*each) for name, each in self.cuts.items()}


def samples(inputs: Sequence[Crossing]) -> list[torch.Tensor]:
    shapes = [(TRIED_WITH, *each.rest) if each.per_sample else each.rest for each in inputs]
    return [torch.empty(shape, dtype=dtype_of(e.dtype), device="meta") for shape, e in zip(shapes, inputs, strict=True)]


def graph_of(layers: Sequence[Layer], inputs: int, training: bool) -> Graph:
    """The whole model as one graph; tensors under their names in the model."""
    if training:
        layers = [
            msgspec.structs.replace(each, evaluate=each.train, evaluate_takes=each.train_takes) for each in layers
        ]  # fmt: skip
    return whole_graph(layers, inputs)


def tensors_of(layers: Sequence[Layer]) -> dict[str, OwnedTensor]:
    return {layer.full_name(each): each for layer in layers for each in layer.tensors}


def local_layer(layer: Layer, cuts: Cuts, workers: int) -> Layer:
    """The layer as a worker owns it: its tensors in the shapes of a part."""
    tensors = tuple(
        msgspec.structs.replace(each, shape=part_shape(each.shape, cuts.get(layer.full_name(each)), workers))
        for each in layer.tensors
    )
    return msgspec.structs.replace(layer, tensors=tensors)


@dataclass(frozen=True)
class Programs:
    train: LocalProgram
    evaluate: LocalProgram


def decide(layers: Sequence[Layer], inputs: Sequence[Crossing], workers: int, least: int) -> Cuts:
    tensors, graph = tensors_of(layers), graph_of(layers, len(inputs), True)
    return best_cuts(graph, samples(inputs), tensors, workers, least)


def programs(layers: Sequence[Layer], told: Told, rank: int, workers: int) -> Programs:
    """One worker's own, for cuts that are decided."""
    tensors, entering = tensors_of(layers), samples(told.inputs)

    def cut(training: bool) -> LocalProgram:
        graph = graph_of(layers, len(entering), training)
        way = Way(workers, told.least, rank, fixed=told.every_cut())
        return Cutting(graph, shapes_of(graph, entering, tensors), tensors, way).program

    return Programs(cut(True), cut(False))
