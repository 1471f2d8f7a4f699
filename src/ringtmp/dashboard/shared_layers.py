"""Which nodes of a ring hold the same layers: its groups, as the events of a run tell them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

#: A segment of a ring begins with the numbers of its layers. What servers and trainers hold does not.
_LAYERS = re.compile(r"#(\d+)")


def groups_of(held: Mapping[int, Iterable[str]]) -> tuple[tuple[int, ...], ...]:
    """Every holder of layers but the master, by what is held and in the order of layers; empty where no two hold the same.

    `held`: the segments of every node, by its number."""
    found: dict[tuple[str, ...], list[int]] = {}
    for node in sorted(held):
        segments = tuple(held[node])
        if node and segments and all(_LAYERS.match(each) for each in segments):
            found.setdefault(segments, []).append(node)
    if all(len(nodes) == 1 for nodes in found.values()):
        return ()
    return tuple(tuple(found[segments]) for segments in sorted(found, key=_first_layer))


def _first_layer(segments: tuple[str, ...]) -> int:
    return min(int(found[1]) for each in segments if (found := _LAYERS.match(each)) is not None)
