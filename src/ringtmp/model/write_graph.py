"""One exported program becomes a portable graph, operator by operator, with what is known of every value in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch.fx import Node

from ringtmp.errors import UsageError
from ringtmp.model.allowed_operators import ASSERTIONS, GRAD_MODE
from ringtmp.model.analyse_graph import Fact
from ringtmp.model.check_exported_operator import refuse_operator
from ringtmp.model.flatten_graph import Flat, Mode, Region, Step
from ringtmp.model.memory_aliases import Memory
from ringtmp.model.portable_layer import CUSTOM, Argument, Custom, Graph, Input, Items, Named, Op, Ref

#: Batch size of the example a layer is exported with: not 0 or 1, which export would freeze, and rarely a layer's
#: own width, so that a frozen batch is noticed.
EXAMPLE_BATCH = 3


def _fact(node: Node) -> Fact:
    value = node.meta.get("val")
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed(stack.values()))[0] if stack else ""
    if isinstance(value, torch.Tensor):
        shape = tuple(int(each) if is_fixed(each) else str(each) for each in value.shape)
        sizes: list[Any] = list(value.shape)
        numbers = [int(each) if is_fixed(each) else each.node.hint / EXAMPLE_BATCH for each in sizes]
        size = math.prod(numbers) * value.dtype.itemsize
        return Fact(shape, str(value.dtype).removeprefix("torch."), path=path, sample_bytes=float(size))
    return Fact(None, many=isinstance(value, tuple | list), path=path)


class GraphWriter:
    """Writes one graph, step after step. `places` are the nodes whose values fill the input slots."""

    def __init__(self, label: str, flat: Flat, inputs: Sequence[Input], places: Sequence[Node]) -> None:
        self._label = label
        self._flat = flat
        self._inputs = tuple(inputs)
        self._slots = {node: slot for slot, node in enumerate(places)}
        self._ops: list[Op] = []
        self.facts = [_fact(node) for node in places]
        self._customs: list[Custom] = []
        self._modes: list[int] = []  # where the gradient mode before each open block is kept

    def graph(self, outputs: Sequence[Any], entering: set[Node]) -> Graph:
        values = tuple(self._value(each) for each in outputs)
        graph = Graph(self._inputs, tuple(self._ops), values, False, tuple(self._customs))
        return msgspec.structs.replace(graph, changes_inputs=bool(Memory(graph).written_inputs()))

    def add(self, step: Step) -> None:
        if isinstance(step, Mode):
            if step.enabled is not None:
                self._modes.append(self._op(GRAD_MODE, (step.enabled,)))
            else:
                self._op(GRAD_MODE, (Ref(self._modes.pop()),))
        elif isinstance(step, Region):
            self._custom(step)
        elif step in self._slots:
            return  # a result of a custom function
        elif step.op == "call_function":
            self._call(step)
        else:
            raise UsageError(f"{self._label} contains a {step.op} node, which cannot travel")

    def _op(
        self,
        target: str,
        args: tuple[Argument, ...],
        kwargs: dict[str, Argument] | None = None,
        node: Node | None = None,
    ) -> int:
        self._ops.append(Op(target, args, kwargs or {}))
        self.facts.append(Fact(None, many=target == CUSTOM) if node is None else _fact(node))
        return len(self._inputs) + len(self._ops) - 1

    def _value(self, value: Any) -> Argument:
        return _value(self._label, value, self._flat, self._slots)

    def _call(self, node: Node) -> None:
        function, filled = _without_out(node)
        target = _FILLED.get(_target(function), _target(function))
        if target in ASSERTIONS:
            return
        refuse_operator(self._label, target, node)
        args = tuple(self._value(each) for each in node.args)
        kwargs = {key: self._value(each) for key, each in node.kwargs.items() if key not in ("pin_memory", filled)}
        self._slots[node] = self._op(target, args, kwargs, node)
        if filled is not None:
            written = self._value(node.kwargs[filled]), Ref(self._slots[node])
            self._slots[node] = self._op("aten.copy_.default", written, None, node)

    def _custom(self, region: Region) -> None:
        outside = [*region.entering, *region.captured]
        forward = self._part(region.forward, [*region.entered, *region.captured], [*region.results, *region.saved])
        backward = self._part(region.backward, [*region.saved, *region.gradients], region.returned)
        if forward.changes_inputs:
            raise UsageError(
                f"{self._label}: {region.name} changes a tensor it was given in place: work on a clone instead"
            )
        self._customs.append(Custom(region.name, forward, backward, region.differentiable))
        made = self._op(CUSTOM, (len(self._customs) - 1, *(self._value(each) for each in outside)))
        for place, node in enumerate(region.given):
            if node is not None or region.hook:
                slot = self._op("getitem", (Ref(made), place), None, node or region.entering[0])
                # whoever reads a parameter with a hook from here on reads what the function gives
                self._slots.update({each: slot for each in (node, region.entering[0] if region.hook else None) if each})

    def _part(self, steps: Sequence[Node], places: Sequence[Node], outputs: Sequence[Any]) -> Graph:
        """A graph within this one, for a custom function."""
        inputs = [Input("input", str(number)) for number in range(len(places))]
        writer = GraphWriter(self._label, self._flat, inputs, places)
        for step in steps:
            writer.add(step)
        return writer.graph(outputs, set(places))


def is_fixed(size: Any) -> bool:
    """A symbolic size that export found to be a number is a number."""
    return isinstance(size, int) or size.node.maybe_as_int() is not None


#: Memory as it was found is not data, and may be somebody's: whoever asks for it gets zeros, to be overwritten.
_FILLED = {"aten.empty_like.default": "aten.zeros_like.default", "aten.empty.memory_format": "aten.zeros.default"}


def _target(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    name = getattr(target, "__name__", str(target))
    module = getattr(target, "__module__", "")
    if module in ("_operator", "builtins", "math", "torch") or name.startswith("sym_"):
        return {"min": "sym_min", "max": "sym_max"}.get(name, name)
    return f"{module}.{name}"


def _without_out(node: Node) -> tuple[Any, str | None]:
    """The operator, or for one that writes its result into `out` the same without, and the name of that argument."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload) or not any(each.is_out for each in target._schema.arguments):
        return target, None
    (filled,) = [each.name for each in target._schema.arguments if each.is_out][:1]
    wanted = [(each.name, str(each.type)) for each in target._schema.arguments if not each.is_out]
    packet: Any = target._overloadpacket
    for name in packet.overloads():
        other = getattr(packet, name)
        if [(each.name, str(each.type)) for each in other._schema.arguments] == wanted:
            return other, filled
    return target, None


def _value(label: str, value: Any, flat: Flat, slots: dict[Node, int]) -> Argument:
    if isinstance(value, Node):
        source = flat.source(value)
        if source not in slots:
            raise UsageError(f"{label} depends on a value that cannot travel: {value.name}")
        return Ref(slots[source])
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return Items(tuple(_value(label, item, flat, slots) for item in value))
    if isinstance(value, torch.dtype):
        return Named("dtype", str(value).removeprefix("torch."))
    if isinstance(value, torch.layout):
        return Named("layout", str(value).removeprefix("torch."))
    if isinstance(value, torch.memory_format):
        return Named("memory_format", str(value).removeprefix("torch."))
    if isinstance(value, torch.device):
        return Named("device", "node")
    raise UsageError(f"{label} passes a {type(value).__name__} to an operator, which cannot travel")
