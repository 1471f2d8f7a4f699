"""In which order devices stand where some reach each other worse than others.

Pure. What crosses a cut takes as long as the path allows, there and back; the longest crossing of a ring is made as short
as possible, then all of them together. Up to 8 devices by a dynamic programme over sets of workers and who stands last:

    best[S, d] = min over e in S - d of best[S - d, e] joined with the crossing from e to d

The longest crossing it finds is the shortest there is; for more devices pairs change places for as long as that helps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations, pairwise

from ringtmp.plan.devices import Device, Paths, latency_between, rate_between

MOST_WORKERS = 7
Cost = tuple[float, float]  # the longest crossing, and all of them
Order = tuple[int, ...]


def shortest_orders(
    orders: Sequence[Sequence[int]], devices: Sequence[Device], paths: Paths, size: float
) -> list[Order]:
    """For each, the same devices by number, the master still first; `size` bytes cross every cut. Among equals the given
    order."""
    crossing = _crossings(devices, paths, size)
    best = _programme(crossing, max((order for order in orders if len(order) <= MOST_WORKERS + 1), key=len, default=()))
    found = []
    for order in orders:
        given = tuple(order)
        shorter = best.get(frozenset(given[1:])) if best else None
        if shorter is None and len(given) > 2:
            shorter = _exchanged(given, crossing)
        found.append(shorter if shorter and _cost(shorter, crossing) < _cost(given, crossing) else given)
    return found


def _crossings(devices: Sequence[Device], paths: Paths, size: float) -> dict[tuple[int, int], float]:
    def one_way_s(a: int, b: int) -> float:
        source, target = devices[a], devices[b]
        return size / rate_between(source, target, paths) + latency_between(source, target, paths)

    numbers = range(len(devices))
    return {(a, b): one_way_s(a, b) + one_way_s(b, a) for a in numbers for b in numbers if a != b}


def _programme(crossing: dict[tuple[int, int], float], everyone: Sequence[int]) -> dict[frozenset[int], Order]:
    """The best order of every set of these workers."""
    if not everyone:
        return {}
    master, workers = everyone[0], everyone[1:]
    best: dict[tuple[frozenset[int], int], tuple[Cost, Order]] = {}
    found: dict[frozenset[int], Order] = {}
    for count in range(1, len(workers) + 1):
        for chosen in combinations(workers, count):
            members = frozenset(chosen)
            for last in chosen:
                before = members - {last}
                ways = [best[before, end] for end in sorted(before)] or [((0.0, 0.0), (master,))]
                best[members, last] = min(
                    (_joined(cost, crossing[order[-1], last]), (*order, last)) for cost, order in ways
                )
            ends = (best[members, last] for last in chosen)
            found[members] = min((_joined(cost, crossing[order[-1], master]), order) for cost, order in ends)[1]
    return found


def _exchanged(order: Order, crossing: dict[tuple[int, int], float]) -> Order:
    best, least, improved = order, _cost(order, crossing), True
    while improved:
        improved = False
        for first, second in combinations(range(1, len(best)), 2):
            exchanged = list(best)
            exchanged[first], exchanged[second] = exchanged[second], exchanged[first]
            if (cost := _cost(exchanged, crossing)) < least:
                best, least, improved = tuple(exchanged), cost, True
    return best


def _cost(order: Sequence[int], crossing: dict[tuple[int, int], float]) -> Cost:
    ways = [crossing[pair] for pair in pairwise((*order, order[0]))] if len(order) > 1 else [0.0]
    return max(ways), math.fsum(ways)


def _joined(cost: Cost, more: float) -> Cost:
    return max(cost[0], more), cost[1] + more
