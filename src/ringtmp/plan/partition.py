"""Decide which node holds which layers.

Pure: layer costs in, bounds out. A ring moves at the pace of its slowest node, so the largest sum of costs on a node
is minimised; the master's front and tail count together. Every worker holds at least one layer, front and tail at
least one layer with parameters each, so that neither inputs nor labels leave the master.

The best bottleneck is found by bisection; whether a bottleneck is possible is decided greedily for every length of the
front, O(layers**2) per probe.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from ringtmp.errors import UsageError


def equal_cost(costs: Sequence[float], has_parameters: Sequence[bool], nodes: int) -> list[tuple[int, int]]:
    """Bounds per visit: front, one per worker, tail (a single visit for one node)."""
    layers = len(costs)
    if nodes == 1:
        return [(0, layers)]
    if nodes < 1:
        raise UsageError(f"a ring needs at least one node, not {nodes}")
    front_least = _first(has_parameters)
    tail_least = _first(list(reversed(has_parameters)))
    if front_least + tail_least + nodes - 1 > layers:
        possible = max(1, layers - front_least - tail_least + 1)
        raise UsageError(
            f"{nodes} nodes need at least {front_least + tail_least + nodes - 1} layers (the master's front and tail and "
            f"one per worker); the model has {layers}: use --nodes {possible} or fewer, or a deeper model"
        )
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


def _first(has_parameters: Sequence[bool]) -> int:
    return next((index + 1 for index, has in enumerate(has_parameters) if has), len(has_parameters))


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
