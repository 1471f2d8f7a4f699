"""Zero-bubble, delayed gradients, several visits per node and recomputing, on paper: simulated, planned, advised."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costs import devices, layers
from ringtmp.errors import DoesNotFit, UsageError
from ringtmp.plan import advice
from ringtmp.plan.devices import Device, LayerCost, Link
from ringtmp.plan.layer_costs import CostTable
from ringtmp.plan.memory_forecast import forecast
from ringtmp.plan.pipeline_schedules import SCHEDULES
from ringtmp.plan.planner import PlanOptions, plan
from ringtmp.plan.route import Route, Visit, holders_of, plain_ring
from ringtmp.plan.simulate_pipeline import RingOptions, simulate_ring
from test_next_action import grid, run
from test_simulated_steps import drawn, line_route


def model(count: int, weights_s: float = 1.0, **each: float) -> list[LayerCost]:
    """Forward takes a second, backward two; of those `weights_s` may wait."""
    found = layers(count, backward_s=2.0, **each)
    return [replace(one, measured=(replace(one.measured[0], weights_s=weights_s),)) for one in found]


@settings(max_examples=40, deadline=None)
@given(visits=st.integers(1, 5), microbatches=st.integers(1, 6), window=st.integers(1, 8), seed=st.integers(0, 999))
def test_zero_bubble_does_what_ticking_nodes_do(visits: int, microbatches: int, window: int, seed: int) -> None:
    luck = random.Random(seed)
    holders = [luck.randrange(visits) for _ in range(visits)]
    toys = run(visits, microbatches, window, SCHEDULES["zero-bubble"], holders, lambda: 0)
    route = Route(tuple(Visit(index, node, index, index + 1) for index, node in enumerate(holders)))
    table = CostTable(model(visits, update_s=1.0), 1)
    result = simulate_ring(table, route, devices(visits), RingOptions(microbatches, window, "zero-bubble"))
    wanted = [row.rstrip(" .") for row in grid(toys)]
    assert [row.rstrip(" .") for row in drawn(result, visits, 10 + 6 * visits * microbatches)] == wanted


def test_zero_bubble_does_the_same_work_in_less_time() -> None:
    table = CostTable(model(4), 1)
    plain = simulate_ring(table, line_route(4), devices(4), RingOptions(8))
    deferred = simulate_ring(table, line_route(4), devices(4), RingOptions(8, schedule="zero-bubble"))
    assert [node.busy_s for node in deferred.nodes] == pytest.approx([node.busy_s for node in plain.nodes])
    assert deferred.step_s < plain.step_s


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero-bubble"])
@pytest.mark.parametrize("clip", [False, True])
def test_steps_that_overlap_are_shorter_but_never_shorter_than_the_work(schedule: Any, clip: bool) -> None:
    table = CostTable(model(4, output=1.0), 1)
    there = devices(4, latency_s=0.2)
    exact = simulate_ring(table, line_route(4), there, RingOptions(4, schedule=schedule, clip=clip, steps=6))
    delayed = simulate_ring(
        table, line_route(4), there, RingOptions(4, schedule=schedule, clip=clip, steps=9, staleness=1)
    )
    assert delayed.step_s >= 4 * 3.0 - 1e-9
    if schedule == "gpipe":  # all of a step's microbatches are in flight, so none of the next one's
        assert delayed.step_s == pytest.approx(exact.step_s)
    else:
        assert delayed.step_s < exact.step_s
    # Nobody is ever more than one step ahead: the window counts the microbatches of both.
    assert all(held <= 8 for node in delayed.nodes for held in node.held)


def test_without_a_wait_delayed_steps_take_their_work_and_nothing_else() -> None:
    table = CostTable(model(3), 1)
    delayed = simulate_ring(table, line_route(3), devices(3), RingOptions(8, steps=9, staleness=1))
    assert delayed.step_s == pytest.approx(8 * 3.0)


def test_recomputing_costs_a_forward_and_stores_one_microbatch() -> None:
    plain, again = CostTable(model(3, stored=100.0), 1), CostTable(model(3, stored=100.0), 1, recompute=True)
    assert again.stage(0, 3).backward_s == plain.stage(0, 3).backward_s + plain.stage(0, 3).forward_s
    route, there = plain_ring(2, [(0, 1), (1, 2), (2, 3)]), devices(2)
    assert forecast(plain, route, there, [5, 3, 1], 0.0)[1].stored_bytes == 300
    assert forecast(again, route, there, [5, 3, 1], 0.0)[1].stored_bytes == 100


@pytest.mark.parametrize(
    "how",
    [
        {"schedule": "zero-bubble"},
        {"staleness": 1},
        {"laps": 2},
        {"shape": "v"},
        {"recompute": "all"},
        {"schedule": "zero-bubble", "staleness": 1, "laps": 2},
        {"schedule": "gpipe", "shape": "v", "clip": True},
    ],
)
def test_every_way_to_run_a_ring_has_a_plan(how: dict[str, Any]) -> None:
    there = [Device(f"d{i}", speed, memory_bytes=1e9, link=Link(10.0, 10.0)) for i, speed in enumerate([1.0, 0.5, 2.0])]
    made = plan(model(12, output=0.1, stored=10.0), there, PlanOptions(6, 6, process_bytes=0.0, keep_all=True, **how))
    held = [layer for visit in made.route.visits for layer in visit.layers]
    assert held == list(range(12))
    assert [visit.node for visit in made.route.visits] == holders_of(3, how.get("laps", 1), how.get("shape", "ring"))
    assert made.step_s >= max(node.busy_s for node in made.simulated.nodes) - 1e-6
    busy = [node.busy_s * device.pace for node, device in zip(made.simulated.nodes, made.devices, strict=True)]
    # Where steps overlap, one step's share of the time does not begin and end with its work.
    near = 0.05 if how.get("staleness") else 1e-6
    assert sum(busy) == pytest.approx(12 * 6 * (4.0 if how.get("recompute") else 3.0), rel=near)


def test_several_visits_are_shared_out_by_pace() -> None:
    there = [Device("slow", 0.25), Device("fast", 1.0), Device("faster", 1.5)]
    made = plan(model(24), there, PlanOptions(4, 4, process_bytes=0.0, laps=2))
    held = [sum(visit.stop - visit.first for visit in made.route.on(node)) for node in range(3)]
    assert held[0] < held[1] <= held[2]


def test_several_visits_that_do_not_fit_are_refused_with_the_bytes() -> None:
    there = [Device(name, memory_bytes=500.0) for name in "abc"]
    with pytest.raises(DoesNotFit, match="bytes"):
        plan(model(12, weights=100), there, PlanOptions(4, 4, process_bytes=0.0, laps=2))
    with pytest.raises(UsageError, match="visits needs at least"):
        plan(model(5), devices(3), PlanOptions(4, 4, laps=3))


def test_delayed_gradients_need_the_weights_twice() -> None:
    there = devices(2)
    one, two = (
        plan(model(4, weights=100), there, PlanOptions(4, 4, process_bytes=0.0, staleness=each)).memory
        for each in (0, 1)
    )
    assert sum(each.weight_bytes for each in two) == 2 * sum(each.weight_bytes for each in one)


def test_what_fits_only_when_recomputed_says_so_and_auto_recomputes() -> None:
    there = [Device(name, memory_bytes=1150.0) for name in "ab"]
    heavy = model(6, stored=200.0)
    # The master's front holds five microbatches of two layers, unless they are computed again.
    options = PlanOptions(8, 8, window=5, process_bytes=0.0, keep_all=True, cuts=((0, 2), (2, 4), (4, 6)))
    with pytest.raises(DoesNotFit, match="with --recompute all it fits, at about"):
        plan(heavy, there, options)
    made = plan(heavy, there, replace(options, recompute="auto"))
    assert made.options.recompute == "all"
    roomy = [replace(each, memory_bytes=1e9) for each in there]
    assert plan(heavy, roomy, replace(options, recompute="auto")).options.recompute == "none"


def test_schedule_window_and_recomputing_are_advised_with_their_gain() -> None:
    there = tuple(Device(f"d{i}", memory_bytes=1e9, link=Link(10.0, 10.0, 0.3)) for i in range(4))
    made = plan(model(8), there, PlanOptions(8, 8, 2, process_bytes=0.0, keep_all=True, recompute="all"))
    found = {each.change: each.gain for each in advice.gains(made, there)}
    assert found["the zero-bubble schedule"] > 0
    assert found["a window of 4"] > 0
    assert found["storing activations instead of computing them again"] > 0
