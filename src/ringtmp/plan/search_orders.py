"""Which devices in which order: every choice is weighed where there are few kinds of them, else orders are searched.

Pure. A choice is weighed by its bottleneck and by the way of one microbatch; the best few are simulated, with cuts moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ringtmp.plan.device_order import shortest_orders
from ringtmp.plan.devices import Device, Paths
from ringtmp.plan.exact_cuts import Candidate, Segments, every_multiset, given_order, states_of
from ringtmp.plan.objective import TIME
from ringtmp.plan.partition import REFINE_ACTIONS, alone, refine, require_layers, simulated_cost

#: Multisets of workers that are weighed one by one: 7 different workers make 128.
MOST_STATES = 256
#: Simulated, of those weighed.
FINALISTS = 5
#: Orders tried where there are too many to weigh.
SEARCHED_ORDERS = 24

#: With what a simulated step costs (objective.py); infinite where it does not fit.
Found = list[tuple[Candidate, float]]


def choices(segments: Segments, devices: Sequence[Device], paths: Paths | None) -> tuple[Found, float]:
    """Rings of one device a stage, and how far the best bottleneck may be from the least possible one."""
    if states_of(devices, named(paths)) <= MOST_STATES:
        return _weighed(segments, devices, paths), 0.0
    return _searched(segments, devices, paths)


def as_given(segments: Segments, devices: Sequence[Device], paths: Paths | None, groups: tuple[int, ...] = ()) -> Found:
    require_layers(segments.table, len(groups) + 1 if groups else len(devices))
    start = given_order(segments, devices, groups) if len(devices) > 1 else alone(segments, devices)
    return [] if start is None else [refine(segments, devices, start, paths, REFINE_ACTIONS)]


def _weighed(segments: Segments, devices: Sequence[Device], paths: Paths | None) -> Found:
    """Every choice of workers by its bottleneck and its way; the best few are simulated."""
    candidates = every_multiset(segments, devices, named(paths))
    if paths:
        candidates += _rearranged(segments, devices, candidates, paths)
    ranked = sorted(candidates, key=lambda each: _estimate_s(segments, devices, each, paths))
    return _simulated(segments, devices, likely(segments, ranked, FINALISTS), candidates, paths)


def likely(segments: Segments, ranked: Sequence[Candidate], count: int) -> list[Candidate]:
    """Of candidates by their estimated time, those worth simulating. Where something else is to be least, fewer devices may do
    better: the best of each number."""
    if segments.minimise == TIME:
        return list(ranked[:count])
    sizes = dict.fromkeys(len(each.order) for each in ranked)
    return [
        each for size in sizes for each in [each for each in ranked if len(each.order) == size][: max(2, count // 4)]
    ]


def named(paths: Paths | None) -> set[str]:
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
    rough = [(each, simulated_cost(segments, [devices[i] for i in each.order], each, paths)) for each in likely]
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
    gap = best.bottleneck / least_bottleneck(segments, devices, best.order) - 1
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


def least_bottleneck(segments: Segments, devices: Sequence[Device], order: Sequence[int]) -> float:
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
