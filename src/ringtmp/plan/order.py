"""In which order devices stand where some reach each other worse than others.

Pure. What crosses a cut takes as long as the path allows, there and back; the longest crossing of a ring is made as short
as possible, then all of them together. Every order is looked at for up to 8 devices; for more, pairs change places for as
long as that helps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations, pairwise, permutations

from ringtmp.plan.device import Device, Paths, latency_between, rate_between

MOST_PERMUTED = 7


def shortest_order(order: Sequence[int], devices: Sequence[Device], paths: Paths, size: float) -> tuple[int, ...]:
    """The same devices, by number, the master still first; `size` bytes cross each cut. Among equals the given order."""
    crossing = {
        (a, b): _crossing_s(devices[a], devices[b], paths, size) + _crossing_s(devices[b], devices[a], paths, size)
        for a in order
        for b in order
        if a != b
    }

    def cost(workers: Sequence[int]) -> tuple[float, float]:
        ways = [crossing[pair] for pair in pairwise((order[0], *workers, order[0]))]
        return max(ways), math.fsum(ways)

    best = tuple(order[1:])
    if len(best) < 2:
        return tuple(order)
    least = cost(best)
    if len(best) <= MOST_PERMUTED:
        for workers in permutations(order[1:]):
            if (found := cost(workers)) < least:
                best, least = workers, found
        return (order[0], *best)
    improved = True
    while improved:
        improved = False
        for first, second in combinations(range(len(best)), 2):
            exchanged = list(best)
            exchanged[first], exchanged[second] = exchanged[second], exchanged[first]
            if (found := cost(exchanged)) < least:
                best, least, improved = tuple(exchanged), found, True
    return (order[0], *best)


def _crossing_s(source: Device, target: Device, paths: Paths, size: float) -> float:
    return size / rate_between(source, target, paths) + latency_between(source, target, paths)
