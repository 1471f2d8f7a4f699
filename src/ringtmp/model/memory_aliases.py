"""Which values of a graph may lie in the same memory, and what a run of it writes into.

An operator's schema says what its result may share with its arguments and which arguments it writes. A few say nothing
and return an argument all the same (dropout in evaluation, `type_as` where there is nothing to convert); they are listed.
Values that may share memory are taken together, so an answer errs on the side of sharing.
"""

from __future__ import annotations

from typing import Any

from ringtmp.model.allowed_operators import resolve
from ringtmp.model.portable_layer import CUSTOM, Graph, Op, slots

#: Operators that change running statistics without saying so: the arguments, and the one that switches it on.
STATISTICS = {"aten.batch_norm.default": ((3, 4), 5), "aten.instance_norm.default": ((3, 4), 5)}
#: Operators whose result may be an argument, or a view of one, without their schema saying so.
_UNDECLARED = """
_unsafe_view alpha_dropout atleast_1d atleast_2d broadcast_tensors dropout einsum feature_alpha_dropout feature_dropout
type_as unsafe_chunk unsafe_split
"""
UNDECLARED = frozenset(_UNDECLARED.split())


class Memory:
    """The memory of a graph's slots: those that may share some are in one group."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._together = list(range(len(graph.inputs) + len(graph.ops)))
        changed: set[int] = set()
        for position, op in enumerate(graph.ops):
            shared, written = aliases(op)
            for slot in shared:
                self._together[self.group(len(graph.inputs) + position)] = self.group(slot)
            changed.update(written)
        self.written = {self.group(slot) for slot in changed}

    def group(self, slot: int) -> int:
        while self._together[slot] != slot:
            slot = self._together[slot]
        return slot

    def owned(self, *kinds: str) -> dict[int, str]:
        """Slot and name of the layer's own tensors of these kinds."""
        return {slot: each.name for slot, each in enumerate(self._graph.inputs) if each.kind in kinds}

    def written_inputs(self) -> frozenset[int]:
        """Positions of the tensors that enter the layer and may be written into."""
        return frozenset(position for position, group in enumerate(self._entering()) if group in self.written)

    def outputs_from(self) -> list[frozenset[int]]:
        """For every output: the positions of the entering tensors whose memory it may share."""
        groups = self._entering()
        leaving = [{self.group(slot) for slot in slots(value)} for value in self._graph.outputs]
        return [frozenset(at for at, group in enumerate(groups) if group in each) for each in leaving]

    def _entering(self) -> list[int]:
        return [self.group(slot) for slot, each in enumerate(self._graph.inputs) if each.kind == "input"]


def aliases(op: Op) -> tuple[list[int], list[int]]:
    """Slots whose memory the result may share, and slots the operation writes into."""
    if op.target == "getitem":
        return slots(op.args[0]), []
    if op.target == CUSTOM:  # its results may be views of its arguments; it changes none
        return [slot for value in op.args for slot in slots(value)], []
    schema: Any = getattr(resolve(op.target), "_schema", None)
    if schema is None:
        return [], []
    shared: list[int] = []
    changed: list[int] = []
    undeclared = schema.name.removeprefix("aten::") in UNDECLARED
    result_shares = any(each.alias_info is not None for each in schema.returns)
    for index, each in enumerate(schema.arguments):
        value = op.args[index] if index < len(op.args) else op.kwargs.get(each.name)
        if undeclared or (result_shares and each.alias_info is not None):
            shared += slots(value)
        if each.alias_info is not None and each.alias_info.is_write:
            changed += slots(value)
    if changes_statistics(op):
        changed += [slot for index in STATISTICS[op.target][0] for slot in slots(op.args[index])]
    return shared, changed


def changes_statistics(op: Op) -> bool:
    return op.target in STATISTICS and op.args[STATISTICS[op.target][1]] is True
