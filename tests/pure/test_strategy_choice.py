"""`bench choice` on paper: twelve settings, what was chosen held against the best measured way."""

from __future__ import annotations

from itertools import pairwise

import pytest

from invented import choices, measurement, page
from ringtmp.bench import jobs_of_experiments
from ringtmp.bench.bench_request import Choices
from ringtmp.bench.experiments import strategy_choice
from ringtmp.bench.experiments.strategy_choice import ALONE, AUTO
from ringtmp.bench.measuring.jobs import Job
from ringtmp.bench.measuring.measurement_files import Measured, Measurement, Result
from ringtmp.config import RunConfig, replaced
from ringtmp.errors import UsageError
from ringtmp.model import zoo
from ringtmp.model.zoo import Shape
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


def test_what_is_trained_is_counted_as_the_model_has_it() -> None:
    shapes = {"mlp": Shape((784,), True, 10), "gpt": Shape((128,), False, 256), "convnet": Shape((3, 32, 32), True, 10)}
    for training in strategy_choice.TRAININGS:
        if training.name in shapes:
            words = [word for flag, word in pairwise(training.flags) if flag == "--set"]
            settings = {key: int(value) for key, _, value in (word.partition("=") for word in words)}
            made = zoo.build(training.name, shapes[training.name], settings)
            assert training.trained == sum(each.numel() for _, layer in made for each in layer.parameters())
        else:
            assert training.trained == 0, "how many values of adapters travel is not known here"


def test_a_way_that_the_links_alone_make_slower_than_auto_is_not_measured_and_the_page_says_why() -> None:
    wanted = asked("mlp alike at 100")
    (trial,) = strategy_choice._wanted(wanted)
    jobs = strategy_choice.trial_jobs(wanted, trial)
    assert strategy_choice.needless(wanted, jobs["ps:bsp"], Measured([])) is None, "nothing is known yet"
    facts = {"considered": [{"strategy": "ps:bsp", "step_s": 12.0}, {"strategy": "n0 alone", "step_s": 9.0}]}
    # 12.4 million values of four bytes over 100 Mbit/s take 3.96 s; a ring of sums 1.5 times that, a server three times.
    for auto_s, left in (
        (1.0, {"allreduce:halving", "ps:bsp:workers", "ps:bsp"}),
        (5.0, {"ps:bsp:workers", "allreduce:halving", "ps:bsp"}),
        (5.8, {"ps:bsp"}),
        (20.0, set()),
    ):
        taken = Measured([measurement(jobs[AUTO], 0, Result((auto_s,), facts))])
        reasons = {case: strategy_choice.needless(wanted, job, taken) for case, job in jobs.items()}
        assert {case for case, why in reasons.items() if why} == left
    quick = Measured([measurement(jobs[AUTO], 0, Result((1.0,), facts))])
    assert "5933 ms on the links alone" in (strategy_choice.needless(wanted, jobs["ps:bsp:workers"], quick) or "")
    told = {each.what: each.why for each in strategy_choice.section(wanted, quick).skipped}
    assert "on the links alone" in told[jobs["ps:bsp"].name]
    assert "not measured" in told[jobs["ring"].name]


def test_a_way_whose_forecast_is_three_times_what_auto_took_is_not_measured() -> None:
    wanted = asked("adapters alike at 100")
    (trial,) = strategy_choice._wanted(wanted)
    jobs = strategy_choice.trial_jobs(wanted, trial)
    facts = {
        "considered": [
            {"strategy": "ps:bsp:servers=1", "step_s": 3.1},
            {"strategy": "ps:bsp:servers=workers", "step_s": 2.9},
        ]
    }
    taken = Measured([measurement(jobs[AUTO], 0, Result((1.0,), facts))])
    reasons = {case: strategy_choice.needless(wanted, job, taken) for case, job in jobs.items()}
    assert {case for case, why in reasons.items() if why} == {"ps:bsp"}
    assert "forecast 3100 ms" in (reasons["ps:bsp"] or "")


def test_auto_goes_first_in_every_setting_and_one_device_is_measured_once_for_like_networks() -> None:
    plan = jobs_of_experiments.plan(asked("convnet,gpt"))
    names = [(repeat, job.workload, job.setting) for repeat, job in plan]
    firsts = [
        (each, job)
        for each, (_, job) in zip(names, plan, strict=True)
        if names.index(each) == plan.index((each[0], job))
    ]
    assert all(job.case == AUTO or job.case == ALONE for _, job in firsts)
    assert len(firsts) == len(set(names)), "a setting's jobs stand together"
    alone = [(repeat, job.workload) for repeat, job in plan if job.case == ALONE]
    assert len(alone) == 2 * 3 * 2, "two trainings, three repeats, a master of 0.45 and one of 1 core"
