"""Decide which node holds which layers.

Pure: layer costs in, bounds out. A ring moves at the pace of its slowest node, so the longest of compute, send and
receive on a node is minimised first (bottleneck.py, exact); then cuts are moved for as long as the simulated step, fill
and drain included, gets shorter. Where there are few ways to cut, all are simulated and the result is exact. Every
worker holds at least one layer, front and tail at least one layer with parameters each, so that neither inputs nor
labels leave the master.

`equal_cost` knows nothing of devices: the best bottleneck is found by bisection; whether a bottleneck is possible is
decided greedily for every length of the front, O(layers**2) per probe.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations, pairwise

from ringtmp.errors import DoesNotFit, UsageError
from ringtmp.plan.cuts_for_repeated_visits import bounds_for
from ringtmp.plan.devices import Device, Paths
from ringtmp.plan.exact_cuts import Candidate, Segments, least_missing, shortest_way
from ringtmp.plan.layer_costs import CostTable
from ringtmp.plan.memory_forecast import forecast, held, held_in, refuse_single_layers, require_fit
from ringtmp.plan.minimum_layers_per_stage import Ends, too_few_layers
from ringtmp.plan.node_groups import by_group, grouped, members_of
from ringtmp.plan.objective import cost_of
from ringtmp.plan.route import holders_of, plain_ring
from ringtmp.plan.simulate_pipeline import simulate_ring

Bounds = tuple[tuple[int, int], ...]
#: Actions simulated while cuts are moved: about 20 us each.
REFINE_ACTIONS = 15_000
#: Bottlenecks looked at beside the best, as multiples of it.
LOOSER = (1.0, 1.1, 1.25, 1.5, 2.0)


def equal_cost(costs: Sequence[float], has_parameters: Sequence[bool], nodes: int) -> list[tuple[int, int]]:
    """Bounds per visit: front, one per worker, tail (a single visit for one node)."""
    layers = len(costs)
    if nodes == 1:
        return [(0, layers)]
    if nodes < 1:
        raise UsageError(f"a ring needs at least one node, not {nodes}")
    ends = Ends.of(has_parameters)
    front_least, tail_least = ends.front, ends.tail
    if ends.needed(nodes + 1) > layers:
        raise too_few_layers(ends, nodes, layers, f": use --nodes {ends.nodes(layers)} or fewer, or a deeper model")
    sums = [0.0, *accumulate(costs)]
    # The first probe asks for nothing, so some bounds always exist; each later one keeps what it could improve.
    best = _bounds_under(float("inf"), sums, front_least, tail_least, nodes)
    assert best is not None
    low, high = 0.0, _bottleneck(best, sums)
    for _ in range(50):
        middle = (low + high) / 2
        found = _bounds_under(middle, sums, front_least, tail_least, nodes)
        if found is None:
            low = middle
        else:
            best, high = found, min(middle, _bottleneck(found, sums))
    return best


def _bottleneck(bounds: Sequence[tuple[int, int]], sums: Sequence[float]) -> float:
    cost = [sums[stop] - sums[first] for first, stop in bounds]
    return max(cost[0] + cost[-1], *cost[1:-1])


def _bounds_under(
    cap: float, sums: Sequence[float], front_least: int, tail_least: int, nodes: int
) -> list[tuple[int, int]] | None:
    layers = len(sums) - 1
    workers = nodes - 1
    for front in range(front_least, layers - tail_least - workers + 1):
        if sums[front] > cap:
            break
        bounds = [(0, front)]
        start = front
        for left in range(workers, 0, -1):
            # Take as much as the cap allows, but leave a layer for each worker still to come.
            stop = start + 1
            if sums[stop] - sums[start] > cap:
                break
            while stop < layers - tail_least - (left - 1) and sums[stop + 1] - sums[start] <= cap:
                stop += 1
            bounds.append((start, stop))
            start = stop
        else:
            if sums[front] + sums[layers] - sums[start] <= cap and layers - start >= tail_least:
                return [*bounds, (start, layers)]
    return None


def alone(segments: Segments, devices: Sequence[Device]) -> Candidate | None:
    """Everything on the master, if it fits."""
    table, master = segments.table, devices[0]
    memory = forecast(table, plain_ring(1, [(0, table.count)]), [master], [1], segments.process_bytes)
    compute_s = (table.forward_s[-1] + table.backward_s[-1]) / master.pace
    fits = memory[0].missing_bytes <= 0
    return Candidate((0,), ((0, table.count),), compute_s) if fits else None


def refuse(segments: Segments, devices: Sequence[Device], keep_all: bool, groups: tuple[int, ...] = ()) -> None:
    """Say why no cuts exist: too few layers, a layer too large for everyone, or the bytes that are missing at least. Of a group
    the smallest member stands for all."""
    table = segments.table
    if groups:
        devices = [min(each, key=lambda device: device.memory_bytes) for each in by_group(groups, devices)]
    if not keep_all:  # of more than there are layers for, those with most memory
        room = max(table.count - table.least_front - table.least_tail, 0)
        roomiest = sorted(devices[1:], key=lambda each: -each.memory_bytes)[:room]
        devices = [devices[0], *(each for each in devices[1:] if each in roomiest)][: room + 1]
    require_layers(table, len(devices))
    refuse_single_layers(table, devices, segments.process_bytes)
    nearest = least_missing(segments, devices) if len(devices) > 1 else Candidate((0,), ((0, table.count),), math.inf)
    assert nearest is not None
    route = plain_ring(len(devices), list(nearest.bounds))
    options, visits = segments.options, len(nearest.bounds)
    counts = [held(visit, visits, options, segments.safe) for visit in range(visits)]
    memory = forecast(table, route, devices, counts, segments.process_bytes, segments.protect)
    require_fit(memory, options.microbatches)
    if segments.protect != "off":
        raise DoesNotFit("no cuts were found that leave room for the snapshots: use --protect checkpoint, or auto")


def require_layers(table: CostTable, nodes: int) -> None:
    ends = Ends(table.least_front, table.least_tail)
    if nodes > 1 and ends.needed(nodes + 1) > table.count:
        raise too_few_layers(ends, nodes, table.count, f": use {ends.nodes(table.count)} or fewer, or a deeper model")


def simulated_cost(segments: Segments, devices: Sequence[Device], each: Candidate, paths: Paths | None = None) -> float:
    """Of a simulated step, what is to be least; infinite where the cuts do not fit."""
    return _Trial(segments, devices, paths, groups=each.groups).cost(each.bounds)


def refine(
    segments: Segments, devices: Sequence[Device], start: Candidate, paths: Paths | None, actions: int
) -> tuple[Candidate, float]:
    """Begin with the best bottleneck or a looser one with a shorter way, and move cuts for as long as the simulated step
    gets shorter; simulate all cuts there are where that is affordable."""
    trial = _Trial(segments, devices, paths, groups=start.groups)
    best = start.bounds
    best_s = trial.cost(best)
    left = actions // trial.actions
    nodes, table = len(start.bounds) - 1, segments.table  # as many cuts
    if nodes > 0 and math.comb(table.count - 1, nodes) <= min(left, 2000):
        for cuts in combinations(range(1, table.count), nodes):
            bounds = _with_cuts(cuts, table.count)
            if (took := trial.cost(bounds)) < best_s * (1 - 1e-9):
                best, best_s = bounds, took
        return replace(start, bounds=best), best_s
    for factor in LOOSER if nodes > 1 else ():
        looser = shortest_way(segments, devices, start.bottleneck * factor * (1 + 1e-9), start.groups)
        if looser is not None and (took := trial.cost(looser.bounds)) < best_s * (1 - 1e-9):
            best, best_s = looser.bounds, took
    improved = nodes > 0
    while improved and left > 0:
        improved = False
        for move in _moves(nodes):
            # A move that helped is tried again at once: a layer more, and another.
            while left > 0 and (next_bounds := _moved(best, move)) is not None:
                left -= 1
                if (took := trial.cost(next_bounds)) >= best_s * (1 - 1e-9):
                    break
                best, best_s, improved = next_bounds, took, True
    return replace(start, bounds=best), best_s


def spread(
    segments: Segments, devices: Sequence[Device], holders: Sequence[int], paths: Paths | None, actions: int
) -> tuple[Candidate, float]:
    """Cuts for a route that visits nodes several times: work in proportion to the paces, then cuts are moved for as long
    as the simulated step gets shorter. Every device takes part, in the given order."""
    table = segments.table
    costs = [
        table.forward_s[i + 1] - table.forward_s[i] + table.backward_s[i + 1] - table.backward_s[i]
        for i in range(table.count)
    ]
    trial = _Trial(segments, devices, paths, holders)
    paces = [device.pace for device in devices]
    best: Bounds = tuple(bounds_for(costs, table.has_parameters, holders, paces))
    known, left, improved = trial.looked_at(best), actions // trial.actions, True
    while improved and left > 0:
        improved = False
        for move in _moves(len(holders) - 1):
            while left > 0 and (next_bounds := _moved(best, move)) is not None:
                left -= 1
                # First until it fits, then for as long as it gets faster.
                if not (found := trial.looked_at(next_bounds)).better_than(known):
                    break
                best, known, improved = next_bounds, found, True
    best_s = known.fitting
    return Candidate(tuple(range(len(devices))), best, best_s / segments.options.microbatches), best_s


@dataclass(frozen=True, slots=True)
class _Looked:
    missing_bytes: float
    cost: float  # seconds of a step, or what else is to be least (objective.py)

    @property
    def fitting(self) -> float:
        """Infinite where it does not fit."""
        return math.inf if self.missing_bytes > 0 else self.cost

    def better_than(self, other: _Looked) -> bool:
        if other.missing_bytes > 0:
            return self.missing_bytes < other.missing_bytes
        return self.missing_bytes <= 0 and self.cost < other.cost * (1 - 1e-9)


class _Trial:
    """Simulates cuts; infinite for those that do not fit. `holders` None: a plain ring, or one of groups."""

    def __init__(
        self, segments: Segments, devices: Sequence[Device], paths: Paths | None, holders: Sequence[int] | None = None,
        groups: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        self._segments, self._devices, self._paths = segments, devices, paths
        holders = holders_of(len(devices)) if holders is None else holders
        self._members = members_of(groups, range(len(devices))) if groups else [(each,) for each in holders]
        # Under a quota a single step depends on where in a period it begins; steps that overlap need a few to settle.
        steps = 2 if any(device.quota is not None for device in devices) else 1
        steps += 4 * segments.options.staleness
        self._options = replace(segments.options, steps=steps, widest=max(groups, default=1))
        self.actions = steps * len(self._members) * (2 * segments.options.microbatches + 1)

    def cost(self, bounds: Bounds) -> float:
        return self.looked_at(bounds).fitting

    def looked_at(self, bounds: Bounds) -> _Looked:
        table, nodes = self._segments.table, len(self._devices)
        if nodes > 1 and (bounds[0][1] < table.least_front or bounds[-1][0] > table.count - table.least_tail):
            return _Looked(math.inf, math.inf)
        route = grouped(self._members, bounds)
        result = simulate_ring(table, route, self._devices, self._options, self._paths)
        counts = held_in(result, route, self._options, self._devices)
        memory = forecast(table, route, self._devices, counts, self._segments.process_bytes, self._segments.protect)
        cost = cost_of(self._segments.minimise, result, memory)
        return _Looked(sum(max(each.missing_bytes, 0.0) for each in memory), cost)


def _with_cuts(cuts: Sequence[int], layers: int) -> Bounds:
    edges = [0, *cuts, layers]
    return tuple(pairwise(edges))


def _moves(cuts: int) -> Iterator[tuple[range, int]]:
    """Which cuts shift together, by -1 or 1: a layer moves from one node to another. Nearest neighbours first."""
    for width in range(1, cuts + 1):
        for first in range(cuts - width + 1):
            yield range(first, first + width), -1
            yield range(first, first + width), 1


def _moved(bounds: Bounds, move: tuple[range, int]) -> Bounds | None:
    """None where somebody would be left without a layer."""
    which, change = move
    cuts = [first + change if index in which else first for index, (first, _) in enumerate(bounds[1:])]
    edges = [0, *cuts, bounds[-1][1]]
    return _with_cuts(cuts, edges[-1]) if all(a < b for a, b in pairwise(edges)) else None
