"""Which weights are cut how, so that least is sent. Pure: shapes are worked out on torch's meta device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ringtmp.model.portable_layer import Graph, OwnedTensor, Ref
from ringtmp.model.run_graph import Program, dtype_of
from ringtmp.strategies.tensor.cut_tensors import Cut
from ringtmp.strategies.tensor.cutting import BY_INPUTS, Cuts, Cutting, Way

#: Blocks that outputs may lie in: keys and values; queries, keys and values.
GROUPS = (2, 3)


def shapes_of(graph: Graph, inputs: Sequence[torch.Tensor], tensors: Mapping[str, OwnedTensor]) -> list[Any]:
    """Of every value, on torch's meta device: tensors without memory, and sizes."""
    every = Graph(graph.inputs, graph.ops, tuple(Ref(at) for at in range(len(graph.inputs) + len(graph.ops))), False)
    owned = {
        each.name: torch.empty(tensors[each.name].shape, dtype=dtype_of(tensors[each.name].dtype), device="meta")
        for each in graph.inputs
        if each.kind != "input"
    }
    with torch.no_grad():
        return Program(every, "meta").run(list(inputs), owned)


def best_cuts(
    graph: Graph, inputs: Sequence[torch.Tensor], tensors: Mapping[str, OwnedTensor], workers: int, least: int
) -> Cuts:
    """Of every weight that is cut by outputs: would it be better by inputs, and in which blocks do its outputs lie (queries,
    keys and values)? Whatever sends least."""
    values = shapes_of(graph, inputs, tensors)
    groups: dict[str, int] = {}
    best = Cutting(graph, values, tensors, Way(workers, least))
    for name in [name for name, cut in best.cuts.items() if cut == Cut(0) and len(tensors[name].shape) > 1]:
        for each in (BY_INPUTS, *GROUPS):
            shape = tensors[name].shape
            if not (shape[1] % workers == 0 if each == BY_INPUTS else Cut(0, each).divides(shape[0], workers)):
                continue
            other = Cutting(graph, values, tensors, Way(workers, least, groups={**groups, name: each}))
            if other.program.sent(workers, True) < best.program.sent(workers, True):
                groups[name], best = each, other
    return best.cuts
