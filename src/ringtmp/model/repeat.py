"""Whether a layer's training graph may be run a second time for the same microbatch, and what that must not touch.

Recomputing activations repeats a forward pass. Buffers it changes (BatchNorm's statistics) must change once, so the
second run works on copies. That gives the same output unless the output depends on such a buffer: by then it holds the
values of later microbatches. BatchNorm in training reads none of the statistics it changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringtmp.errors import UsageError
from ringtmp.model.operators import resolve
from ringtmp.model.portable import CUSTOM, Graph, Items, Layer, Op, Ref, Value

#: Operators that change running statistics without saying so: the arguments, and the one that switches it on.
_STATISTICS = {"aten.batch_norm.default": ((3, 4), 5), "aten.instance_norm.default": ((3, 4), 5)}


def changed_buffers(graph: Graph) -> frozenset[str]:
    """The buffers a run of the graph changes, by name; parameters, too (an embedding with max_norm)."""
    return frozenset(_read(graph)[0])


def repeatable(graph: Graph) -> bool:
    """Whether no output depends on a buffer the graph changes."""
    return _read(graph)[1]


def refuse_unrepeatable(layers: Sequence[Layer]) -> None:
    for layer in layers:
        if not repeatable(layer.train):
            names = ", ".join(sorted(changed_buffers(layer.train)))
            raise UsageError(
                f"layer {layer.name!r} reads a buffer that it changes in the same forward pass ({names}), so its activations "
                "cannot be computed a second time: use --recompute none, or auto, which leaves its segment out"
            )


def _read(graph: Graph) -> tuple[set[str], bool]:
    """Changed buffers, and whether the outputs are free of them. Values that may share memory are taken together."""
    together = list(range(len(graph.inputs) + len(graph.ops)))

    def group(slot: int) -> int:
        while together[slot] != slot:
            slot = together[slot]
        return slot

    written: set[int] = set()
    for position, op in enumerate(graph.ops):
        shared, changed = _aliases(op)
        for slot in shared:
            together[group(len(graph.inputs) + position)] = group(slot)
        written.update(changed)
    buffers = {slot: each.name for slot, each in enumerate(graph.inputs) if each.kind in ("buffer", "parameter")}
    dirty = {group(slot) for slot in written}
    tainted = {group(slot) for slot in buffers if group(slot) in dirty}
    names = {name for slot, name in buffers.items() if group(slot) in tainted}
    before = -1
    while len(tainted) != before:
        before = len(tainted)
        for position, op in enumerate(graph.ops):
            if any(group(slot) in tainted for slot in _reads(op)):
                tainted.add(group(len(graph.inputs) + position))
                tainted.update(group(slot) for slot in _aliases(op)[1])
    return names, not any(group(slot) in tainted for value in graph.outputs for slot in _slots(value))


def _aliases(op: Op) -> tuple[list[int], list[int]]:
    """Slots whose memory the result may share, and slots the operation writes into."""
    if op.target == "getitem":
        return _slots(op.args[0]), []
    if op.target == CUSTOM:  # its results may be views of its arguments; it changes none
        return [slot for value in op.args for slot in _slots(value)], []
    schema: Any = getattr(resolve(op.target), "_schema", None)
    shared: list[int] = []
    changed: list[int] = []
    if schema is not None:
        result_shares = any(each.alias_info is not None for each in schema.returns)
        for index, each in enumerate(schema.arguments):
            if each.alias_info is None:
                continue
            value = op.args[index] if index < len(op.args) else op.kwargs.get(each.name)
            if result_shares:
                shared += _slots(value)
            if each.alias_info.is_write:
                changed += _slots(value)
    if _changes_statistics(op):
        changed += [slot for index in _STATISTICS[op.target][0] for slot in _slots(op.args[index])]
    return shared, changed


def _reads(op: Op) -> list[int]:
    skipped = _STATISTICS[op.target][0] if _changes_statistics(op) else ()
    values = [value for index, value in enumerate(op.args) if index not in skipped]
    return [slot for value in (*values, *op.kwargs.values()) for slot in _slots(value)]


def _changes_statistics(op: Op) -> bool:
    return op.target in _STATISTICS and op.args[_STATISTICS[op.target][1]] is True


def _slots(value: Value) -> list[int]:
    if isinstance(value, Ref):
        return [value.slot]
    if isinstance(value, Items):
        return [slot for item in value.values for slot in _slots(item)]
    return []
