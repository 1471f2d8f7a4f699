"""Run a layer's graph under autograd, operator by operator, with the bits and about the speed of eager mode.

A graph is compiled once into a list of calls with their argument slots; running it fills a list of values and drops
each value after its last use, as Python's own reference counts would have done in eager mode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ringtmp.errors import ProtocolError
from ringtmp.model.operators import resolve
from ringtmp.model.portable import Graph, Items, Named, Op, Ref, Value

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_LAYOUTS = {"strided": torch.strided}
_FORMATS = {
    "contiguous_format": torch.contiguous_format,
    "preserve_format": torch.preserve_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
}


def dtype_of(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise ProtocolError(f"unknown dtype {name!r}")
    return _DTYPES[name]


class Program:
    """A compiled graph. `run(inputs, owned)` returns its flat outputs."""

    def __init__(self, graph: Graph) -> None:
        self.changes_inputs = graph.changes_inputs
        self._input_count = sum(1 for each in graph.inputs if each.kind == "input")
        self._inputs = [(each.kind == "input", each.name) for each in graph.inputs]
        self._slots = len(graph.inputs) + len(graph.ops)
        self._outputs = [_compile_value(value, self._slots) for value in graph.outputs]
        last_use = _last_uses(graph)
        self._calls: list[tuple[Callable[..., Any], Any, Any, tuple[int, ...]]] = []
        for index, op in enumerate(graph.ops):
            slot = len(graph.inputs) + index
            args = [_compile_value(value, slot) for value in op.args]
            kwargs = {name: _compile_value(value, slot) for name, value in op.kwargs.items()}
            self._calls.append((resolve(op.target), _packer(args), kwargs or None, last_use.get(slot, ())))

    def run(self, inputs: Sequence[torch.Tensor], owned: Mapping[str, torch.Tensor]) -> list[Any]:
        if len(inputs) != self._input_count:
            raise ProtocolError(f"the layer takes {self._input_count} tensors and got {len(inputs)}")
        arriving = iter(inputs)
        values: list[Any] = [next(arriving) if own else owned[name] for own, name in self._inputs]
        for function, pack, kwargs, done in self._calls:
            if kwargs is None:
                result = function(*pack(values))
            else:
                result = function(*pack(values), **{name: make(values) for name, make in kwargs.items()})
            values.append(result)
            for slot in done:
                values[slot] = None
        return [make(values) for make in self._outputs]


_Make = Callable[[list[Any]], Any]


def _packer(makers: list[_Make]) -> Callable[[list[Any]], list[Any]]:
    return lambda values: [make(values) for make in makers]


def _compile_value(value: Value, before: int) -> _Make:
    """A function from the values so far to the argument."""
    if isinstance(value, Ref):
        slot = value.slot
        if not 0 <= slot < before:
            raise ProtocolError(f"an operation refers to slot {slot}, before it is filled")
        return lambda values: values[slot]
    if isinstance(value, Items):
        makers = [_compile_value(item, before) for item in value.values]
        return lambda values: [make(values) for make in makers]
    constant = _constant(value) if isinstance(value, Named) else value
    return lambda values: constant


def _constant(value: Named) -> Any:
    if value.kind == "device":
        return torch.device("cpu")
    tables: dict[str, Mapping[str, Any]] = {"dtype": _DTYPES, "layout": _LAYOUTS, "memory_format": _FORMATS}
    table = tables[value.kind]
    if value.name not in table:
        raise ProtocolError(f"unknown {value.kind} {value.name!r}")
    return table[value.name]


def _references(value: Value) -> list[int]:
    if isinstance(value, Ref):
        return [value.slot]
    if isinstance(value, Items):
        return [slot for item in value.values for slot in _references(item)]
    return []


def _op_references(op: Op) -> list[int]:
    return [slot for value in (*op.args, *op.kwargs.values()) for slot in _references(value)]


def _last_uses(graph: Graph) -> dict[int, tuple[int, ...]]:
    """For each operation's slot: the slots nobody needs after it, itself included when nobody reads it."""
    kept = {slot for value in graph.outputs for slot in _references(value)}
    last: dict[int, int] = {slot: slot for slot in range(len(graph.inputs), len(graph.inputs) + len(graph.ops))}
    for index, op in enumerate(graph.ops):
        for used in _op_references(op):
            last[used] = len(graph.inputs) + index
    done: dict[int, list[int]] = {}
    for slot, user in last.items():
        if slot not in kept:
            done.setdefault(user, []).append(slot)
    return {user: tuple(slots) for user, slots in done.items()}
