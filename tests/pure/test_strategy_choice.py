"""`bench choice` on paper: twelve settings, what was chosen held against the best measured way."""

from __future__ import annotations

import pytest

from invented import choices, measurement, page
from ringtmp.bench.bench_request import Choices
from ringtmp.bench.experiments import strategy_choice
from ringtmp.bench.experiments.strategy_choice import ALONE, AUTO
from ringtmp.bench.measuring.jobs import Job
from ringtmp.bench.measuring.measurement_files import Measured, Measurement, Result
from ringtmp.config import RunConfig, replaced
from ringtmp.errors import UsageError
from ringtmp.report.page_text import markdown
from ringtmp.run.check_settings import resolve


def asked(beds: str = "") -> Choices:
    return choices(names=("choice",), beds=beds, steps=3, warm_up=1)


def measured(job: Job, step_s: float) -> Measurement:
    return measurement(job, 0, Result((step_s, step_s), {"strategy_chosen": "auto: ring on 4 devices"}))


def test_twelve_settings_each_measure_auto_and_every_way_it_may_choose() -> None:
    trials = strategy_choice.TRIALS
    assert len({each.name for each in trials}) == 12
    for trial in trials:
        jobs = strategy_choice.trial_jobs(asked(), trial)
        assert {AUTO, ALONE, "ring", "allreduce:halving", "ps:bsp:workers"} <= set(jobs)
        assert jobs[ALONE].files["devices.toml"].count("[[device]]") == 1
        assert jobs["ring"].files["devices.toml"].count("[[device]]") == 4
        for case, flags in trial.ways.items():
            given = dict(zip(flags[::2], flags[1::2], strict=False))
            settings = {"nodes": 4, "strategy": given["--strategy"], "sum_tree": int(given.get("--sum-tree", 1))}
            resolve(replaced(RunConfig(), {**settings, "share_data": case == AUTO, "groups": given.get("--groups")}))
    assert all(sum(each.cpu for each in devices) <= 1.81 for devices in strategy_choice.NETWORKS.values())
    with pytest.raises(UsageError, match="unknown setting 'gtp'"):
        strategy_choice.jobs(asked("gtp"))


def test_what_was_chosen_is_held_against_the_best_measured_way() -> None:
    wanted = asked("gpt alike at 100,mlp alike at 100")
    mlp, gpt = (strategy_choice.trial_jobs(wanted, each) for each in strategy_choice._wanted(wanted))
    steps = {AUTO: 1.05, ALONE: 4.0, "ring": 1.0, "allreduce:halving": 2.0}
    taken = [measured(gpt[case], step_s) for case, step_s in steps.items()]
    (row,) = strategy_choice.rows(wanted, Measured(taken))
    assert (row.best, row.over_best, row.over_alone) == ("ring", pytest.approx(0.05), pytest.approx(1.05 / 4 - 1))
    slow = [measured(mlp[AUTO], 1.2), measured(mlp[ALONE], 1.0)]
    made = page(wanted, [*taken, *slow])
    assert [each.holds for each in made.verdicts] == ["no"]
    assert "in 1 of 2 settings" in made.verdicts[0].sentence
    assert "Slower than one device alone: mlp alike at 100." in made.verdicts[0].sentence
    assert "+5%" in markdown(made)
    fine = strategy_choice.section(asked("gpt alike at 100"), Measured(taken))
    assert [each.holds for each in fine.verdicts] == ["yes"]
    assert [each.holds for each in strategy_choice.section(wanted, Measured([])).verdicts] == ["open"]
