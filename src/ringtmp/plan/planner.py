"""From layer costs and devices to a plan: who takes part, in which order, who holds what, and what to expect.

Pure. Where the devices are of few kinds (all rings of up to 8) every choice and order of them is weighed exactly by its
bottleneck and the best few are simulated; else orders are searched and the gap to a lower bound is told. A device
without which the ring is more than a hundredth faster is left out and named.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ringtmp.errors import DoesNotFit, UsageError
from ringtmp.plan.devices import Device, LayerCost, Paths, check_devices
from ringtmp.plan.exact_cuts import Candidate, Segments
from ringtmp.plan.layer_costs import CostTable
from ringtmp.plan.memory_forecast import PROCESS_BYTES, MemoryForecast, forecast, held_in, require_fit
from ringtmp.plan.node_groups import grouped, members_of, shape_text, shared_parts
from ringtmp.plan.objective import TIME, Objective, cost_of, cost_text, require_watts, told
from ringtmp.plan.partition import REFINE_ACTIONS, refuse, spread
from ringtmp.plan.pipeline_schedules import DEFAULT_SCHEDULE, ScheduleName
from ringtmp.plan.route import Route, holders_of
from ringtmp.plan.search_groups import group_choices
from ringtmp.plan.search_orders import Found, as_given, choices, named
from ringtmp.plan.simulate_pipeline import RingOptions, simulate_ring
from ringtmp.plan.simulated_step import Simulated
from ringtmp.plan.sum_tree import SumTree
from ringtmp.units import bytes_text, rate_text, seconds_text

#: A device is left out only for a gain above this.
LEAST_GAIN = 0.01
#: Below this share of the strongest's pace a device is weak: forecasts are least true of those (1.8 times too short at a tenth
#: of a core), so a ring with one must promise this much more than the best without.
WEAK_SHARE, WEAK_GAIN = 0.25, 0.1
#: A wider window holds more activations, and must be worth it.
WIDER_GAIN = 0.002


@dataclass(frozen=True, slots=True)
class PlanOptions:
    batch_size: int
    microbatches: int
    window: int | None = None
    schedule: ScheduleName = DEFAULT_SCHEDULE.name
    clip: bool = False
    wire_ratio: float = 1.0  # bytes that travel per byte of float32
    process_bytes: float = PROCESS_BYTES
    keep_all: bool = False  # every device takes part, in the given order
    protect: str = "off"  # where snapshots are kept: auto, memory, disk; else there are none
    cuts: tuple[tuple[int, int], ...] | None = None  # by hand: every device takes part, in the given order
    staleness: int = 0
    laps: int = 1
    shape: str = "ring"  # or v
    recompute: str = "none"  # or all, or auto: where it would not fit otherwise
    sum_tree: int = 1  # parts of a batch that are added up as a tree
    shares_state: bool = False  # members of a group each keep some of the optimizer state
    late: int = 0  # steps that what members of a group make may be late; 0: they wait for each other
    groups: tuple[int, ...] = ()  # workers that share each stage, in their order; empty: one each
    any_groups: bool = False  # the plan chooses them
    minimise: Objective = TIME
    any_schedule: bool = False  # the plan may choose another one (choose_schedule.py)

    @property
    def ring(self) -> RingOptions:
        count = min(self.microbatches, self.batch_size)
        return RingOptions(
            count, self.window, self.schedule, self.clip, staleness=self.staleness,
            parts=shared_parts(self.sum_tree, self.late, count), widest=max(self.groups, default=1), late=self.late > 0,
        )  # fmt: skip

    def sums_at_once(self, visits: int) -> int:
        """Sums of gradients that a visit holds."""
        ring = self.ring
        window = ring.window_for(visits)
        return SumTree(self.sum_tree).sums_at_once(ring.microbatches, ring.pipeline.places(window) - window)

    def holders(self, nodes: int) -> list[tuple[int, ...]]:
        """The nodes of every visit."""
        if self.groups and nodes > 1:
            return members_of(self.groups, range(nodes))
        return [(node,) for node in holders_of(nodes, self.laps, self.shape)]


@dataclass(frozen=True, slots=True)
class LeftOut:
    device: str
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """`devices` in the order of the ring: devices[n] is node n."""

    layers: tuple[LayerCost, ...]
    devices: tuple[Device, ...]
    left_out: tuple[LeftOut, ...]
    options: PlanOptions
    bounds: tuple[tuple[int, int], ...]
    window: int
    simulated: Simulated
    memory: tuple[MemoryForecast, ...]
    gap: float  # how far the bottleneck may be from the best possible one, as a share of it; 0: it is the best
    paths: Paths = field(default_factory=dict)

    @property
    def route(self) -> Route:
        return grouped(self.options.holders(len(self.devices)), self.bounds)

    @property
    def shape(self) -> str:
        """M-2-1-M; empty where no stage is shared."""
        return shape_text(self.options.groups) if self.route.grouped else ""

    @property
    def step_s(self) -> float:
        return self.simulated.step_s

    @property
    def cost(self) -> float:
        """What was to be least."""
        return cost_of(self.options.minimise, self.simulated, self.memory)

    @property
    def samples_per_s(self) -> float:
        return self.options.batch_size / self.step_s

    @property
    def groups_text(self) -> str:
        """'M-2-1-M: desk 0-1 | a + b 2-4 | c 5-6 | desk 7'; empty where no stage is shared."""
        if not self.shape:
            return ""
        held = [
            f"{' + '.join(self.devices[node].name for node in visit.members)} {range_text(visit.first, visit.stop)}"
            for visit in self.route.visits
        ]
        return f"{self.shape}: {' | '.join(held)}"

    def layers_text(self, node: int) -> str:
        """'0-2, 9'"""
        return ", ".join(range_text(visit.first, visit.stop) for visit in self.route.on(node))

    @property
    def left_out_text(self) -> str:
        """One line on who does not take part, and why; empty where everyone does."""
        if not self.left_out:
            return ""
        why: dict[str, list[str]] = {}
        for each in self.left_out:
            why.setdefault(each.reason, []).append(each.device)
        reasons = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in why.items())
        ring, members = len(self.devices) + len(self.left_out), _count(len(self.devices), "device")
        return f"your ring of {ring} trains on {members}; left out: {reasons}. Use --all-devices to keep them all"

    def summary(self, chosen: bool = False) -> tuple[str, ...]:
        """Lines for people. `chosen`: the number of microbatches is the plan's own choice."""
        tightest = max(self.memory, key=lambda each: each.total_bytes / each.free_bytes)
        held = " | ".join(f"{device.name} {self.layers_text(node)}" for node, device in enumerate(self.devices))
        shape = f" as {self.shape}" if self.shape else ""
        return (
            f"plan: {_count(len(self.devices), 'device')}{shape}, {_count(self.options.ring.microbatches, 'microbatch')}"
            f"{' (auto)' if chosen else ''}, {self.options.schedule}, about {seconds_text(self.step_s)} a step "
            f"({rate_text(self.samples_per_s)} samples/s), idle {self.simulated.idle_fraction:.0%}",
            f"layers by number: {held}",
            f"memory: {tightest.device} is tightest, {bytes_text(tightest.total_bytes)} of "
            f"{bytes_text(tightest.free_bytes)}",
            *([purpose] if (purpose := told(self.options.minimise, self.cost)) else []),
            *([self.left_out_text] if self.left_out else []),
        )


def plan(
    layers: Sequence[LayerCost], devices: Sequence[Device], options: PlanOptions, paths: Paths | None = None
) -> Plan:
    """The plan with the shortest simulated step; the first device is the master.

    DoesNotFit with the missing bytes by device; UsageError for devices or cuts that cannot be.
    """
    check_devices(tuple(devices))
    require_watts(options.minimise, devices)
    again = replace(options, recompute="all")
    if options.recompute == "all":
        return _plan(layers, devices, options, paths)
    try:
        return _plan(layers, devices, replace(options, recompute="none"), paths)
    except DoesNotFit as problem:
        try:
            made = _plan(layers, devices, again, paths)
        except DoesNotFit:
            raise problem from None
        if options.recompute == "auto":
            return made
        raise DoesNotFit(
            f"{problem}; with --recompute all it fits, at about {seconds_text(made.step_s)} a step"
        ) from None


def _plan(layers: Sequence[LayerCost], devices: Sequence[Device], options: PlanOptions, paths: Paths | None) -> Plan:
    if options.any_groups and options.cuts is None:
        options = replace(options, groups=())
    ring = options.ring
    samples, again = options.batch_size / ring.microbatches, options.recompute == "all"
    holders = options.holders(len(devices))
    sums = options.sums_at_once(len(holders))
    table = CostTable(
        layers, samples, options.wire_ratio, again, 1 + options.staleness, sums,
        shares_state=options.shares_state, late=options.late,
    )  # fmt: skip
    if options.cuts is not None:
        _check_cuts(options.cuts, table.count, len(holders))
        made = _make(table, devices, options, ring, bounds=options.cuts, paths=paths)
        return _widened(made, table, ring, paths)
    for each in _windows(ring, len(holders)):
        # First with the microbatches a visit usually holds; where the simulation held more than fit, with a full window.
        for safe in (False, True):
            segments = Segments(table, each, options.process_bytes, safe, options.protect, options.minimise)
            found, gap = _candidates(segments, devices, options, paths)
            if found:
                return _chosen(segments, devices, options, found, gap, paths)
    if _several_visits(options, len(devices)):
        near, _ = spread(segments, devices, [first for first, *_ in holders], paths, 0)
        _make(table, devices, options, segments.options, bounds=near.bounds, paths=paths)
    refuse(segments, devices, options.keep_all, options.groups)
    raise AssertionError("nothing fits, and nothing is missing")


def _several_visits(options: PlanOptions, devices: int) -> bool:
    return options.laps > 1 or (devices > 1 and options.shape == "v")


def _windows(ring: RingOptions, visits: int) -> list[RingOptions]:
    """The window asked for or the default; where that does not fit and none was asked for, smaller ones."""
    first = ring.window_for(visits)
    if ring.window is not None or ring.pipeline.all_forward_first:
        return [ring]
    smaller = {visits, visits // 2, 2, 1}
    return [ring, *(replace(ring, window=each) for each in sorted(smaller, reverse=True) if 1 <= each < first)]


def _candidates(
    segments: Segments, devices: Sequence[Device], options: PlanOptions, paths: Paths | None
) -> tuple[Found, float]:
    gap = 0.0
    if _several_visits(options, len(devices)):
        holders = [first for first, *_ in options.holders(len(devices))]
        found = [spread(segments, devices, holders, paths, REFINE_ACTIONS)]
    elif options.keep_all or options.groups or len(devices) == 1:
        found = _one_each(segments, devices, options, paths)
    else:
        found, gap = choices(segments, devices, paths)
    if options.any_groups and len(devices) > 2:
        shared, gap = group_choices(segments, devices, paths, named(paths), options.keep_all)
        found += shared
    return [each for each in found if math.isfinite(each[1])], gap


def _one_each(segments: Segments, devices: Sequence[Device], options: PlanOptions, paths: Paths | None) -> Found:
    try:
        return as_given(segments, devices, paths, options.groups)
    except UsageError:  # too few layers, which groups may make up for
        if not options.any_groups or len(devices) < 3:
            raise
        return []


def _chosen(
    segments: Segments, devices: Sequence[Device], options: PlanOptions, found: Found, gap: float, paths: Paths | None
) -> Plan:
    allowed = _without_weak(found, devices) if options.minimise == TIME else found
    fastest = min(took for _, took in allowed)
    # Of those as good as the fastest, the one with most devices: more memory, and nobody turned away for nothing.
    chosen, took = max(
        (each for each in allowed if each[1] <= fastest * (1 + LEAST_GAIN)),
        key=lambda each: (len(each[0].order), -each[1]),
    )
    gone = [each for i, each in enumerate(devices) if i not in chosen.order]
    left_out = tuple(LeftOut(each.name, _reason(segments, found, chosen, took, each, len(devices))) for each in gone)
    members = [devices[i] for i in chosen.order]
    if options.any_groups:
        options = replace(options, groups=chosen.groups)
    ring = replace(segments.options, widest=max(options.groups, default=1))
    made = _make(
        segments.table,
        members,
        options,
        ring,
        bounds=chosen.bounds,
        paths=paths,
        left_out=left_out,
        gap=gap,
    )
    return _widened(made, segments.table, ring, paths)


def _without_weak(found: Found, devices: Sequence[Device]) -> Found:
    """Only rings without weak devices, unless one with them is worth it, or none fits without."""
    weak = {i for i, each in enumerate(devices) if each.pace < WEAK_SHARE * max(other.pace for other in devices)}
    strong = [each for each in found if weak.isdisjoint(each[0].order)]
    worth = min(took for _, took in found) * (1 + WEAK_GAIN)
    return strong if strong and min(took for _, took in strong) <= worth else found


def _widened(made: Plan, table: CostTable, ring: RingOptions, paths: Paths | None) -> Plan:
    """With more in flight where that is faster and fits: over slow lines a round trip takes longer than the usual window
    covers. Only where the window is the plan's own to choose, and the usual one fits."""
    if ring.window is not None or made.options.minimise == "memory":
        return made
    most, window = ring.microbatches * (1 + ring.staleness), made.window
    while window < most:
        window = min(2 * window, most)
        wider = replace(ring, window=window)
        try:
            found = _make(
                table, made.devices, made.options, wider,
                bounds=made.bounds, paths=paths, left_out=made.left_out, gap=made.gap,
            )  # fmt: skip
        except DoesNotFit:
            break
        if found.cost > made.cost * (1 - WIDER_GAIN):
            break
        made = found
    return made


def _make(
    table: CostTable, devices: Sequence[Device], options: PlanOptions, ring: RingOptions, *,
    bounds: tuple[tuple[int, int], ...], paths: Paths | None, left_out: tuple[LeftOut, ...] = (), gap: float = 0.0,
) -> Plan:  # fmt: skip
    route = grouped(options.holders(len(devices)), bounds)
    # Under a quota a step depends on where in a period it begins: take the mean of a few.
    steps = (5 if any(device.quota is not None for device in devices) else 2) + 4 * options.staleness
    simulated = simulate_ring(table, route, devices, replace(ring, steps=steps), paths)
    counts = held_in(simulated, route, ring, devices)
    memory = forecast(table, route, devices, counts, options.process_bytes, options.protect)
    require_fit(memory, ring.microbatches)
    window = ring.window_for(len(bounds))
    return Plan(
        table.layers, tuple(devices), left_out, options,
        bounds=bounds, window=window, simulated=simulated, memory=memory, gap=gap, paths=paths or {},
    )  # fmt: skip


def _reason(segments: Segments, found: Found, chosen: Candidate, took: float, device: Device, devices: int) -> str:
    least = segments.process_bytes + device.extra_bytes
    if device.memory_bytes <= least:
        have, need = bytes_text(device.memory_bytes), bytes_text(least)
        return f"its {have} of memory is not enough for a node, which takes {need} before its first layer"
    most = max(len(each.order) for each, _ in found)
    if most > len(chosen.order):
        slower = min(other for each, other in found if len(each.order) == most)
        who = f"all {devices}" if most == devices else str(most)
        if slower < took:
            return f"it is far slower than the others, and with {who} a step would be less than {WEAK_GAIN:.0%} shorter"
        costs, need = (cost_text(segments.minimise, each) for each in (slower, took))
        if segments.minimise == "memory":
            return f"with {who} the fullest device would need {costs} instead of {need}"
        return f"with {who} a step would take {costs} instead of {need}"
    table = segments.table
    spare = table.count - table.least_front - table.least_tail
    if devices > spare + 1:
        return f"the model has only {table.count} layers, enough for {spare + 1} devices"
    return f"no cuts fit with its {bytes_text(device.memory_bytes)}"


def _check_cuts(cuts: tuple[tuple[int, int], ...], layers: int, visits: int) -> None:
    edges = [0, *(stop for _, stop in cuts)]
    if len(cuts) != visits or [first for first, _ in cuts] != edges[:-1] or edges[-1] != layers:
        raise UsageError(f"cuts {cuts} must contain each of the {layers} layers exactly once, in {visits} visits")
    if any(first >= stop for first, stop in cuts[:-1]):
        raise UsageError(f"cuts {cuts}: only the tail may be empty")


def range_text(first: int, stop: int) -> str:
    """'0-2', '9', or 'loss' for a tail without layers."""
    return "loss" if first == stop else str(first) if stop - first == 1 else f"{first}-{stop - 1}"


def _count(number: int, word: str) -> str:
    plural = "es" if word.endswith("ch") else "s"
    return f"{number} {word}{plural if number != 1 else ''}"
