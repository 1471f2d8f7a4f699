"""Whether a layer's training graph may be run a second time for the same microbatch, and what that must not touch.

Recomputing activations repeats a forward pass. Buffers it changes (BatchNorm's statistics) must change once, so the
second run works on copies. That gives the same output unless the output depends on such a buffer: by then it holds the
values of later microbatches. BatchNorm in training reads none of the statistics it changes.
"""

from __future__ import annotations

from collections.abc import Sequence

from ringtmp.errors import UsageError
from ringtmp.model.memory_aliases import STATISTICS, Memory, aliases, changes_statistics
from ringtmp.model.portable_layer import Graph, Layer, Op, slots


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
    memory = Memory(graph)
    group = memory.group
    buffers = memory.owned("buffer", "constant", "parameter")
    tainted = {group(slot) for slot in buffers if group(slot) in memory.written}
    names = {name for slot, name in buffers.items() if group(slot) in tainted}
    before = -1
    while len(tainted) != before:
        before = len(tainted)
        for position, op in enumerate(graph.ops):
            if any(group(slot) in tainted for slot in _reads(op)):
                tainted.add(group(len(graph.inputs) + position))
                tainted.update(group(slot) for slot in aliases(op)[1])
    return names, not any(group(slot) in tainted for value in graph.outputs for slot in slots(value))


def _reads(op: Op) -> list[int]:
    skipped = STATISTICS[op.target][0] if changes_statistics(op) else ()
    values = [value for index, value in enumerate(op.args) if index not in skipped]
    return [slot for value in (*values, *op.kwargs.values()) for slot in slots(value)]
