"""A model's evaluation as one graph: its layers or cells one after the other, tensors under their names in the model.

Pure: layers in, a graph out. What is asked of it: which outputs need the labels, which inputs are rows of an embedding,
which weights adapters are added to, and the graph without adapters, for weights to which they were added.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from ringtmp.errors import UsageError
from ringtmp.model.portable_layer import CUSTOM, Argument, Custom, Graph, Input, Items, Layer, Op, Ref, Value, slots

#: PEFT puts an adapter's own name before `weight`.
_ADAPTER = re.compile(r"(?P<layer>.+)\.lora_(?P<side>[AB])(?:\.(?P<name>[^.]+))?\.weight")
#: Of the linear layer beside them, in the names of its tensors.
_BASE = ".base_layer."


class AdapterTensor(NamedTuple):
    layer: str  # whose output it is added to
    side: str  # A or B
    name: str  # the adapter's own; empty where it has none


def adapter_tensor(name: str) -> AdapterTensor | None:
    """What a tensor's name says of an adapter that it belongs to."""
    found = _ADAPTER.fullmatch(name)
    return None if found is None else AdapterTensor(found["layer"], found["side"], found["name"] or "")


def name_before(name: str) -> str:
    """Of a tensor, before adapters were added to the model."""
    return name.replace(_BASE, ".")


_SUM, _PRODUCT, _SIZE = "aten.add.Tensor", "aten.mul.Tensor", "aten.sym_size."
#: Operators whose values are those of their first argument, all of them.
_SAME_VALUES = {
    "view", "reshape", "to", "contiguous", "flatten", "_unsafe_view", "alias", "detach", "clone", "unsqueeze", "squeeze",
    "_to_copy",
}  # fmt: skip
#: Of the operators that a linear layer may be: which argument is its weight. That of `linear` is outputs x inputs, others
#: are inputs x outputs.
_WEIGHT_AT = {"linear": 1, "addmm": 2, "mm": 1, "matmul": 1}


def whole_graph(layers: Sequence[Layer], inputs: int) -> Graph:
    """`inputs`: how many tensors enter the model. Input k is called str(k)."""
    slot_of: dict[str, int] = {}
    entering = [Input("input", str(place)) for place in range(inputs)]
    for layer in layers:
        names = {each.name: layer.full_name(each) for each in layer.tensors}
        for each in layer.evaluate.inputs:
            if each.kind != "input" and names[each.name] not in slot_of:
                slot_of[names[each.name]] = len(entering)
                entering.append(Input(each.kind, names[each.name]))
    values: dict[Value, Argument] = {(0, place): Ref(place) for place in range(inputs)}
    ops: list[Op] = []
    customs: list[Custom] = []
    outputs: tuple[Argument, ...] = ()
    for index, layer in enumerate(layers):
        graph = layer.evaluate
        names = {each.name: layer.full_name(each) for each in layer.tensors}
        taken = iter(layer.takes(index, False))
        here: list[Argument] = [
            values[next(taken)] if each.kind == "input" else Ref(slot_of[names[each.name]]) for each in graph.inputs
        ]
        for op in graph.ops:
            ops.append(_with(op, here.__getitem__, len(customs)))
            here.append(Ref(len(entering) + len(ops) - 1))
        customs += graph.customs
        outputs = tuple(_put(each, here.__getitem__) for each in graph.outputs)
        values.update({(index + 1, place): each for place, each in enumerate(outputs)})
    changes = any(layer.evaluate.changes_inputs for layer in layers)
    return Graph(tuple(entering), tuple(ops), outputs, changes, tuple(customs))


def depends_on(graph: Graph, place: int) -> list[bool]:
    """By output: whether the input of this place enters into it."""
    reached = {place}
    for slot, op in enumerate(graph.ops, len(graph.inputs)):
        if (taken := _taken(op)) & reached:
            reached.add(slot)
            if _name(op).endswith("_"):
                reached |= taken  # it writes into one of them
    return [bool(set(slots(each)) & reached) for each in graph.outputs]


def rows_of(layers: Sequence[Layer], inputs: int) -> dict[int, int]:
    """By the place of an input whose values are rows of an embedding: how many rows that has."""
    graph = whole_graph(layers, inputs or layers[0].evaluate.entering)
    shapes = {layer.full_name(each): each.shape for layer in layers for each in layer.tensors}
    found: dict[int, int] = {}
    for op in graph.ops:
        if op.target != "aten.embedding.default":
            continue
        table, chosen = op.args[0], _origin(graph, op.args[1])
        if isinstance(table, Ref) and table.slot < len(graph.inputs) and chosen is not None:
            shape = shapes.get(graph.inputs[table.slot].name)
            if shape:
                place = int(graph.inputs[chosen].name)
                found[place] = min(shape[0], found.get(place, shape[0]))
    return found


def _origin(graph: Graph, value: Argument) -> int | None:
    """The slot of the model's input that the value is, whatever its shape; None: it is computed."""
    slot = _source(graph, value)
    return slot if slot is not None and slot < len(graph.inputs) and graph.inputs[slot].kind == "input" else None


def _tensor(graph: Graph, value: Argument) -> int | None:
    """The slot of the model's own tensor that the value is; None: it is another."""
    slot = _source(graph, value)
    return slot if slot is not None and slot < len(graph.inputs) and graph.inputs[slot].kind != "input" else None


def _maker(graph: Graph, value: Argument) -> int | None:
    """The slot of the operator that computed the value; None: it entered the model."""
    slot = _source(graph, value)
    return slot if slot is not None and slot >= len(graph.inputs) else None


def _source(graph: Graph, value: Argument) -> int | None:
    """Where the value's numbers come from, whatever its shape; None: it is no tensor."""
    while isinstance(value, Ref) and value.slot >= len(graph.inputs):
        op = graph.ops[value.slot - len(graph.inputs)]
        if _name(op) not in _SAME_VALUES:
            break
        value = op.args[0]
    return value.slot if isinstance(value, Ref) else None


# -- with and without adapters ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Adapted:
    """A weight that an adapter is added to."""

    layer: str
    a: str  # the names of the adapter's tensors
    b: str
    scale: float
    turned: bool  # it is inputs x outputs, as transformers' Conv1D has it


@dataclass(frozen=True)
class AdapterUse:
    """One use of an adapter, `given + B(A(x)) * scale`: the slots of its operators, of which `total` is the sum."""

    layer: str
    a: str  # the names of its tensors
    b: str
    scale: float
    narrow: int
    wide: int
    scaled: int
    total: int
    given: Argument


def adapted_weights(graph: Graph) -> dict[str, Adapted]:
    """By the weight's name. UsageError where a product cannot be added to the weight without changing something else."""
    found: dict[str, Adapted] = {}
    uses: dict[int, set[int]] = {}  # of each weight, those with an adapter beside them
    for each in adapters_in(graph):
        made = _maker(graph, each.given)
        op = None if made is None else graph.ops[made - len(graph.inputs)]
        weight = None if op is None or _name(op) not in _WEIGHT_AT else _tensor(graph, op.args[_WEIGHT_AT[_name(op)]])
        if made is None or op is None or weight is None:
            raise UsageError(
                f"--merge: what {each.layer} gives is not that of a linear layer with a weight of its own, to which an adapter "
                "can be added; leave --merge out"
            )
        name = graph.inputs[weight].name
        here = Adapted(each.layer, each.a, each.b, each.scale, turned=_name(op) != "linear")
        if found.setdefault(name, here) != here:
            raise _shared(name, here.layer, f"{found[name].layer}, which has another adapter,")
        uses.setdefault(weight, set()).add(made)
    for slot, op in enumerate(graph.ops, len(graph.inputs)):
        for weight in {one for used in _taken(op) if (one := _tensor(graph, Ref(used))) in uses}:
            if slot not in uses[weight] and _name(op) not in _SAME_VALUES and not op.target.startswith(_SIZE):
                name = graph.inputs[weight].name
                raise _shared(name, found[name].layer, op.target)
    return found


def _shared(weight: str, layer: str, other: str) -> UsageError:
    return UsageError(
        f"--merge: {weight}, the weight of {layer} (which has an adapter), is used by {other} too, which would change with it; "
        "leave --merge out: a folder then gets the adapters alone, for PEFT"
    )


def without_adapters(graph: Graph) -> Graph:
    """`given + B(A(x)) * scale` becomes `given`, everywhere. Sizes that were read off what is gone are read off x. Tensors
    have the names they had before adapters were added."""
    instead: dict[int, Argument] = {}
    for each in adapters_in(graph):
        instead[each.total] = instead[each.scaled] = each.given
        instead[each.wide] = instead[each.narrow] = graph.ops[each.narrow - len(graph.inputs)].args[0]
    return _rebuilt(graph, instead)


def _users(graph: Graph) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for slot, op in enumerate(graph.ops, len(graph.inputs)):
        for used in _taken(op):
            found.setdefault(used, []).append(slot)
    return found


def adapters_in(graph: Graph) -> Iterator[AdapterUse]:
    first, users = len(graph.inputs), _users(graph)

    def only_user(slot: int) -> int:
        computing = [each for each in users.get(slot, []) if not graph.ops[each - first].target.startswith(_SIZE)]
        return computing[0] if len(computing) == 1 else -1

    for weight, each in enumerate(graph.inputs):
        part = adapter_tensor(each.name)
        if part is None or part.side != "B":
            continue
        for wide in users.get(weight, []):
            scaled = only_user(wide)
            total = only_user(scaled)
            found = graph.ops[total - first] if total >= first else None
            narrow, scale = (
                graph.ops[wide - first].args[0],
                _scale(graph.ops[scaled - first]) if scaled >= first else None,
            )
            if (
                found is None or found.target != _SUM or found.args[1:] != (Ref(scaled),)
                or not isinstance(narrow, Ref) or scale is None
            ):  # fmt: skip
                raise UsageError(
                    f"the graph of {part.layer} is not that of a plain adapter, which can be merged or written alone: export "
                    "a .safetensors file without --merge"
                )
            yield AdapterUse(
                part.layer, _other_side(each.name), each.name, scale, narrow=narrow.slot, wide=wide, scaled=scaled,
                total=total, given=found.args[0],
            )  # fmt: skip


def _other_side(name: str) -> str:
    """The name of A by that of B."""
    layer, _, rest = name.rpartition(".lora_B")
    return f"{layer}.lora_A{rest}"


def _scale(op: Op) -> float | None:
    """What it multiplies by; None: it does something else."""
    by = op.args[1] if op.target == _PRODUCT and len(op.args) == 2 else None
    return float(by) if isinstance(by, int | float) else None


def _rebuilt(graph: Graph, instead: Mapping[int, Argument]) -> Graph:
    """With other values instead of these operations, and without tensors that only they used."""
    kept = [(slot, op) for slot, op in enumerate(graph.ops, len(graph.inputs)) if slot not in instead]
    used = {each for _, op in kept for each in _taken(op)}
    used |= {each for value in (*graph.outputs, *instead.values()) for each in slots(value)}
    inputs = [(slot, each) for slot, each in enumerate(graph.inputs) if each.kind == "input" or slot in used]
    place: dict[int, Argument] = {slot: Ref(at) for at, slot in enumerate(slot for slot, _ in (*inputs, *kept))}

    def moved(slot: int) -> Argument:
        while slot in instead and isinstance(given := instead[slot], Ref):
            slot = given.slot
        return place[slot]

    return msgspec.structs.replace(
        graph,
        inputs=tuple(Input(each.kind, name_before(each.name)) for _, each in inputs),
        ops=tuple(_with(op, moved, 0) for _, op in kept),
        outputs=tuple(_put(each, moved) for each in graph.outputs),
    )


def _taken(op: Op) -> set[int]:
    return {each for value in (*op.args, *op.kwargs.values()) for each in slots(value)}


def _name(op: Op) -> str:
    """aten.add_.Tensor -> add_"""
    return op.target.split(".")[1] if op.target.startswith("aten.") else op.target


def _with(op: Op, place: Callable[[int], Argument], customs: int) -> Op:
    """The operation with its references put elsewhere. `customs`: how many custom functions stand before its graph's own."""
    args = tuple(_put(each, place) for each in op.args)
    if op.target == CUSTOM and isinstance(args[0], int):
        args = (args[0] + customs, *args[1:])
    return Op(op.target, args, {name: _put(each, place) for name, each in op.kwargs.items()})


def _put(value: Argument, place: Callable[[int], Argument]) -> Argument:
    if isinstance(value, Ref):
        return place(value.slot)
    if isinstance(value, Items):
        return Items(tuple(_put(each, place) for each in value.values))
    return value
