"""The ring: each node holds a run of adjacent layers; activations go clockwise, gradients anticlockwise.

The project's own method. The master holds the front and the tail, so that inputs, labels and loss stay with it. Here the
run's settings become a route.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import msgspec

from ringtmp.config import RingPart, RunConfig, replaced
from ringtmp.errors import DoesNotFit
from ringtmp.metrics.event_log import EventLog
from ringtmp.metrics.summary import Forecast, NodeForecast
from ringtmp.model.portable_layer import Layer
from ringtmp.model.running_statistics import changes_statistics, refuse_statistics
from ringtmp.plan.choose_schedule import much_faster, plan_with_schedule
from ringtmp.plan.devices import Device, LayerCost, Path, Paths, rate_between
from ringtmp.plan.microbatches import best_plan, microbatch_sizes
from ringtmp.plan.minimum_layers_per_stage import Ends, too_few_for_route, too_few_layers
from ringtmp.plan.node_groups import (
    ANY_GROUPS,
    fitted,
    grouped,
    kept_in_place,
    members_of,
    parse_groups,
    parse_sums,
    shared_parts,
)
from ringtmp.plan.pipeline_schedules import AUTO, DEFAULT_SCHEDULE, schedule_named
from ringtmp.plan.planner import Plan, PlanOptions
from ringtmp.plan.route import MASTER, Route, holders_of, kept_apart, parse_cuts
from ringtmp.plan.when_to_rebalance import Balance
from ringtmp.runtime.base_leader import NodePool, Start
from ringtmp.runtime.mailbox import Endpoint
from ringtmp.runtime.optimizers import delay_warning
from ringtmp.strategies.base import PlanRequest, Share
from ringtmp.strategies.ring.device_trials import DeviceTrials, sample_of
from ringtmp.strategies.ring.link_trials import neighbours_of, rounds_of
from ringtmp.strategies.ring.master import Master
from ringtmp.strategies.ring.plan_warnings import exposed, slow_ways
from ringtmp.strategies.ring.tensor_routes import flow_of, what_travels
from ringtmp.strategies.ring.trial_results import described
from ringtmp.system.resources import peak_rss_bytes
from ringtmp.wire.formats import wire_format
from ringtmp.wire.messages import Hello, Setup


@dataclass(frozen=True)
class RingPlan:
    request: PlanRequest
    setup: Setup
    warnings: tuple[str, ...]
    lines: tuple[str, ...]
    facts: dict[str, Any]
    shares: tuple[Share, ...]
    planned: Plan | None = None  # None: cuts by hand, or not a plain ring
    left_out: bool = False  # somebody was

    def balance(self, not_before: float) -> Balance | None:
        if self.planned is None or len(self.planned.devices) < 2:
            return None
        # The master has the last visit too.
        members = [visit.node for visit in self.setup.route.visits[:-1]]
        return Balance(self.planned, self.request.devices, members, not_before)

    @property
    def route(self) -> Route:
        return self.setup.route

    def lead(self, start: Start) -> Master:
        route = msgspec.structs.replace(self.setup.route, outlived=start.protection.outlived)
        return Master(start, msgspec.structs.replace(self.setup, route=route), self.request.layers, self.request.loss)


def plan(request: PlanRequest) -> RingPlan:
    groups = _given_groups(request)
    if groups and (same := _in_place(request, groups)) is not None:
        return same
    return _anew(request, groups)


def _in_place(request: PlanRequest, wanted: tuple[int, ...]) -> RingPlan | None:
    """Where somebody came or went, and everyone else can keep the layers it has."""
    before = request.before
    if before is None or request.apart or len(before.visits) != len(wanted) + 2:
        return None
    late, tree = parse_sums(request.config.ring.group_sums), request.recipe.sum_tree
    most = shared_parts(tree, late, min(request.microbatches, request.batch_size))
    found = kept_in_place([visit.members for visit in before.visits[1:-1]], sorted(request.addresses), most)
    if found is None:
        return None
    members = [MASTER, *(node for group in found for node in group)]
    there, options = _with_groups(_arranged(request, members), tuple(map(len, found)), wanted)
    options = replace(options, cuts=tuple((visit.first, visit.stop) for visit in before.visits))
    try:
        planned = planned_once(there.index.costs, there.devices, options, there.paths)
    except DoesNotFit:
        return None
    return _told(request, there, planned, members)


def _anew(request: PlanRequest, groups: tuple[int, ...]) -> RingPlan:
    members = _reaching(request, groups) if groups else kept_apart(sorted(request.addresses), request.apart)
    there, options = _arranged(request, members), None
    if groups:
        there, options = _with_groups(there, fitted(groups, len(members) - 1), groups)
    elif not _may_group(request):
        options = replace(_options(there), any_groups=False)
    planned = planned_once(there.index.costs, there.devices, options or _options(there), there.paths)
    return _told(request, there, planned, members)


def _told(request: PlanRequest, there: PlanRequest, planned: Plan, members: list[int]) -> RingPlan:
    """`there`: the request for these members, in this order."""
    groups = _given_groups(request)
    route, warnings = _route(there, planned)
    route = _numbered(route, members)
    if planned.shape:
        refuse_statistics(
            request.layers, "with --groups microbatches pass it in another order", "a ring without --groups"
        )
    if gone := sorted(set(request.addresses) - set(members)):
        who = ", ".join(f"node {node}" for node in gone)
        why = "it cannot reach everyone it would work with" if groups else (
            "no order of the ring lets every node reach its neighbours"
        )  # fmt: skip
        warnings += (f"{who} is left out: {why}",)
    if request.step == 0:
        warnings += slow_ways(planned)
    made = _laid_out(there, planned, route, warnings, {} if planned.shape else _lines(route, members, there))
    lines = planned.summary(request.chosen)
    if request.step == 0 and not request.chosen and (faster := much_faster(planned, request.index.least_microbatch)):
        lines += (faster,)
    facts = {**_chosen(planned), "forecast": msgspec.to_builtins(_forecast(there, planned))}
    movable = planned if _movable(request.config.ring) and not planned.shape else None
    return replace(made, lines=lines, facts=facts, planned=movable, left_out=bool(planned.left_out or gone))


def planned_once(
    layers: Sequence[LayerCost], devices: Sequence[Device], options: PlanOptions, paths: Paths | None
) -> Plan:
    """A way is chosen by its plan, and then planned: the search is made once."""
    return _planned(tuple(layers), tuple(devices), options, tuple(sorted((paths or {}).items())))


@lru_cache(maxsize=2)
def _planned(
    layers: tuple[LayerCost, ...], devices: tuple[Device, ...], options: PlanOptions,
    paths: tuple[tuple[tuple[str, str], Path], ...],
) -> Plan:  # fmt: skip
    return plan_with_schedule(layers, devices, options, dict(paths))


def _chosen(planned: Plan) -> dict[str, Any]:
    options = planned.options
    found: dict[str, Any] = {
        "window": planned.window, "schedule": options.schedule, "schedule_chosen": options.any_schedule,
    }  # fmt: skip
    return {**found, "groups": planned.shape} if planned.shape else found


def _given_groups(request: PlanRequest) -> tuple[int, ...]:
    text = request.config.ring.groups
    return () if text in (None, ANY_GROUPS) or len(request.addresses) == 1 else parse_groups(text or "")


def _may_group(request: PlanRequest) -> bool:
    """Whether the plan chooses groups. Where some nodes cannot reach each other it does without."""
    ring = request.config.ring
    return ring.groups == ANY_GROUPS and not request.apart and not changes_statistics(request.layers)


def _reaching(request: PlanRequest, wanted: tuple[int, ...]) -> list[int]:
    """The nodes, without those that cannot reach a neighbour or another member of their group."""
    nodes = sorted(request.addresses)
    while True:
        members = members_of(fitted(wanted, len(nodes) - 1), nodes)
        route = grouped(members, [(0, 0)] * len(members))
        apart = [each for each in request.apart if max(each) in nodes and min(each) in route.neighbours(max(each))]
        if not apart:
            return nodes
        nodes.remove(max(apart[0]))


def _with_groups(
    request: PlanRequest, groups: tuple[int, ...], wanted: tuple[int, ...]
) -> tuple[PlanRequest, PlanOptions]:
    """Everyone takes part; cuts that were meant for as many stages as there were are the plan's again."""
    ring = request.config.ring
    if len(groups) != len(wanted):
        ring = msgspec.structs.replace(ring, cuts=None)
    request = replace(request, config=msgspec.structs.replace(request.config, ring=ring), keep_all=True)
    nodes = len(groups) + 1
    options = plan_options(
        request.config, request.batch_size, request.microbatches, len(request.layers), nodes, keep_all=True
    )
    return request, replace(options, groups=groups)


def _laid_out(
    request: PlanRequest, planned: Plan, route: Route, warnings: tuple[str, ...], rates: dict[int, float]
) -> RingPlan:
    config, layers, index, recipe = request.config, request.layers, request.index, request.recipe
    late = parse_sums(config.ring.group_sums)
    danger = delay_warning(recipe.optimizer, recipe.optimizer_settings, recipe.staleness)
    if request.step == 0:  # once: not again when a ring heals or a run is resumed
        warnings += (danger,) if danger is not None else ()
    flow = flow_of(layers, route, index.crossing)
    if request.step == 0:
        warnings += what_travels(flow, route, index.input_names)
    setup = Setup(
        route, recipe, planned.window, planned.options.schedule, request.step, request.addresses, config.keep.detailed_steps,
        {visit.index: index.outputs[visit.first - 1] for visit in route.visits[1:]}, config.ring.recompute,
        config.training.wire, config.keep.protect, rates,
        flow, config.ring.share_optimizer, index.aside, late,
        shared_parts(recipe.sum_tree, late, min(request.microbatches, request.batch_size)),
    )  # fmt: skip
    shares = tuple(_share(node, route, layers) for node in route.nodes())
    return RingPlan(request, setup, warnings, (), {}, shares)


def tried(
    request: PlanRequest, endpoint: Endpoint, pool: NodePool, log: EventLog,
    *, phase: Callable[[str], None], hellos: Mapping[int, Hello],
) -> tuple[PlanRequest, dict[int, Hello]]:  # fmt: skip
    """Devices of their own are tried before a ring is planned over them: their pace with this model, their lines.
    `hellos` of those who have said it already; returned with those who said it meanwhile."""
    index = request.index
    largest = -(-request.batch_size // min(request.microbatches, request.batch_size))
    sample = sample_of(
        request.layers, index.costs, index.crossing, largest, len(request.addresses), request.recipe.compute
    )
    if pool.same_machine or sample is None:
        return request, dict(hellos)
    phase("measuring the devices")
    trials = DeviceTrials(Start(endpoint, pool, log, hellos))
    numbers = sorted(request.addresses)
    pairs = neighbours_of if order_is_given(request) else rounds_of
    seen = trials.look(request.addresses, sample[1], pairs, request.apart)
    cost = index.costs[sample[0]].at(largest)
    devices, paths = described(
        request.devices, numbers, seen, cost.forward_s + cost.backward_s, request.recipe.threads
    )  # fmt: skip
    return replace(request, devices=devices, paths=paths), trials.hellos


def order_is_given(request: PlanRequest) -> bool:
    """Whether everyone stands where its number says."""
    return request.keep_all or not _movable(request.config.ring)


def _arranged(request: PlanRequest, members: list[int]) -> PlanRequest:
    """The request for these members in this order, where not everyone can be everyone's neighbour."""
    numbers = sorted(request.addresses)
    if members == numbers:
        return request
    ring = request.config.ring
    if len(members) < len(numbers):  # cuts and window were meant for another ring
        ring = msgspec.structs.replace(ring, nodes=len(members), cuts=None, window=None)
    devices = tuple(request.devices[numbers.index(node)] for node in members)
    return replace(request, config=msgspec.structs.replace(request.config, ring=ring), devices=devices, keep_all=True)


def with_best_microbatches(request: PlanRequest, batch_sizes: Collection[int]) -> PlanRequest:
    """`--microbatches auto`: the number whose plan has the shortest step, of those that leave every microbatch enough
    samples."""
    least = request.index.least_microbatch
    made = best_plan(
        request.index.costs, request.devices, _options(request),
        lambda count: min(microbatch_sizes(batch_sizes, count)) >= least and count >= request.recipe.sum_tree, request.paths,
    )  # fmt: skip
    count = made.options.ring.microbatches
    training = msgspec.structs.replace(request.config.training, microbatches=count)
    config = msgspec.structs.replace(request.config, training=training)
    return replace(request, config=config, microbatches=count, chosen=True)


def _options(request: PlanRequest) -> PlanOptions:
    nodes = len(request.devices)
    return plan_options(
        request.config, request.batch_size, request.microbatches, len(request.layers), nodes, request.keep_all
    )  # fmt: skip


def refuse_too_few(
    config: RunConfig, nodes: int, keep_all: bool, has_parameters: Sequence[bool], why: str = ""
) -> None:
    """What the number of layers, and which of them have parameters, tells before they are compared and measured. `why`:
    what keeps a module from being cut into more; empty for a list of layers."""
    ring, layers, ends = config.ring, len(has_parameters), Ends.of(has_parameters)
    if ring.groups == ANY_GROUPS:
        nodes = min(nodes, 2)
    elif ring.groups is not None:
        nodes = 1 + len(fitted(parse_groups(ring.groups), nodes - 1))
    visits = len(holders_of(nodes, ring.laps, ring.route))
    if ring.cuts is not None:
        parse_cuts(ring.cuts, layers, nodes, visits)
        return
    uncut = f". This module could not be cut{' further' * (layers > 1)}, because {why}; or use" if why else ": use"
    deeper = "" if why else ", or a deeper model"
    enough = layers >= ends.needed(visits)
    if not enough and not _movable(ring):
        raise too_few_for_route(ends, visits, layers, f"{uncut} fewer --laps or --nodes{deeper}")
    # A list of layers may run on fewer devices than there are; a module that cannot be cut at all is never silent.
    if nodes > 1 and not enough and (keep_all or (why and layers < len(holders_of(2)))):
        raise too_few_layers(ends, nodes, layers, f"{uncut} {ends.nodes(layers)} or fewer{deeper}")


def plan_options(
    config: RunConfig, batch_size: int, microbatches: int, layers: int, nodes: int, keep_all: bool
) -> PlanOptions:
    """What the planner is told of a run's settings."""
    ring, training = config.ring, config.training
    visits = len(holders_of(nodes, ring.laps, ring.route))
    return PlanOptions(
        batch_size,
        microbatches,
        ring.window,
        DEFAULT_SCHEDULE.name if ring.schedule == AUTO else schedule_named(ring.schedule).name,
        training.clip_norm is not None,
        wire_format(training.wire).payload_bytes(1024) / 4096,
        keep_all=keep_all,
        cuts=None if ring.cuts is None else tuple(parse_cuts(ring.cuts, layers, nodes, visits)),
        staleness=training.staleness,
        laps=ring.laps,
        shape=ring.route,
        recompute=ring.recompute,
        protect=config.keep.protect,
        shares_state=config.ring.share_optimizer,
        late=parse_sums(config.ring.group_sums),
        sum_tree=training.sum_tree,
        any_schedule=ring.schedule == AUTO,
        any_groups=ring.groups == ANY_GROUPS,
        minimise=ring.minimise,
    )


def options_on_paper(
    config: RunConfig, batch_size: int, microbatches: int, layers: int, nodes: int, keep_all: bool, in_order: bool
) -> PlanOptions:
    """As `plan_options`, with groups as they fit so many nodes. `in_order`: no two nodes may share a stage unasked."""
    given = config.ring.groups
    groups: tuple[int, ...] = ()
    if given not in (None, ANY_GROUPS) and nodes > 1:
        groups = fitted(parse_groups(given or ""), nodes - 1)
        nodes, keep_all = len(groups) + 1, True
    options = plan_options(config, batch_size, microbatches, layers, nodes, keep_all)
    return replace(options, groups=groups, any_groups=options.any_groups and not in_order)


def ways(config: RunConfig) -> list[RunConfig]:
    """Those that end in the bits asked for first. Groups take part wherever they keep them."""
    ring, training = config.ring, config.training
    shared = ring.groups is None and training.sum_tree > 1 and training.staleness == 0
    found = [replaced(config, {"groups": ANY_GROUPS}) if shared else config]
    return found if training.staleness else [*found, replaced(config, {"staleness": 1})]


def _movable(ring: RingPart) -> bool:
    """Whether the cuts are the plan's own, on a plain ring."""
    return ring.cuts is None and ring.groups in (None, ANY_GROUPS) and ring.laps == 1 and ring.route == "ring"


def _forecast(request: PlanRequest, planned: Plan) -> Forecast:
    """For the record, so that what was said can be held against what came."""
    members, simulated = _members(request, planned), planned.simulated
    return Forecast(
        planned.step_s,
        simulated.idle_fraction,
        tuple(
            # The master has built and measured the model: its peak may lie behind it.
            NodeForecast(
                node, device.name, max(memory.total_bytes, peak_rss_bytes() if node == MASTER else 0.0),
                _known(memory.free_bytes), step.busy_s,
            )
            for node, device, memory, step in zip(
                members, planned.devices, planned.memory, simulated.nodes, strict=True
            )
        ),
        tuple(each.device for each in planned.left_out),
        planned.left_out_text,
    )  # fmt: skip


def _known(size: float) -> float | None:
    return size if math.isfinite(size) else None


def _members(request: PlanRequest, planned: Plan) -> list[int]:
    """The node of every device of the plan, as far as they are there without a hole."""
    numbers = {device.name: node for node, device in enumerate(request.devices)}
    return [numbers[device.name] for device in planned.devices]


def _route(request: PlanRequest, planned: Plan) -> tuple[Route, tuple[str, ...]]:
    members = _members(request, planned)
    holders = [tuple(members[node] for node in each) for each in planned.options.holders(len(members))]
    return grouped(holders, planned.bounds), exposed(request, planned.bounds)


def _numbered(route: Route, members: Sequence[int]) -> Route:
    """The same route over the nodes that are there: where one was lost, the numbers have a hole."""
    return Route(
        tuple(
            msgspec.structs.replace(
                visit, node=members[visit.node], others=tuple(members[each] for each in visit.others)
            )
            for visit in route.visits
        )
    )


def _lines(route: Route, members: Sequence[int], request: PlanRequest) -> dict[int, float]:
    """Bytes per second from every node to the one behind it, where it is known."""
    devices = dict(zip(members, request.devices, strict=True))
    rates = {
        here.node: rate_between(devices[here.node], devices[there.node], request.paths)
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
        return f"#{first} {layers[first].name}"
    return f"#{first}-{stop - 1} {layers[first].name} to {layers[stop - 1].name}"
