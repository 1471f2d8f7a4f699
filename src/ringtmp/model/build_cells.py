"""Any `nn.Module` becomes cells: exported whole, compared with eager mode, cut.

The module is one layer first, with all that is checked of a layer; then its graphs are cut at the places worth planning
for. What the cells compute together is compared once more with the whole graph, every cell on its own as on a node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import nn

from ringtmp.errors import UsageError
from ringtmp.model.cut_cells import CutCell, Whole, cut
from ringtmp.model.cut_places import at_blocks, barriers, legal, worth_planning
from ringtmp.model.export import first_names
from ringtmp.model.graph_anatomy import Anatomy, Fact
from ringtmp.model.portable_layer import Layer, Value
from ringtmp.model.run_graph import Program


@dataclass(frozen=True)
class Cutting:
    """What a user says about where to cut."""

    blocks: tuple[str, ...] = ()  # patterns of module names; cut between such modules alone
    labels: tuple[int, ...] = ()  # positions of the inputs that must stay on the master
    places: tuple[int, ...] | None = None  # by hand: before these operations of the training graph, and nowhere else


@dataclass(frozen=True)
class Cell:
    """A cell, and a sample of what enters and leaves it in training."""

    known: CutCell
    samples: int
    entering: list[torch.Tensor]
    described: list[Fact]  # what enters
    leaving: list[torch.Tensor]
    crossing: float  # bytes of a sample that are made up to here and used behind, without weights


def cells_of(
    module: nn.Module, layer: Layer, facts: tuple[Any, Any], cutting: Cutting,
    known: Callable[[int], None],
) -> list[CutCell]:  # fmt: skip
    """`layer`: the module as one layer, under its own names. `known` is told the number of cells."""
    ranks = {first_names(module)[name]: at for at, (name, _) in enumerate(module.named_parameters())}
    named = tuple(
        msgspec.structs.replace(each, full=each.name, rank=ranks.get(each.name, -1)) for each in layer.tensors
    )
    whole = Whole(msgspec.structs.replace(layer, tensors=named), *facts)
    cells = cut(whole, chosen_places(whole, cutting), cutting.labels)
    known(len(cells))
    return cells


def state_of(module: nn.Module) -> tuple[tuple[str, str], ...]:
    """The module's `state_dict`: every name, and the first name of that tensor."""
    names = first_names(module)
    return tuple((name, names.get(name, name)) for name in module.state_dict())


def chosen_places(whole: Whole, cutting: Cutting) -> list[int]:
    anatomy = whole.anatomy(True)
    places = legal(anatomy, cutting.labels)
    if cutting.places is not None:
        return _by_hand(anatomy, cutting, places)
    if not cutting.blocks:
        return worth_planning(anatomy, places)
    found = at_blocks(anatomy, places, cutting.blocks)
    if not found:
        near = sorted({fact.path for fact in whole.train if fact.path})[:6]
        raise UsageError(
            f"no place to cut lies between modules called {', '.join(cutting.blocks)}; modules are called, for instance, "
            f"{', '.join(near)}"
        )
    return found


def _by_hand(anatomy: Anatomy, cutting: Cutting, places: Sequence[int]) -> list[int]:
    for place in cutting.places or ():
        if place not in places:
            found = (each.why for each in barriers(anatomy, cutting.labels) if each.first <= place <= each.last)
            inside = 0 < place < len(anatomy.graph.ops)
            why = next(found, "two tensors that may be one would be separated") if inside else "the model ends there"
            raise UsageError(f"the model cannot be cut before its operation {place}: {why}")
    return sorted(set(cutting.places or ()))


def why_uncut(whole: Whole, cutting: Cutting) -> str:
    """What stands in the way, most of all."""
    anatomy = whole.anatomy(True)
    longest = max(barriers(anatomy, cutting.labels), key=lambda each: each.last - each.first, default=None)
    if longest is None:
        return "it has only one operator with parameters"
    return longest.why


class Samples:
    """A sample on its way through the cells in training, each cell on its own as on nodes, without leaving a trace."""

    def __init__(self, inputs: Sequence[torch.Tensor], samples: int, cells: Sequence[CutCell]) -> None:
        self._cells = cells
        self._samples = samples
        self._values: dict[Value, torch.Tensor] = {(0, place): each for place, each in enumerate(inputs)}
        self._facts = {(0, place): _input_fact(each, samples) for place, each in enumerate(inputs)}
        self._last: dict[Value, int] = {}
        for index, cell in enumerate(cells):
            self._last.update(dict.fromkeys(cell.layer.takes(index, True), index))

    def through(self, index: int, tensors: dict[str, torch.Tensor]) -> Cell:
        layer, values = self._cells[index].layer, self._values
        entering = [values[each] for each in layer.takes(index, True)]
        owned = {
            each.name: tensors[each.name].detach().requires_grad_(each.trainable)
            if each.kind == "parameter"
            else tensors[each.name].clone()
            for each in layer.tensors
        }
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            given = [each.detach().requires_grad_(each.requires_grad).clone() for each in entering]
            leaving = Program(layer.train).run(given, owned)
        made = [each.detach().requires_grad_(each.requires_grad) for each in leaving]
        values.update({(index + 1, place): each for place, each in enumerate(made)})
        described = [self._facts[each] for each in layer.takes(index, True)]
        self._facts.update({(index + 1, place): each for place, each in enumerate(self._cells[index].trained)})
        for value in [value for value in values if self._last.get(value, -1) <= index]:
            del values[value]
        crossing = sum(self._facts[value].sample_bytes for value in values if value[0] and self._is_made(value))
        return Cell(self._cells[index], self._samples, entering, described, made, crossing)

    def _is_made(self, value: Value) -> bool:
        """Not a weight that several cells share, which the plan keeps on one node."""
        shape = self._facts[value].shape or ()
        return any(isinstance(each, str) for each in shape)


def _input_fact(tensor: torch.Tensor, samples: int) -> Fact:
    shape: tuple[int | str, ...] = tuple(tensor.shape)
    return Fact(("samples", *shape[1:]) if shape and shape[0] == samples else shape)
