"""A module that was cut into cells as one `nn.Module` again: the user's names, trainable, no need of the user's class.

Cells run in their order and hand tensors to each other by name, in one process and one autograd graph: what the whole
graph of the model computes, and what eager mode computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ringtmp.data.nested_inputs import arranged, leaves
from ringtmp.errors import UsageError
from ringtmp.model.output_tree import nest
from ringtmp.model.portable_layer import Layer, OwnedTensor, Value
from ringtmp.model.run_graph import Program
from ringtmp.model.to_module import Tensors, descend, operators_text, tensors_text

#: (inputs, samples) -> the inputs with something in the place of targets that are not there.
Completed = Callable[[Any, int], Any]


def is_cut(layers: Sequence[Layer]) -> bool:
    """Whether these are cells of a module, not a list of layers."""
    return any(layer.train_takes is not None for layer in layers)


class PortableModel(nn.Module):
    """Called as the user's module was: with a tensor, with several, or with keywords. It prints as its tensors, under the
    user's names, and its cells."""

    def __init__(
        self,
        cells: Sequence[tuple[Layer, Sequence[torch.Tensor]]],
        state: Sequence[tuple[str, str]],
        input_names: Sequence[str],
        completed: Completed = lambda inputs, samples: inputs,
    ) -> None:
        """`state`: every name of the model's `state_dict`, and the first name of that tensor. `input_names`: where each of
        the inputs lies in a batch."""
        super().__init__()
        self._input_names = tuple(input_names)
        self._completed = completed
        self._cells = [layer for layer, _ in cells]
        self._programs = {
            training: [Program(layer.graph(training)) for layer in self._cells] for training in (True, False)
        }
        self._done = {training: _done(self._cells, training) for training in (True, False)}
        self._constants: dict[str, torch.Tensor] = {}
        found = {
            layer.full_name(each): (each, tensor)
            for layer, tensors in cells
            for each, tensor in zip(layer.tensors, tensors, strict=True)
            if each.kind != "constant"
        }
        made = {first: _registrable(*found[first]) for first in found}
        unsaved = [(name, name) for name, (each, _) in found.items() if not each.saved]
        for name, first in (*state, *unsaved):
            self._register(name, found[first][0], made[first])
        for layer, tensors in cells:
            for each, tensor in zip(layer.tensors, tensors, strict=True):
                if (name := layer.full_name(each)) not in found:
                    self._constants[name] = tensor

    def _register(self, name: str, described: OwnedTensor, tensor: torch.Tensor) -> None:
        *path, last = name.split(".")
        owner = descend(self, path, Tensors)
        if isinstance(tensor, nn.Parameter):
            owner.register_parameter(last, tensor)
        else:
            owner.register_buffer(last, tensor, persistent=described.saved)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inputs, complete = self._inputs(args, kwargs)
        registered = (self.named_buffers(remove_duplicate=False), self.named_parameters(remove_duplicate=False))
        owned = {**self._constants, **{name: tensor for each in registered for name, tensor in each}}
        values: dict[Value, torch.Tensor] = {(0, place): each for place, each in enumerate(inputs)}
        outputs: list[torch.Tensor] = []
        for index, layer in enumerate(self._cells):
            taken = [values[each] for each in layer.takes(index, self.training)]
            mine = {each.name: owned[layer.full_name(each)] for each in layer.tensors}
            outputs = self._programs[self.training][index].run(taken, mine)
            values.update({(index + 1, place): each for place, each in enumerate(outputs)})
            for value in self._done[self.training][index]:
                values.pop(value, None)
        if not complete:  # a loss over targets that nobody gave
            outputs = [each if each.dim() else None for each in outputs]  # type: ignore[misc]
        return nest(self._cells[-1].output, outputs, own=True)

    def _inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[torch.Tensor], bool]:
        """The tensors in the order of the model, and whether all were given."""
        if args and kwargs:
            raise UsageError("give all inputs by place, or all by name")
        inputs = kwargs or (args[0] if len(args) == 1 else args)
        given = leaves(inputs)
        inputs = self._completed(inputs, len(given[0]))
        if self._input_names and isinstance(inputs, Mapping):
            inputs = arranged(inputs, self._input_names, "the call")
        found = leaves(inputs)
        if self._input_names and len(found) != len(self._input_names):
            raise UsageError(f"the model takes {len(self._input_names)} tensors, and the call has {len(found)}")
        return found, len(found) == len(given)

    def extra_repr(self) -> str:
        own = [tensors_text(self)] if tensors_text(self) else []
        return "\n".join([*own, *(f"cell {layer.name}: {operators_text(layer)}" for layer in self._cells)])


def _registrable(described: OwnedTensor, tensor: torch.Tensor) -> torch.Tensor:
    if described.kind == "parameter":
        return nn.Parameter(tensor, requires_grad=described.trainable)
    return tensor


def _done(cells: Sequence[Layer], training: bool) -> list[list[Value]]:
    """By cell: what no cell behind it takes."""
    last: dict[Value, int] = {}
    for index, layer in enumerate(cells):
        last.update({(index + 1, place): index for place in range(len(layer.graph(training).outputs))})
        last.update(dict.fromkeys(layer.takes(index, training), index))
    return [[value for value, user in last.items() if user == index] for index in range(len(cells))]
