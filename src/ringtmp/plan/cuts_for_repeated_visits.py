"""Decide which layers each visit gets when a node is visited several times (laps, V shapes).

Pure: layer costs and the order of holders in, bounds out. A ring moves at the pace of its slowest node, so the largest
sum of costs on a node is made small first; then the sums are made alike, then the visits, because a long visit
delays everything behind it. Cuts start at equal shares and move one layer at a time while that is better: with every
node at several places a cut moves work between any two of them, so a good place is near.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from ringtmp.plan.minimum_layers_per_stage import Ends, too_few_for_route

Bounds = list[tuple[int, int]]


def bounds_for(
    costs: Sequence[float], has_parameters: Sequence[bool], holders: Sequence[int], paces: Sequence[float] | None = None
) -> Bounds:
    """Bounds per visit: a layer or more each, and one with parameters at the front and at the tail. `paces`: of every
    node; None: all alike."""
    paces = paces or [1.0] * len(set(holders))
    least = [1] * len(holders)
    ends = Ends.of(has_parameters)
    least[0], least[-1] = ends.front, ends.tail
    if sum(least) > len(costs):
        raise too_few_for_route(ends, len(holders), len(costs), ": use fewer --laps or --nodes, or a deeper model")
    cuts = _equal_shares(costs, holders, least, paces)
    best = _badness(cuts, costs, holders, paces)
    improved = True
    while improved:
        improved = False
        for index in range(1, len(cuts) - 1):
            for by in (-1, 1):
                moved = [*cuts[:index], cuts[index] + by, *cuts[index + 1 :]]
                if any(stop - first < need for (first, stop), need in zip(pairwise(moved), least, strict=True)):
                    continue
                badness = _badness(moved, costs, holders, paces)
                if badness < best:
                    cuts, best, improved = moved, badness, True
    return list(pairwise(cuts))


def _equal_shares(
    costs: Sequence[float], holders: Sequence[int], least: Sequence[int], paces: Sequence[float]
) -> list[int]:
    """Edges of visits that are about equal within a node, and whose sums are about as the paces over nodes."""
    sums = [0.0, *accumulate(costs)]
    shares = [paces[holder] / holders.count(holder) for holder in holders]
    cuts, wanted = [0], 0.0
    for index, share in enumerate(shares[:-1]):
        wanted += share / sum(shares) * sums[-1]
        low, high = cuts[-1] + least[index], len(costs) - sum(least[index + 1 :])
        cuts.append(min(range(low, high + 1), key=lambda edge: abs(sums[edge] - wanted)))
    return [*cuts, len(costs)]


def _badness(
    cuts: Sequence[int], costs: Sequence[float], holders: Sequence[int], paces: Sequence[float]
) -> tuple[float, float, float]:
    visits = [sum(costs[first:stop]) for first, stop in pairwise(cuts)]
    nodes = dict.fromkeys(holders, 0.0)
    for holder, cost in zip(holders, visits, strict=True):
        nodes[holder] += cost / paces[holder]
    return max(nodes.values()), sum(each**2 for each in nodes.values()), sum(each**2 for each in visits)
