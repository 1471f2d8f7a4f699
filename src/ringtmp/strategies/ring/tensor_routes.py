"""Which tensors go from which visit of a route to which other, and back.

Pure. Where a model is a list of layers, everything a segment gives goes to the next one. In general a tensor is made in one
segment and used in some others, not always the next: it goes from its maker to its first user, from there to the second,
and so on; visits that do not use it never see it. The gradient goes the same way back. So the sum at its maker begins with
the deepest user and each shallower one adds to it, which is the order in which one process adds (docs/exactness.md).

    a skip from visit 0 to 2 and 3      forward  0 ------> 2 -> 3
                                        back     0 <------ 2 <- 3
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ringtmp.model.portable_layer import Layer, Value
from ringtmp.plan.route import MASTER, Route
from ringtmp.runtime.segment_run import Crossings
from ringtmp.units import bytes_text
from ringtmp.wire.message_parts import FREE, Crossing, Edge

Describe = Callable[[bool, Value], Crossing]


def flow_of(layers: Sequence[Layer], route: Route, describe: Describe | None = None) -> tuple[Edge, ...]:
    """The edges of a route, those from a visit to the next first; empty if everything goes to the next visit. The model's
    inputs come from visit -1, and its outputs go to the visit after the last."""
    if all(layer.train_takes is None for layer in layers):
        return ()
    return tuple(edge for training in (True, False) for edge in _edges(layers, route, training, describe))


def _edges(layers: Sequence[Layer], route: Route, training: bool, describe: Describe | None) -> list[Edge]:
    carried: dict[tuple[int, int], list[Value]] = {(at, at + 1): [] for at in range(-1, route.last + 1)}
    for value, users in sorted(_users(layers, route, training).items()):
        at = 0 if value[0] == 0 else route.holder(value[0] - 1).index
        if value[0] == 0:
            carried[-1, 0].append(value)
        for user in sorted(users - {at}):
            carried.setdefault((at, user), []).append(value)
            at = user
    return [
        Edge(
            training,
            source,
            target,
            tuple(values),
            tuple(describe(training, each) for each in values) if describe else (),
        )
        for (source, target), values in sorted(
            carried.items(), key=lambda item: (item[0][1] - item[0][0] != 1, item[0])
        )
    ]


def _users(layers: Sequence[Layer], route: Route, training: bool) -> dict[Value, set[int]]:
    """The visits that use each tensor; the loss, as a visit after the last, uses the model's outputs, which the last
    visit hands to it even where it has no layer."""
    found: dict[Value, set[int]] = {}
    for index, layer in enumerate(layers):
        for value in layer.takes(index, training):
            found.setdefault(value, set()).add(route.holder(index).index)
    for place in range(len(layers[-1].graph(training).outputs)):
        found.setdefault((len(layers), place), set()).update((route.last, route.last + 1))
    return found


@dataclass(frozen=True)
class Ways:
    """The edges that end at one visit and those that begin there, in one mode; the visits beside it come first."""

    entering: tuple[Edge, ...]
    leaving: tuple[Edge, ...]

    @property
    def sources(self) -> tuple[int, ...]:
        """Visits, other than the one before, that send something here."""
        return tuple(each.source for each in self.entering if each.source != each.target - 1)

    @property
    def targets(self) -> tuple[int, ...]:
        """Visits, other than the next, that something is sent to."""
        return tuple(each.target for each in self.leaving if each.target != each.source + 1)


def ways_of(flow: Sequence[Edge], visit: int, training: bool) -> Ways:
    mine = [each for each in flow if each.training == training]
    return Ways(
        tuple(each for each in mine if each.target == visit), tuple(each for each in mine if each.source == visit)
    )


def crossings_of(ways: Ways) -> Crossings:
    """What enters and leaves the segment of a visit."""
    return Crossings(
        tuple(value for each in ways.entering for value in each.values),
        tuple(value for each in ways.leaving for value in each.values),
    )


def neighbours(route: Route, flow: Sequence[Edge], node: int) -> tuple[int, ...]:
    """Everyone this node exchanges activations or gradients with."""
    found = set(route.neighbours(node))
    for each in flow:
        if each.source >= 0 and each.target <= route.last and each.values:
            pair = {*route.visits[each.source].members, *route.visits[each.target].members}
            found |= pair if node in pair else set()
    return tuple(sorted(found - {node}))


def what_travels(flow: Sequence[Edge], route: Route, inputs: Sequence[str]) -> tuple[str, ...]:
    """What a user should know of a route: inputs that leave the master, and weights that travel with every microbatch."""
    inputs_there: dict[str, None] = {}
    weights: dict[tuple[int, int], int] = {}
    for edge in flow:
        if not edge.training or edge.source < 0 or edge.target > route.last:
            continue
        here, there = route.node(edge.source), route.node(edge.target)
        for (maker, place), crossing in zip(edge.values, edge.crossings, strict=False):
            if maker == 0 and there != MASTER:
                name = inputs[place] if place < len(inputs) and inputs[place] else f"number {place}"
                inputs_there[f"the input {name} leaves the master: node {there} computes with it"] = None
            elif maker and here != there and not crossing.per_sample and FREE not in crossing.rest:
                weights[here, there] = weights.get((here, there), 0) + 4 * math.prod(crossing.rest)
    shared = (
        f"nodes {here} and {there} share weights of {bytes_text(size)}, which travel with every microbatch"
        for (here, there), size in weights.items()
    )
    return (*inputs_there, *shared)
