"""Orders of devices where paths differ from what links say."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costs import layers
from ringtmp.plan import planner
from ringtmp.plan.device_order import shortest_orders
from ringtmp.plan.devices import Device, Link, Path, latency_between, rate_between
from ringtmp.plan.planner import PlanOptions
from ringtmp.strategies.ring.plan_warnings import slow_ways

LINK = Link(1e7, 1e7)
SLOW = Path(1e5, 0.0)


def both(*pairs: str, path: Path = SLOW) -> dict[tuple[str, str], Path]:
    return {each: path for a, b in pairs for each in ((a, b), (b, a))}


def there(count: int) -> list[Device]:
    return [Device("mabcdefghijk"[number], link=LINK) for number in range(count)]


def shortest_order(
    order: tuple[int, ...], devices: list[Device], paths: dict[tuple[str, str], Path], size: float
) -> tuple[int, ...]:
    (found,) = shortest_orders([order], devices, paths, size)
    return found


def test_two_that_hardly_reach_each_other_are_kept_apart() -> None:
    assert shortest_order((0, 1, 2, 3), there(4), both("ab"), 1e5) == (0, 1, 3, 2)
    assert shortest_order((0, 1, 2, 3), there(4), both("ac"), 1e5) == (0, 1, 2, 3), "they were no neighbours"
    assert shortest_order((0, 1), there(2), both("ma"), 1e5) == (0, 1)


def test_among_many_pairs_change_places_until_nobody_is_next_to_the_slow_one() -> None:
    devices = there(11)
    slow = both("ab", "cd", "ef", "gh")
    order = shortest_order(tuple(range(11)), devices, slow, 1e5)
    assert sorted(order) == list(range(11))
    assert order[0] == 0
    names = [devices[number].name for number in (*order, 0)]
    assert not any(pair in slow for pair in pairwise(names))


@given(st.lists(st.tuples(st.sampled_from("mabc"), st.sampled_from("mabc"), st.integers(1, 50)), max_size=6))
def test_no_order_has_a_shorter_longest_way(given_paths: list[tuple[str, str, int]]) -> None:
    devices = there(4)
    paths = {(a, b): Path(rate * 1e5, 0.001) for a, b, rate in given_paths if a != b}

    def longest(order: tuple[int, ...]) -> float:
        pairs = [(devices[a], devices[b]) for a, b in pairwise((*order, 0))]
        ways = [[(a, b), (b, a)] for a, b in pairs]
        return max(
            sum(1e5 / rate_between(*each, paths) + latency_between(*each, paths) for each in both_ways)
            for both_ways in ways
        )

    found = longest(shortest_order((0, 1, 2, 3), devices, paths, 1e5))
    assert found == pytest.approx(min(longest((0, *rest)) for rest in permutations((1, 2, 3))))


def test_a_plan_goes_around_a_slow_path_and_is_as_fast_as_without_it() -> None:
    devices, options = there(4), PlanOptions(16, 4, process_bytes=0.0)
    made = layers(12, forward_s=0.01, backward_s=0.02, output=1e5)
    free = planner.plan(made, devices, options)
    names = [each.name for each in free.devices]
    assert len(names) == 4
    slow = both(names[1] + names[2])
    found = planner.plan(made, devices, options, slow)
    assert found.step_s == pytest.approx(free.step_s)
    assert not any(pair in slow for pair in pairwise([each.name for each in found.devices] + ["m"]))
    assert found.paths == slow
    kept = planner.plan(made, free.devices, replace(options, keep_all=True), slow)
    assert kept.step_s > 2 * free.step_s, "in the given order it cannot"


def test_one_that_hears_nobody_but_the_master_is_left_out_whoever_it_is() -> None:
    devices = there(6)
    made = layers(24, forward_s=0.01, backward_s=0.02, output=1e5)
    for lonely in "abcde":
        slow = both(*(lonely + other for other in "abcde" if other != lonely))
        found = planner.plan(made, devices, PlanOptions(16, 4, process_bytes=0.0), slow)
        names = [each.name for each in found.devices]
        assert lonely not in names
        assert len(names) == 5
        assert [each.device for each in found.left_out] == [lonely]


def test_neighbours_that_hardly_reach_each_other_are_named_once_unless_nobody_tried() -> None:
    made, options = (
        layers(12, forward_s=0.01, backward_s=0.02, output=1e5),
        PlanOptions(16, 4, process_bytes=0.0, keep_all=True),
    )
    slow = both("ab", "ac", "mc", path=Path(2e5, 0.0))
    (said,) = slow_ways(planner.plan(made, there(4), options, slow))
    assert said.startswith("the link between a and b carries only 195.3 KiB/s")
    (said,) = slow_ways(planner.plan(made, there(4), options, both("ab")))
    assert said == "a and b could not reach each other when their link was tested"
    guessed = both("ab", path=replace(SLOW, tried=False))
    assert slow_ways(planner.plan(made, there(4), options, guessed)) == ()
