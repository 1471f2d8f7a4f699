"""The ring: each node holds a run of adjacent layers; activations go clockwise, gradients anticlockwise.

The project's own method. The master holds the front and the tail, so that inputs, labels and loss stay with it. What
nodes do is in ring/; here the run's settings become a route.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import msgspec

from ringtmp.metrics.events import EventLog
from ringtmp.model.portable import Layer
from ringtmp.model.repeat import refuse_unrepeatable
from ringtmp.plan import planner
from ringtmp.plan.planner import Plan, PlanOptions
from ringtmp.plan.route import MASTER, Route, holders_of, kept_apart, parse_cuts, route_over
from ringtmp.plan.rule import default_window
from ringtmp.plan.spread import bounds_for
from ringtmp.ring.checkpoint import Checkpoint
from ringtmp.ring.endpoint import Endpoint
from ringtmp.ring.lead import Crew
from ringtmp.ring.master import Master
from ringtmp.ring.scout import Scout, described, sample_of
from ringtmp.strategies.brief import Brief, Share
from ringtmp.wire.lossy import wire_bytes
from ringtmp.wire.message import Hello, Setup


@dataclass(frozen=True)
class RingPlan:
    brief: Brief
    setup: Setup
    warnings: tuple[str, ...]
    lines: tuple[str, ...]
    facts: dict[str, Any]
    shares: tuple[Share, ...]
    planned: Plan | None = None  # None: cuts by hand or by cost alone

    def lead(self, endpoint: Endpoint, crew: Crew, log: EventLog) -> Master:
        return Master(endpoint, crew, self.brief.layers, self.brief.loss, log)

    def start(self, leader: Master, checkpoint: Checkpoint, phase: Callable[[str], None]) -> None:
        phase("waiting for the nodes")
        leader.gather([node for node in self.setup.route.nodes() if node != MASTER])
        phase("placing the layers")
        leader.lay_out(self.setup, checkpoint)


def plan(brief: Brief) -> RingPlan:
    members = kept_apart(sorted(brief.addresses), brief.apart)
    brief = _arranged(brief, members)
    config, layers, index = brief.config, brief.layers, brief.index
    planned = _planned(brief)
    route, warnings = _route(brief, planned)
    route = _numbered(route, members)
    if gone := sorted(set(brief.addresses) - set(members)):
        who = ", ".join(f"node {node}" for node in gone)
        warnings += (f"{who} left out: in no order of the ring does everyone reach its neighbours",)
    window = config.ring.window or default_window(
        len(route.visits), brief.microbatches, config.ring.schedule, brief.recipe.staleness
    )
    if planned is not None:  # smaller where the usual one does not fit
        window = min(window, planned.window) if brief.recipe.staleness == 0 else window
    setup = Setup(
        route, brief.recipe, window, config.ring.schedule, brief.step, brief.addresses, config.keep.detailed_steps,
        {visit.index: index.outputs[visit.first - 1] for visit in route.visits[1:]}, config.ring.recompute,
        config.training.wire, config.keep.protect, _lines(route, brief),
    )  # fmt: skip
    lines = planned.summary() if planned is not None else ()
    shares = tuple(_share(node, route, layers) for node in route.nodes())
    return RingPlan(brief, setup, warnings, lines, {"window": window}, shares, planned)


def tried(
    brief: Brief, endpoint: Endpoint, crew: Crew, log: EventLog, phase: Callable[[str], None],
    hellos: Mapping[int, Hello],
) -> tuple[Brief, dict[int, Hello]]:  # fmt: skip
    """Devices of their own are tried before a ring is planned over them: their pace with this model, their lines.
    `hellos` of those who have said it already; returned with those who said it meanwhile."""
    ring, index = brief.config.ring, brief.index
    largest = -(-brief.batch_size // min(brief.microbatches, brief.batch_size))
    sample = sample_of(brief.layers, index.cost_s, index.outputs, largest)
    if crew.alike or ring.strategy != "ring" or ring.cuts is not None or sample is None:
        return brief, dict(hellos)
    phase("measuring the devices")
    scout = Scout(endpoint, crew, log)
    scout.hellos.update(hellos)
    numbers = sorted(brief.addresses)
    seen = scout.look(numbers[1:], sample[1])
    devices = described(brief.devices, [seen[node] for node in numbers], index.cost_s[sample[0]])
    return replace(brief, devices=devices), scout.hellos


def _arranged(brief: Brief, members: list[int]) -> Brief:
    """The brief for these members in this order, where not everyone can be everyone's neighbour."""
    numbers = sorted(brief.addresses)
    if members == numbers:
        return brief
    ring = brief.config.ring
    if len(members) < len(numbers):  # cuts and window were meant for another ring
        ring = msgspec.structs.replace(ring, nodes=len(members), cuts=None, window=None)
    devices = tuple(brief.devices[numbers.index(node)] for node in members)
    return replace(brief, config=msgspec.structs.replace(brief.config, ring=ring), devices=devices, keep_all=True)


def _planned(brief: Brief) -> Plan | None:
    """Cuts by the planner, unless they were given by hand or the route is not a plain ring."""
    ring = brief.config.ring
    if ring.cuts is not None or ring.laps > 1 or ring.route != "ring":
        return None
    options = PlanOptions(
        brief.batch_size,
        brief.microbatches,
        ring.window,
        "gpipe" if ring.schedule == "gpipe" else "1f1b",
        brief.recipe.clip_norm is not None,
        wire_bytes(brief.config.training.wire, 1024) / 4096,
        keep_all=brief.keep_all,
        protect=brief.config.keep.protect,
    )
    return planner.plan(brief.index.costs, brief.devices, options)


def _route(brief: Brief, planned: Plan | None) -> tuple[Route, tuple[str, ...]]:
    ring = brief.config.ring
    nodes, cuts = ring.nodes, ring.cuts
    if ring.recompute == "all":
        refuse_unrepeatable(brief.layers)
    holders = holders_of(nodes, ring.laps, ring.route)
    has_parameters = [layer.parameters > 0 for layer in brief.layers]
    if planned is not None:
        numbers = {device.name: node for node, device in enumerate(brief.devices)}
        members = [numbers[device.name] for device in planned.devices]
        holders = [*members, MASTER] if len(members) > 1 else members
        bounds = list(planned.bounds)
    elif cuts is None:
        bounds = bounds_for(brief.index.cost_s, has_parameters, holders)
    else:
        bounds = parse_cuts(cuts, len(brief.layers), nodes, len(holders))
    warnings = []
    if nodes > 1 and not any(has_parameters[slice(*bounds[-1])]):
        warnings.append(
            "the tail has no layer with parameters: outputs and their gradients, which show labels, leave the master"
        )
    if nodes > 1 and not any(has_parameters[slice(*bounds[0])]):
        warnings.append("the front has no layer with parameters: the raw inputs leave the master")
    return route_over(holders, bounds), tuple(warnings)


def _numbered(route: Route, members: Sequence[int]) -> Route:
    """The same route over the nodes that are there: where one was lost, the numbers have a hole."""
    return Route(tuple(msgspec.structs.replace(visit, node=members[visit.node]) for visit in route.visits))


def _lines(route: Route, brief: Brief) -> dict[int, float]:
    """Bytes per second from every node to the one behind it, where it is known."""
    links = {number: device.link for number, device in zip(sorted(brief.addresses), brief.devices, strict=True)}
    rates = {
        here.node: min(links[here.node].up_bytes_per_s, links[there.node].down_bytes_per_s)
        for here, there in pairwise(route.visits)
    }
    return {node: rate for node, rate in rates.items() if math.isfinite(rate)}


def _share(node: int, route: Route, layers: list[Layer]) -> Share:
    segments = tuple(segment_text(layers, visit.first, visit.stop) for visit in route.on(node))
    parameters = sum(layers[i].parameters for visit in route.on(node) for i in visit.layers)
    return Share(node, "master" if node == MASTER else "worker", segments, parameters)


def segment_text(layers: list[Layer], first: int, stop: int) -> str:
    if first == stop:
        return "loss only"
    if stop - first == 1:
        return f"{first} ({layers[first].name})"
    return f"{first}-{stop - 1} ({layers[first].name} to {layers[stop - 1].name})"
