"""Any `nn.Module` becomes cells: exported whole, compared with eager mode, cut.

The module is one layer first, with all that is checked of a layer; then its graphs are cut at the places worth planning
for. What the cells compute together is compared once more with the whole graph, every cell on its own as on a node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import nn

from ringtmp.errors import UsageError
from ringtmp.model.cut_cells import Whole, cut
from ringtmp.model.cut_places import at_blocks, barriers, legal, worth_planning
from ringtmp.model.export import first_names
from ringtmp.model.portable_layer import Layer, Value
from ringtmp.model.run_graph import Program


@dataclass(frozen=True)
class Cutting:
    """What a user says about where to cut."""

    blocks: tuple[str, ...] = ()  # patterns of module names; cut between such modules alone
    labels: tuple[int, ...] = ()  # positions of the inputs that must stay on the master


@dataclass(frozen=True)
class Cell:
    """A cell as data, its tensors by local name, and a sample of what enters and leaves it in training."""

    layer: Layer
    tensors: dict[str, torch.Tensor]
    entering: list[torch.Tensor]
    leaving: list[torch.Tensor]
    leaving_evaluating: list[torch.Tensor]
    crossing: list[torch.Tensor]  # everything that is made up to here and used behind


def cells_of(
    module: nn.Module, layer: Layer, facts: tuple[Any, Any], tensors: dict[str, torch.Tensor], cutting: Cutting,
    known: Callable[[int], None],
) -> list[tuple[Layer, dict[str, torch.Tensor]]]:  # fmt: skip
    """`layer`: the module as one layer, under its own names."""
    ranks = {first_names(module)[name]: at for at, (name, _) in enumerate(module.named_parameters())}
    named = tuple(
        msgspec.structs.replace(each, full=each.name, rank=ranks.get(each.name, -1)) for each in layer.tensors
    )
    whole = Whole(msgspec.structs.replace(layer, tensors=named), *facts)
    cells = cut(whole, chosen_places(whole, cutting), cutting.labels)
    known(len(cells))
    return [(cell, {each.name: tensors[each.full] for each in cell.tensors}) for cell in cells]


def chosen_places(whole: Whole, cutting: Cutting) -> list[int]:
    anatomy = whole.anatomy(True)
    places = legal(anatomy, cutting.labels)
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


def why_uncut(whole: Whole, cutting: Cutting) -> str:
    """What stands in the way, most of all."""
    anatomy = whole.anatomy(True)
    longest = max(barriers(anatomy, cutting.labels), key=lambda each: each.last - each.first, default=None)
    if longest is None:
        return "it has only one operator with parameters"
    return longest.why


class Samples:
    """A sample on its way through the cells, in training as on nodes, without leaving a trace."""

    def __init__(self, inputs: Sequence[torch.Tensor], cells: Sequence[Layer]) -> None:
        self._cells = cells
        self._values: dict[bool, dict[Value, torch.Tensor]] = {
            training: {(0, place): each for place, each in enumerate(inputs)} for training in (True, False)
        }
        self._last: dict[bool, dict[Value, int]] = {True: {}, False: {}}
        for training, found in self._last.items():
            for index, cell in enumerate(cells):
                found.update(dict.fromkeys(cell.takes(index, training), index))

    def through(self, index: int, tensors: dict[str, torch.Tensor]) -> Cell:
        layer = self._cells[index]
        entering, leaving = self._run(index, tensors, training=True)
        _, evaluated = self._run(index, tensors, training=False)
        crossing = [each for value, each in self._values[True].items() if value[0] and self._last[True][value] > index]
        return Cell(layer, tensors, entering, leaving, evaluated, crossing)

    def _run(
        self, index: int, tensors: dict[str, torch.Tensor], training: bool
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        layer, values = self._cells[index], self._values[training]
        entering = [values[each] for each in layer.takes(index, training)]
        owned = {
            each.name: tensors[each.name].detach().requires_grad_(each.trainable)
            if each.kind == "parameter"
            else tensors[each.name].clone()
            for each in layer.tensors
        }
        with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(training):
            given = [each.detach().requires_grad_(each.requires_grad).clone() for each in entering]
            leaving = Program(layer.graph(training)).run(given, owned)
        made = [each.detach().requires_grad_(each.requires_grad) for each in leaving]
        values.update({(index + 1, place): each for place, each in enumerate(made)})
        for value in [value for value in values if self._last[training].get(value, -1) <= index]:
            del values[value]
        return entering, made


def checked_together(cells: Iterator[Cell]) -> None:
    raise NotImplementedError
