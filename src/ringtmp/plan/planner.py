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
from ringtmp.plan.device_order import shortest_orders
from ringtmp.plan.devices import Device, LayerCost, Paths, check_devices
from ringtmp.plan.exact_cuts import Candidate, Segments, every_multiset, given_order, states_of
from ringtmp.plan.layer_costs import CostTable
from ringtmp.plan.memory_forecast import PROCESS_BYTES, MemoryForecast, forecast, held_in, require_fit
from ringtmp.plan.partition import REFINE_ACTIONS, alone, refine, refuse, require_layers, spread, step_s
from ringtmp.plan.pipeline_schedules import DEFAULT_SCHEDULE, ScheduleName
from ringtmp.plan.route import Route, holders_of, route_over
from ringtmp.plan.simulate_pipeline import RingOptions, simulate_ring
from ringtmp.plan.simulated_step import Simulated
from ringtmp.plan.sum_tree import SumTree
from ringtmp.units import bytes_text, seconds_text

#: Multisets of workers that are weighed one by one: 7 different workers make 128.
MOST_STATES = 256
#: Simulated, of those weighed.
FINALISTS = 5
#: A device is left out only for a gain above this.
LEAST_GAIN = 0.01
#: Below this share of the strongest's pace a device is weak: forecasts are least true of those (1.8 times too short at a tenth
#: of a core), so a ring with one must promise this much more than the best without.
WEAK_SHARE, WEAK_GAIN = 0.25, 0.1
#: A wider window holds more activations, and must be worth it.
WIDER_GAIN = 0.002
#: Orders tried where there are too many to weigh.
SEARCHED_ORDERS = 24


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
    any_schedule: bool = False  # the plan may choose another one (choose_schedule.py)

    @property
    def ring(self) -> RingOptions:
        count = min(self.microbatches, self.batch_size)
        return RingOptions(count, self.window, self.schedule, self.clip, staleness=self.staleness)

    def sums_at_once(self, visits: int) -> int:
        """Sums of gradients that a visit holds."""
        ring = self.ring
        window = ring.window_for(visits)
        return SumTree(self.sum_tree).sums_at_once(ring.microbatches, ring.pipeline.places(window) - window)

    def holders(self, nodes: int) -> list[int]:
        """The node of every visit."""
        return holders_of(nodes, self.laps, self.shape)


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
        return route_over(self.options.holders(len(self.devices)), self.bounds)

    @property
    def step_s(self) -> float:
        return self.simulated.step_s

    @property
    def samples_per_s(self) -> float:
        return self.options.batch_size / self.step_s

    def layers_text(self, node: int) -> str:
        """'0-2, 9'"""
        held = [(visit.first, visit.stop) for visit in self.route.on(node)]
        return ", ".join("loss" if a == b else str(a) if b - a == 1 else f"{a}-{b - 1}" for a, b in held)

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
        return (
            f"plan: {_count(len(self.devices), 'device')}, {_count(self.options.ring.microbatches, 'microbatch')}"
            f"{' (auto)' if chosen else ''}, {self.options.schedule}, about {seconds_text(self.step_s)} a step "
            f"({self.samples_per_s:.3g} samples/s), idle {self.simulated.idle_fraction:.0%}",
            f"layers by number: {held}",
            f"memory: {tightest.device} is tightest, {bytes_text(tightest.total_bytes)} of "
            f"{bytes_text(tightest.free_bytes)}",
            *([self.left_out_text] if self.left_out else []),
        )


def plan(
    layers: Sequence[LayerCost], devices: Sequence[Device], options: PlanOptions, paths: Paths | None = None
) -> Plan:
    """The plan with the shortest simulated step; the first device is the master.

    DoesNotFit with the missing bytes by device; UsageError for devices or cuts that cannot be.
    """
    check_devices(tuple(devices))
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
    ring = options.ring
    samples, again = options.batch_size / ring.microbatches, options.recompute == "all"
    holders = options.holders(len(devices))
    sums = options.sums_at_once(len(holders))
    table = CostTable(layers, samples, options.wire_ratio, again, 1 + options.staleness, sums)
    if options.cuts is not None:
        _check_cuts(options.cuts, table.count, len(holders))
        made = _make(table, devices, options, ring, bounds=options.cuts, paths=paths)
        return _widened(made, table, ring, paths)
    for each in _windows(ring, len(holders)):
        # First with the microbatches a visit usually holds; where the simulation held more than fit, with a full window.
        for safe in (False, True):
            segments = Segments(table, each, options.process_bytes, safe, options.protect)
            found, gap = _candidates(segments, devices, options, paths)
            if found:
                return _chosen(segments, devices, options, found, gap, paths)
    if _several_visits(options, len(devices)):
        near, _ = spread(segments, devices, holders, paths, 0)
        _make(table, devices, options, segments.options, bounds=near.bounds, paths=paths)
    refuse(segments, devices, options.keep_all)
    raise AssertionError("nothing fits, and nothing is missing")


def _several_visits(options: PlanOptions, devices: int) -> bool:
    return devices > 1 and (options.laps > 1 or options.shape == "v")


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
        found = [spread(segments, devices, options.holders(len(devices)), paths, REFINE_ACTIONS)]
    elif options.keep_all or len(devices) == 1:
        found = _as_given(segments, devices, paths)
    elif states_of(devices, _named(paths)) <= MOST_STATES:
        found = _weighed(segments, devices, paths)
    else:
        found, gap = _searched(segments, devices, paths)
    return [each for each in found if math.isfinite(each[1])], gap


def _chosen(
    segments: Segments, devices: Sequence[Device], options: PlanOptions, found: Found, gap: float, paths: Paths | None
) -> Plan:
    allowed = _without_weak(found, devices)
    fastest = min(took for _, took in allowed)
    # Of those as good as the fastest, the one with most devices: more memory, and nobody turned away for nothing.
    chosen, took = max(
        (each for each in allowed if each[1] <= fastest * (1 + LEAST_GAIN)),
        key=lambda each: (len(each[0].order), -each[1]),
    )
    gone = [each for i, each in enumerate(devices) if i not in chosen.order]
    left_out = tuple(LeftOut(each.name, _reason(segments, found, chosen, took, each, len(devices))) for each in gone)
    members = [devices[i] for i in chosen.order]
    made = _make(
        segments.table,
        members,
        options,
        segments.options,
        bounds=chosen.bounds,
        paths=paths,
        left_out=left_out,
        gap=gap,
    )
    return _widened(made, segments.table, segments.options, paths)


def _without_weak(found: Found, devices: Sequence[Device]) -> Found:
    """Only rings without weak devices, unless one with them is worth it, or none fits without."""
    weak = {i for i, each in enumerate(devices) if each.pace < WEAK_SHARE * max(other.pace for other in devices)}
    strong = [each for each in found if weak.isdisjoint(each[0].order)]
    worth = min(took for _, took in found) * (1 + WEAK_GAIN)
    return strong if strong and min(took for _, took in strong) <= worth else found


def _widened(made: Plan, table: CostTable, ring: RingOptions, paths: Paths | None) -> Plan:
    """With more in flight where that is faster and fits: over slow lines a round trip takes longer than the usual window
    covers. Only where the window is the plan's own to choose, and the usual one fits."""
    if ring.window is not None:
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
        if found.step_s > made.step_s * (1 - WIDER_GAIN):
            break
        made = found
    return made


def _make(
    table: CostTable, devices: Sequence[Device], options: PlanOptions, ring: RingOptions, *,
    bounds: tuple[tuple[int, int], ...], paths: Paths | None, left_out: tuple[LeftOut, ...] = (), gap: float = 0.0,
) -> Plan:  # fmt: skip
    route = route_over(options.holders(len(devices)), bounds)
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


Found = list[tuple[Candidate, float]]


def _as_given(segments: Segments, devices: Sequence[Device], paths: Paths | None) -> Found:
    require_layers(segments.table, len(devices))
    start = given_order(segments, devices) if len(devices) > 1 else alone(segments, devices)
    return [] if start is None else [refine(segments, devices, start, paths, REFINE_ACTIONS)]


def _weighed(segments: Segments, devices: Sequence[Device], paths: Paths | None) -> Found:
    """Every choice of workers by its bottleneck and its way; the best few are simulated."""
    candidates = every_multiset(segments, devices, _named(paths))
    if paths:
        candidates += _rearranged(segments, devices, candidates, paths)
    ranked = sorted(candidates, key=lambda each: _estimate_s(segments, devices, each, paths))
    return _simulated(segments, devices, ranked[:FINALISTS], candidates, paths)


def _named(paths: Paths | None) -> set[str]:
    """Devices that no other of their kind may stand in for."""
    return {name for pair in paths or () for name in pair}


def _rearranged(
    segments: Segments, devices: Sequence[Device], known: Sequence[Candidate], paths: Paths
) -> list[Candidate]:  # fmt: skip
    """The same devices in the order with the shortest way, where that is another: bottlenecks are weighed by links alone."""
    found = []
    orders = shortest_orders([each.order for each in known], devices, paths, segments.table.mean_cut_bytes)
    for each, order in zip(known, orders, strict=True):
        again = None if order == each.order else given_order(segments, [devices[i] for i in order])
        found += [replace(again, order=order)] if again is not None else []
    return found


def _simulated(
    segments: Segments, devices: Sequence[Device], likely: Sequence[Candidate], known: Sequence[Candidate],
    paths: Paths | None,
) -> Found:  # fmt: skip
    """The likely ones as they are; the two best of them, and the largest ring, with cuts moved; and the master alone."""
    rough = [(each, step_s(segments, [devices[i] for i in each.order], each.bounds, paths)) for each in likely]
    rough.sort(key=lambda each: each[1])
    chosen = [each for each, _ in rough[:2]]
    if known:
        largest = min(known, key=lambda each: (-len(each.order), each.bottleneck))
        around = _rearranged(segments, devices, [largest], paths) if paths else []
        chosen += [each for each in (largest, *around) if each not in chosen]
    found = [refine(segments, [devices[i] for i in each.order], each, paths, REFINE_ACTIONS) for each in chosen]
    if (single := alone(segments, devices)) is not None:
        found.append(refine(segments, devices[:1], single, paths, REFINE_ACTIONS))
    return found


def _searched(segments: Segments, devices: Sequence[Device], paths: Paths | None) -> tuple[Found, float]:
    """Orders by rule of thumb and by exchanging pairs; then without the slowest one, two, four, ... Where none fits, those with
    the least memory go first."""
    most = max(1, segments.table.count - segments.table.least_front - segments.table.least_tail)
    workers = sorted(range(1, len(devices)), key=lambda i: -devices[i].pace)[:most]
    best = _by_rule(segments, devices, workers)
    smallest = sorted(workers, key=lambda i: devices[i].memory_bytes)
    dropped = 1
    while best is None and dropped < len(smallest):
        workers = [i for i in workers if i not in smallest[:dropped]]
        best = _by_rule(segments, devices, workers)
        dropped *= 2
    if best is None:  # the fastest may be the smallest
        workers = sorted(range(1, len(devices)), key=lambda i: -devices[i].memory_bytes)[:most]
        best = _by_rule(segments, devices, workers)
    for attempt in range(SEARCHED_ORDERS if best is not None and len(best.order) > 2 else 0):
        assert best is not None
        order = list(best.order)
        first = 1 + attempt % (len(order) - 1)
        second = 1 + (first + len(order) // 2 + attempt // len(order)) % (len(order) - 1)
        order[first], order[second] = order[second], order[first]
        best = _better(segments, devices, best, order)
    if best is None:
        return _simulated(segments, devices, [], [], paths), 0.0
    gap = best.bottleneck / _least_bottleneck(segments, devices, best.order) - 1
    known = [best]
    dropped = 1
    while dropped < len(workers):
        slow = set(workers[len(workers) - dropped :])
        smaller = _better(segments, devices, None, [i for i in best.order if i not in slow])
        known += [smaller] if smaller is not None else []
        dropped *= 2
    known += _rearranged(segments, devices, known, paths) if paths else []
    return _simulated(segments, devices, known, known, paths), gap


def _by_rule(segments: Segments, devices: Sequence[Device], workers: Sequence[int]) -> Candidate | None:
    best: Candidate | None = None
    by_memory = sorted(workers, key=lambda i: devices[i].memory_bytes)
    for order in (sorted(workers), workers, workers[::-1], by_memory):
        best = _better(segments, devices, best, [0, *order])
    return best


def _better(
    segments: Segments, devices: Sequence[Device], best: Candidate | None, order: Sequence[int]
) -> Candidate | None:
    found = given_order(segments, [devices[i] for i in order])
    if found is None or (best is not None and found.bottleneck >= best.bottleneck):
        return best
    return replace(found, order=tuple(order))


def _least_bottleneck(segments: Segments, devices: Sequence[Device], order: Sequence[int]) -> float:
    """No cut is better than all work spread evenly over the paces, nor than the largest layer on the fastest."""
    table = segments.table
    paces = [devices[i].pace for i in order]
    each = [
        table.forward_s[i + 1] - table.forward_s[i] + table.backward_s[i + 1] - table.backward_s[i]
        for i in range(table.count)
    ]
    return max(sum(each) / sum(paces), max(each) / max(paces))


def _estimate_s(segments: Segments, devices: Sequence[Device], each: Candidate, paths: Paths | None) -> float:
    """(microbatches - 1) * bottleneck + the way of one microbatch."""
    table, way, bottleneck = segments.table, 0.0, each.bottleneck
    numbers = (*each.order, each.order[0])
    for here, there, (_, stop) in zip(numbers, numbers[1:], each.bounds, strict=False) if paths else ():
        for source, target in ((devices[here], devices[there]), (devices[there], devices[here])):
            if paths and (path := paths.get((source.name, target.name))) is not None:
                crossing_s = table.cut_bytes[stop] / path.bytes_per_s
                bottleneck = max(bottleneck, crossing_s)
                way += crossing_s + path.latency_s
    for number, (first, stop) in zip(numbers, each.bounds, strict=True):
        device, stage = devices[number], table.stage(first, stop)
        way += (stage.forward_s + stage.backward_s) / device.pace
        way += 2 * table.cut_bytes[first] / min(device.link.up_bytes_per_s, device.link.down_bytes_per_s)
        way += 4 * device.link.latency_s
    return (segments.options.microbatches - 1) * bottleneck + way


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
        return f"with {who} a step would take {seconds_text(slower)} instead of {seconds_text(took)}"
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


def _count(number: int, word: str) -> str:
    plural = "es" if word.endswith("ch") else "s"
    return f"{number} {word}{plural if number != 1 else ''}"
