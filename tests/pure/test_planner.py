"""Who holds what."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringtmp.errors import UsageError
from ringtmp.plan.cuts_for_repeated_visits import bounds_for
from ringtmp.plan.partition import equal_cost
from ringtmp.plan.route import holders_of, parse_cuts, plain_ring, route_over


def bottleneck(costs: list[float], bounds: list[tuple[int, int]]) -> float:
    sums = [sum(costs[first:stop]) for first, stop in bounds]
    return sums[0] if len(sums) == 1 else max(sums[0] + sums[-1], *sums[1:-1])


@settings(max_examples=200, deadline=None)
@given(costs=st.lists(st.integers(1, 20).map(float), min_size=3, max_size=9), nodes=st.integers(2, 5))
def test_the_bottleneck_is_that_of_brute_force(costs: list[float], nodes: int) -> None:
    if nodes + 1 > len(costs):
        with pytest.raises(UsageError, match="nodes need at least"):
            equal_cost(costs, [True] * len(costs), nodes)
        return
    best = min(
        bottleneck(costs, list(zip([0, *cuts], [*cuts, len(costs)], strict=True)))
        for cuts in combinations(range(1, len(costs)), nodes)
    )
    bounds = equal_cost(costs, [True] * len(costs), nodes)
    assert bottleneck(costs, bounds) == pytest.approx(best, rel=1e-6)
    assert [layer for first, stop in bounds for layer in range(first, stop)] == list(range(len(costs)))


def test_front_and_tail_reach_to_a_layer_with_parameters() -> None:
    has = [False, True, True, True, False, False]
    bounds = equal_cost([1.0] * 6, has, 2)
    assert bounds[0][1] >= 2
    assert bounds[-1][0] <= 3


def test_more_nodes_than_layers_is_refused_with_the_number_that_fits() -> None:
    with pytest.raises(UsageError, match="5 nodes need at least 6 layers.*the model has 4: use --nodes 3 or fewer"):
        equal_cost([1.0] * 4, [True] * 4, 5)


def test_cuts_by_hand() -> None:
    assert parse_cuts("0-1,2,3-5", 6, 2) == [(0, 2), (2, 3), (3, 6)]
    assert parse_cuts("0-1,2-5,-", 6, 2) == [(0, 2), (2, 6), (6, 6)]
    assert parse_cuts("0-5", 6, 1) == [(0, 6)]


@pytest.mark.parametrize(
    ("cuts", "says"),
    [
        ("0-1,2-5", "has 2 ranges; a ring of 2 needs 3"),
        ("0-1,3,4-5", "must start at layer 2"),
        ("0-1,1-3,4-5", "must start at layer 2"),
        ("0-1,2,3-4", "ends at layer 4; the model has layers 0-5"),
        ("0-1,2,3-9", "ends at layer 9"),
        ("0-1,x,3-5", "'x' is not a range"),
        ("-,0-1,2-5", "'-' is not a range"),
    ],
)
def test_cuts_that_do_not_hold_every_layer_once_are_refused(cuts: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parse_cuts(cuts, 6, 2)


def test_neighbours_follow_the_route() -> None:
    route = plain_ring(4, [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)])
    assert [route.neighbours(node) for node in range(4)] == [(1, 3), (0, 2), (1, 3), (0, 2)]
    assert plain_ring(1, [(0, 5)]).neighbours(0) == ()


def test_laps_go_round_and_a_v_goes_out_and_back() -> None:
    assert holders_of(3) == [0, 1, 2, 0]
    assert holders_of(3, laps=2) == [0, 1, 2, 0, 1, 2, 0]
    assert holders_of(4, shape="v") == [0, 1, 2, 3, 2, 1, 0]
    assert holders_of(1) == holders_of(1, shape="v") == [0]
    assert holders_of(1, laps=2) == [0, 0], "two stages in one process"
    lap = route_over(holders_of(3, laps=2), [(i, i + 1) for i in range(7)])
    assert [lap.neighbours(node) for node in range(3)] == [(1, 2), (0, 2), (0, 1)]
    vee = route_over(holders_of(4, shape="v"), [(i, i + 1) for i in range(7)])
    assert [vee.neighbours(node) for node in range(4)] == [(1,), (0, 2), (1, 3), (2,)]
    assert parse_cuts("0,1,2-3,4,5,6,-", 7, 3, 7)[2:4] == [(2, 4), (4, 5)]


@settings(max_examples=100, deadline=None)
@given(
    costs=st.lists(st.integers(1, 9).map(float), min_size=7, max_size=10),
    holders=st.sampled_from([holders_of(2, laps=2), holders_of(3, laps=2), holders_of(3, shape="v")]),
)
def test_segments_of_several_visits_are_spread_nearly_as_well_as_by_brute_force(
    costs: list[float], holders: list[int]
) -> None:
    def slowest(bounds: list[tuple[int, int]]) -> float:
        return max(
            sum(sum(costs[slice(*each)]) for each, holder in zip(bounds, holders, strict=True) if holder == node)
            for node in set(holders)
        )

    best = min(
        slowest(list(zip([0, *cuts], [*cuts, len(costs)], strict=True)))
        for cuts in combinations(range(1, len(costs)), len(holders) - 1)
    )
    bounds = bounds_for(costs, [True] * len(costs), holders)
    assert [layer for first, stop in bounds for layer in range(first, stop)] == list(range(len(costs)))
    assert all(stop > first for first, stop in bounds)
    assert slowest(bounds) <= best + max(costs)


def test_more_visits_than_layers_are_refused_and_front_and_tail_keep_their_parameters() -> None:
    with pytest.raises(UsageError, match="7 visits needs at least 7 layers; the model has 6"):
        bounds_for([1.0] * 6, [True] * 6, holders_of(3, laps=2))
    bounds = bounds_for([1.0] * 8, [False, False, *[True] * 5, False], holders_of(3, shape="v"))
    assert bounds[0] == (0, 3)
    assert bounds[-1] == (6, 8)
