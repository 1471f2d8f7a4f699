"""Parameters that a layer changes itself in its forward pass, as an embedding with max_norm does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringtmp.errors import UsageError
from ringtmp.model.allowed_operators import resolve
from ringtmp.model.portable_layer import CUSTOM, Graph, Layer, Ref, references

#: Operators that may read a parameter which its layer changes in forward: their backward does not look at it again.
_READ_ONCE = ("aten.detach.default", "aten.embedding_renorm_.default", "aten.embedding.default")


def written_parameters(graph: Graph) -> dict[str, bool]:
    """Parameters that a forward pass changes itself, as an embedding with max_norm does, and whether it may: the next
    microbatch goes forward before the last one has gone backward, which must not need the values of before."""
    origin = list(range(len(graph.inputs)))
    written: set[int] = set()
    readers: dict[int, set[str]] = {}
    for op in graph.ops:
        schema: Any = None if op.target == CUSTOM else getattr(resolve(op.target), "_schema", None)
        first = op.args[0] if op.args else None
        alias = schema.arguments[0].alias_info if schema is not None and schema.arguments else None
        for slot in references(op):
            readers.setdefault(origin[slot], set()).add(op.target)
        if isinstance(first, Ref) and (alias is not None or op.target == "getitem"):
            origin.append(origin[first.slot])
            if alias is not None and alias.is_write:
                written.add(origin[-1])
        else:
            origin.append(len(origin))
    return {
        each.name: readers[slot] <= set(_READ_ONCE)
        for slot, each in enumerate(graph.inputs)
        if each.kind == "parameter" and slot in written
    }


def refuse_written(layers: Sequence[Layer], strategy: str) -> None:
    """Where several nodes hold a parameter, each would change its own."""
    for layer in layers:
        for name in written_parameters(layer.train):
            raise UsageError(
                f"layer {layer.name!r} changes its parameter {name} in forward (max_norm?), and with {strategy} every node "
                "would change a copy of its own: use --strategy ring, or leave that out"
            )
