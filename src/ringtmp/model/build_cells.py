"""Any `nn.Module` becomes cells: exported whole, compared with eager mode, cut.

At first the module is one layer and is checked like any other. Then its graphs are cut at the places worth planning for,
and a sample goes through the cells, each on its own as on a node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
from torch import nn

from ringtmp.errors import UsageError
from ringtmp.model.analyse_graph import Anatomy, Fact
from ringtmp.model.blocks import at_blocks
from ringtmp.model.cut_cells import CutCell, Whole, cut
from ringtmp.model.cut_places import barriers, legal, worth_planning
from ringtmp.model.export import first_names
from ringtmp.model.portable_layer import Layer, Value
from ringtmp.model.recompute import changed_buffers
from ringtmp.model.run_graph import Program, dtype_of
from ringtmp.model.why_uncut import why_uncut


@dataclass(frozen=True)
class Cutting:
    """What is asked about where to cut."""

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
    trained: tuple[Fact, ...]  # what leaves it, in training and in evaluation
    evaluated: tuple[Fact, ...]
    crossing: float  # bytes of a sample that are made up to here and used behind
    weights: float  # bytes of weights that cells up to here share with cells behind, which travel with every microbatch
    waiting: float  # bytes of its own weights whose gradients wait for those of deeper cells, in every microbatch


def cells_of(
    module: nn.Module, layer: Layer, facts: tuple[Any, Any], cutting: Cutting
) -> tuple[list[CutCell], str]:  # fmt: skip
    """`layer`: the module as one layer, under its own names. The cells, and why there are no more."""
    names = first_names(module)
    ranks = {names[name]: at for at, (name, _) in enumerate(module.named_parameters())}
    named = tuple(
        msgspec.structs.replace(each, full=each.name, rank=ranks.get(each.name, -1)) for each in layer.tensors
    )
    whole = Whole(msgspec.structs.replace(layer, tensors=named), *facts)
    anatomy = whole.anatomies[0]
    cells = cut(whole, chosen_places(anatomy, cutting), cutting.labels)
    return cells, why_uncut(anatomy, len(cells), cutting.blocks, cutting.labels)


def state_of(module: nn.Module) -> tuple[tuple[str, str], ...]:
    """The module's `state_dict`: every name, and the first name of that tensor."""
    names = first_names(module)
    return tuple((name, names.get(name, name)) for name in module.state_dict())


def chosen_places(anatomy: Anatomy, cutting: Cutting) -> list[int]:
    places = legal(anatomy, cutting.labels)
    if cutting.places is not None:
        return _by_hand(anatomy, cutting, places)
    if cutting.blocks:
        return at_blocks(anatomy, places, cutting.blocks, cutting.labels)
    return worth_planning(anatomy, places)


def _by_hand(anatomy: Anatomy, cutting: Cutting, places: Sequence[int]) -> list[int]:
    for place in cutting.places or ():
        if place not in places:
            found = (each.why for each in barriers(anatomy, cutting.labels) if each.first <= place <= each.last)
            inside = 0 < place < len(anatomy.graph.ops)
            why = next(found, "two tensors that may be one would be separated") if inside else "the model ends there"
            raise UsageError(f"the model cannot be cut before its operation {place}: {why}")
    return sorted(set(cutting.places or ()))


class Samples:
    """Takes a sample through the cells in training, each cell on its own as on a node. The model is not changed."""

    def __init__(self, inputs: Sequence[torch.Tensor], samples: int, cells: Sequence[CutCell]) -> None:
        self._cells = cells
        self._samples = samples
        self._values: dict[Value, torch.Tensor] = {(0, place): each for place, each in enumerate(inputs)}
        self._facts = {(0, place): _input_fact(each, samples) for place, each in enumerate(inputs)}
        self._evaluated = dict(self._values) if torch.is_autocast_enabled("cpu") else None
        self._last: dict[Value, int] = {}
        for index, cell in enumerate(cells):
            self._last.update(dict.fromkeys(cell.layer.takes(index, True), index))

    def through(self, index: int, tensors: dict[str, torch.Tensor]) -> Cell:
        layer, values = self._cells[index].layer, self._values
        entering = [values[each] for each in layer.takes(index, True)]
        changed = changed_buffers(layer.train)
        owned = {
            each.name: tensors[each.name].clone()
            if each.kind != "parameter" and each.name in changed
            else tensors[each.name].detach().requires_grad_(each.trainable)
            for each in layer.tensors
        }
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            given = [each.detach().requires_grad_(each.requires_grad).clone() for each in entering]
            leaving = Program(layer.train).run(given, owned)
        leaving_sample = [each.detach().requires_grad_(each.requires_grad) for each in leaving]
        values.update({(index + 1, place): each for place, each in enumerate(leaving_sample)})
        described = [self._facts[each] for each in layer.takes(index, True)]
        trained = tuple(map(_as_found, self._cells[index].trained, leaving))
        evaluated = self._evaluate(index, tensors)
        self._facts.update({(index + 1, place): each for place, each in enumerate(trained)})
        for value in [value for value in values if self._last.get(value, -1) <= index]:
            del values[value]
        made = {value: self._facts[value].sample_bytes for value in values if value[0]}
        shared = {value for value in made if self._is_weight(value)}
        ends = {value for value in shared if value[0] - 1 == self._front and self._last[value] == len(self._cells) - 1}
        return Cell(
            self._cells[index], self._samples, entering, described, leaving=leaving_sample,
            trained=trained, evaluated=evaluated,
            crossing=sum(size for value, size in made.items() if value not in shared),
            weights=sum(made[value] for value in shared - ends),
            waiting=sum(made[value] for value in shared if value[0] == index + 1),
        )  # fmt: skip

    def _evaluate(self, index: int, tensors: dict[str, torch.Tensor]) -> tuple[Fact, ...]:
        """What leaves the cell in evaluation. Autocast alone gives numbers another type than the graphs were written with."""
        cell, values = self._cells[index], self._evaluated
        if values is None:
            return cell.evaluated
        owned = {each.name: tensors[each.name].detach().clone() for each in cell.layer.tensors}
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            given = [values[each].clone() for each in cell.layer.takes(index, False)]
            leaving = Program(cell.layer.evaluate).run(given, owned)
        values.update({(index + 1, place): each for place, each in enumerate(leaving)})
        return tuple(map(_as_found, cell.evaluated, leaving))

    def _is_weight(self, value: Value) -> bool:
        """A weight that several cells share; its size does not depend on the samples."""
        return not any(isinstance(each, str) for each in self._facts[value].shape or ())

    @property
    def _front(self) -> int:
        """The first cell with parameters. What it shares with the last cell is on the master twice and never travels."""
        trained = (at for at, each in enumerate(self._cells) if each.layer.parameters)
        return next(trained, 0)


def _as_found(fact: Fact, tensor: torch.Tensor) -> Fact:
    """What is known of a tensor, and the type it was found to have."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if not fact.is_tensor or dtype == fact.dtype:
        return fact
    return replace(fact, dtype=dtype, sample_bytes=fact.sample_bytes * tensor.itemsize / dtype_of(fact.dtype).itemsize)


def _input_fact(tensor: torch.Tensor, samples: int) -> Fact:
    shape: tuple[int | str, ...] = tuple(tensor.shape)
    return Fact(("samples", *shape[1:]) if shape and shape[0] == samples else shape)
