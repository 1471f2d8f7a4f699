"""What a plan makes small: time, modelled energy, or memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ringtmp.config import RingPart, RunConfig, from_tree
from ringtmp.errors import UsageError
from ringtmp.metrics.energy import Load, Watts
from ringtmp.plan.devices import Device, LayerCost, Link, Measured
from ringtmp.plan.planner import PlanOptions, plan

LAYERS = [LayerCost(f"layer{at}", (Measured(1, 0.01, 0.02, 1e6, 1e4),), 10**6, 10**6, 0) for at in range(8)]
LINK = Link(1e8, 1e8)
#: A frugal master, and two workers that are much faster and draw much more.
DEVICES = [
    Device("desk", memory_bytes=1e9, idle_w=1.0, busy_w=2.0, link=LINK),
    *(Device(f"hot{at}", speed=2.0, memory_bytes=1e9, idle_w=50.0, busy_w=90.0, link=LINK) for at in range(2)),
]
OPTIONS = PlanOptions(8, 8)


def test_the_least_energy_leaves_out_what_draws_much_and_the_least_time_takes_it() -> None:
    fast = plan(LAYERS, DEVICES, OPTIONS)
    frugal = plan(LAYERS, DEVICES, replace(OPTIONS, minimise="energy"))
    assert len(fast.devices) == 3
    assert [each.name for each in frugal.devices] == ["desk"]
    assert frugal.cost == frugal.simulated.joules < fast.simulated.joules
    assert "instead of" in frugal.left_out[0].reason
    assert "J (modelled)" in frugal.left_out[0].reason
    assert any("least energy" in line and "modelled" in line for line in frugal.summary())


def test_joules_are_those_of_the_formula_that_runs_use() -> None:
    made = plan(LAYERS, DEVICES, replace(OPTIONS, minimise="energy", keep_all=True))
    nodes = zip(made.simulated.nodes, made.devices, strict=True)
    loads = [
        Load(Watts(device.idle_w or 0, device.busy_w or 0), made.step_s, node.busy_s, 0.0, 1.0)
        for node, device in nodes
    ]
    assert made.cost == pytest.approx(sum(each.joules for each in loads))


def test_the_least_memory_spreads_the_model_and_never_needs_more_than_the_others() -> None:
    plans = {each: plan(LAYERS, DEVICES, replace(OPTIONS, minimise=each)) for each in ("time", "energy", "memory")}
    most = {name: max(each.total_bytes for each in made.memory) for name, made in plans.items()}
    assert most["memory"] == min(most.values()) == plans["memory"].cost
    assert len(plans["memory"].devices) == 3
    assert plans["time"].step_s == min(each.step_s for each in plans.values())


def test_energy_with_watts_that_nobody_knows_is_refused_with_what_to_do() -> None:
    there = [DEVICES[0], replace(DEVICES[1], busy_w=None)]
    with pytest.raises(UsageError, match="nothing is known of hot0: give idle_w and busy_w, or a preset"):
        plan(LAYERS, there, replace(OPTIONS, minimise="energy"))


def test_an_unknown_word_is_refused_with_those_there_are() -> None:
    assert RunConfig().ring == RingPart(minimise="time")
    with pytest.raises(UsageError, match="unknown --for 'watts': choose from energy, memory, time"):
        from_tree({"ring": {"minimise": "watts"}})
