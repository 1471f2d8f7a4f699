"""The route: which node holds which run of layers, in the order activations visit them.

plain ring of 3 over 7 layers      visit  node    layers
                                     0    master  0-1     front: inputs
                                     1    1       2-3
                                     2    2       4-5
                                     3    master  6       tail: labels and loss

holders of other routes for 3 nodes    two laps   master 1 2 master 1 2 master
                                       V          master 1 2 1 master
Several smaller segments per node fill the ring sooner and drain it sooner, and cost more transfers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from itertools import combinations

import msgspec

from ringtmp.errors import UsageError

MASTER = 0


class Visit(msgspec.Struct, frozen=True, array_like=True):
    """One stop of the activations: layers first..stop-1 on a node. first == stop is a loss-only tail."""

    index: int
    node: int
    first: int
    stop: int
    others: tuple[int, ...] = ()  # nodes that hold the same layers and share a step's microbatches (node_groups.py)

    @property
    def members(self) -> tuple[int, ...]:
        """The group: one node, mostly."""
        return (self.node, *self.others)

    @property
    def layers(self) -> range:
        return range(self.first, self.stop)


class Route(msgspec.Struct, frozen=True):
    visits: tuple[Visit, ...]
    outlived: bool = False  # what nodes keep outlives the master, so its own snapshots go to its neighbour, too

    @property
    def last(self) -> int:
        return len(self.visits) - 1

    def node(self, visit: int) -> int:
        return self.visits[visit].node

    def on(self, node: int) -> tuple[Visit, ...]:
        return tuple(visit for visit in self.visits if node in visit.members)

    def nodes(self) -> tuple[int, ...]:
        return tuple(sorted({node for visit in self.visits for node in visit.members}))

    @property
    def grouped(self) -> bool:
        """Whether some nodes share a visit."""
        return any(visit.others for visit in self.visits)

    def neighbours(self, node: int) -> tuple[int, ...]:
        """Everyone this node exchanges activations, gradients or sums of them with."""
        found: set[int] = set()
        for here, there in zip(self.visits, self.visits[1:], strict=False):
            for one, other in ((here.members, there.members), (there.members, here.members)):
                if node in one:
                    found.update(one, other)
        return tuple(sorted(found - {node}))

    def holder(self, layer: int) -> Visit:
        return next(visit for visit in self.visits if visit.first <= layer < visit.stop)


def holders_of(nodes: int, laps: int = 1, shape: str = "ring") -> list[int]:
    """The node of every visit. `ring`: round and round, `laps` times, and home; `v`: out to the last node and back. One node
    alone has `laps` visits: stages of a pipeline in one process."""
    if nodes == 1:
        return [MASTER] * laps
    if shape == "v":
        return [*range(nodes), *reversed(range(nodes - 1))]
    return [*(list(range(nodes)) * laps), MASTER]


def kept_apart(members: Sequence[int], apart: Collection[frozenset[int]]) -> list[int]:
    """The members, the master first, in an order in which no pair of `apart` are neighbours; without as few of them as
    that takes. Pairs are few, so the first orders tried mostly do."""
    for left_out in range(len(members)):
        for kept in combinations(members[1:], len(members) - 1 - left_out):
            if (order := _order_from([members[0]], list(kept), apart)) is not None:
                return order
    raise AssertionError("the master alone has no neighbours")


def _order_from(begun: list[int], rest: list[int], apart: Collection[frozenset[int]]) -> list[int] | None:
    if not rest:
        return begun
    for each in rest:
        if frozenset((begun[-1], each)) not in apart:
            found = _order_from([*begun, each], [other for other in rest if other != each], apart)
            if found is not None:
                return found
    return None


def route_over(holders: Sequence[int], bounds: Sequence[tuple[int, int]]) -> Route:
    assert len(holders) == len(bounds)
    return Route(tuple(Visit(i, node, *bound) for i, (node, bound) in enumerate(zip(holders, bounds, strict=True))))


def plain_ring(nodes: int, bounds: list[tuple[int, int]]) -> Route:
    """Master, 1, 2, ..., master. With one node the master holds everything in one visit."""
    return route_over(holders_of(nodes), bounds)


def parse_cuts(text: str, layers: int, nodes: int, visits: int | None = None) -> list[tuple[int, int]]:
    """'0-2,3-5,6' -> [(0, 3), (3, 6), (6, 7)]: one range per visit, every layer once; '-' for an empty tail."""
    if visits is None:
        visits = len(holders_of(nodes))
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != visits:
        raise UsageError(
            f"--cuts {text!r} has {len(parts)} ranges; a ring of {nodes} needs {visits}"
            + ("" if nodes == 1 else ": the master's front, one per worker, the master's tail ('-' for loss only)")
        )
    bounds: list[tuple[int, int]] = []
    expected = 0
    for position, part in enumerate(parts):
        if part == "-" and position == visits - 1 and position:
            bounds.append((expected, expected))
            continue
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if not match:
            raise UsageError(f"--cuts {text!r}: {part!r} is not a range like 3-5 or a layer like 6")
        first, last = int(match[1]), int(match[2] or match[1])
        if first != expected or last < first:
            raise UsageError(
                f"--cuts {text!r}: {part!r} must start at layer {expected}; every layer is held exactly once"
            )
        bounds.append((first, last + 1))
        expected = last + 1
    if expected != layers:
        raise UsageError(
            f"--cuts {text!r} ends at layer {expected - 1}; the model has layers 0-{layers - 1} (ringtmp plan names them)"
        )
    return bounds


def holder_of(route: Route, node: int) -> int | None:
    """Who holds a node's snapshots: its clockwise neighbour, of a group the first. The master's own stay with it where the run
    ends with it anyway."""
    mine = route.on(node)
    if not mine or mine[0].node != node:  # of a group the first keeps what all of them have
        return None
    if node == MASTER and not (route.outlived and route.last):
        return None
    return route.node(mine[0].index + 1)
