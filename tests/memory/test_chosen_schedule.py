"""`--schedule auto`: the plan chooses the schedule, keeps cuts given by hand, says so, and changes no bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from costs import devices
from ringtmp import api
from ringtmp.config import ModelPart, RingPart, RunConfig, TrainingPart
from ringtmp.errors import DoesNotFit
from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.plan.choose_schedule import LEAST_GAIN, much_faster, plan_with_schedule
from ringtmp.plan.pipeline_schedules import SCHEDULES
from ringtmp.plan.planner import PlanOptions, plan
from test_simulated_schedules import model

FREE = PlanOptions(8, 8, process_bytes=0.0, any_schedule=True)


def test_weight_gradients_are_put_off_where_that_makes_the_step_clearly_shorter() -> None:
    chosen = plan_with_schedule(model(12), devices(4), replace(FREE, keep_all=True))
    usual = plan(model(12), devices(4), replace(FREE, keep_all=True))
    assert chosen.options.schedule == "zero-bubble"
    assert chosen.step_s < usual.step_s * (1 - LEAST_GAIN)


@pytest.mark.parametrize(("count", "weights_s"), [(1, 1.0), (4, 0.0)])
def test_where_nothing_is_gained_it_stays_as_usual(count: int, weights_s: float) -> None:
    chosen = plan_with_schedule(model(12, weights_s), devices(count), replace(FREE, keep_all=True))
    assert chosen.options.schedule == "1f1b"


def test_a_schedule_that_does_not_fit_is_not_chosen() -> None:
    costs, cuts = model(12, stored=10.0), ((0, 2), (2, 5), (5, 8), (8, 11), (11, 12))
    given = replace(FREE, cuts=cuts, window=7)
    assert plan_with_schedule(costs, devices(4), given).options.schedule == "zero-bubble"
    needed = [each.total_bytes for each in plan(costs, devices(4), given).memory]
    small = [replace(each, memory_bytes=most) for each, most in zip(devices(4), needed, strict=True)]
    assert plan_with_schedule(costs, small, given).options.schedule == "1f1b"
    tiny = [replace(each, memory_bytes=1.0) for each in devices(4)]
    with pytest.raises(DoesNotFit):
        plan_with_schedule(costs, tiny, given)


def test_cuts_by_hand_are_kept_and_forecast() -> None:
    cuts = ((0, 3), (3, 6), (6, 9), (9, 11), (11, 12))
    made = plan_with_schedule(model(12), devices(4), replace(FREE, cuts=cuts))
    assert made.bounds == cuts
    assert made.step_s > 0


def test_many_more_microbatches_are_spoken_of_only_where_they_help_much() -> None:
    few = plan_with_schedule(model(12), devices(4), replace(FREE, batch_size=64, microbatches=2, keep_all=True))
    said = much_faster(few)
    assert said.startswith("--microbatches 4 would take about")
    assert "other weights" in said
    assert much_faster(few, least=32) == "", "a BatchNorm needs two samples, say"
    many = plan_with_schedule(model(12), devices(4), replace(FREE, batch_size=64, microbatches=32, keep_all=True))
    assert much_faster(many) == ""
    assert much_faster(plan_with_schedule(model(12), devices(1), FREE)) == ""


def digits(folder: Path, **ring: Any) -> api.Result:
    config = RunConfig(
        ModelPart("mlp", {"width": 16, "depth": 4}), TrainingPart(steps=3, batch_size=24), RingPart(nodes=3, **ring)
    )
    return api.start(config, run_dir=folder, pool=InMemoryPool(3, seed=1))


@pytest.mark.long
def test_a_run_records_what_was_chosen_and_has_the_bits_of_every_schedule(tmp_path: Path) -> None:
    auto = digits(tmp_path / "auto").summary
    assert auto.schedule in SCHEDULES
    assert auto.schedule_chosen
    cuts = digits(tmp_path / "cuts", cuts="0,1-2,3,4").summary
    assert cuts.schedule_chosen
    assert cuts.forecast is not None
    assert [each.segments[0][:2] for each in cuts.per_node] == ["#0", "#1", "#3"]
    for name in SCHEDULES:
        given = digits(tmp_path / name, schedule=name).summary
        assert (given.schedule, given.schedule_chosen) == (name, False)
        assert given.weights_sha256 == auto.weights_sha256 == cuts.weights_sha256
