"""Before and after measuring: intervals by hand, every round complete, which steps count, what is measured again."""

from __future__ import annotations

from pathlib import Path

import pytest

from invented import run_events
from ringtmp.bench.analysis import intervals
from ringtmp.bench.measuring import machine_facts, run_command
from ringtmp.bench.measuring.jobs import PYTHON, Job, interleaved, time_left_s
from ringtmp.bench.measuring.read_output import step_times
from ringtmp.metrics.events import CheckpointSaved, Evaluated, StepDone
from ringtmp.metrics.fold_events import parts_of


def job(case: str) -> Job:
    return Job("test", "work", "here", case, (PYTHON,), {}, "peer", batch_size=4, warm_up=2)


# -- statistics -------------------------------------------------------------------------------------------------------


def test_the_figure_is_the_median_over_repeats_of_their_centres() -> None:
    repeats = [[1.0, 2.0, 30.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]]
    assert intervals.interval(repeats, "median", 0).middle == 5.0
    assert intervals.interval(repeats, "mean", 0).middle == 8.0  # of 11, 5 and 8


def test_two_repeats_of_one_step_give_an_interval_from_one_to_the_other() -> None:
    """Of the four pairs drawn from {1, 3} one has median 1, two have 2 and one has 3: each end has a quarter."""
    assert intervals.interval([[1.0], [3.0]], "median", 0) == intervals.Interval(2.0, 1.0, 3.0)


def test_samples_without_spread_have_no_width() -> None:
    assert intervals.interval([[2.0] * 4] * 3, "median", 0) == intervals.Interval(2.0, 2.0, 2.0)


def test_a_slow_repeat_widens_the_interval_as_more_steps_would_not() -> None:
    steady = intervals.interval([[1.0, 1.1]] * 5, "median", 0)
    one_slow = intervals.interval([[1.0, 1.1]] * 4 + [[2.0, 2.1]], "median", 0)
    assert steady.high <= 1.1
    assert one_slow.high > 1.1
    assert one_slow.middle == steady.middle


def test_the_same_seed_gives_the_same_interval() -> None:
    repeats = [[1 + (37 * step + 11 * repeat) % 101 / 100 for step in range(20)] for repeat in range(4)]
    assert intervals.interval(repeats, "mean", 7) == intervals.interval(repeats, "mean", 7)
    assert intervals.interval(repeats, "mean", 7) != intervals.interval(repeats, "mean", 8)


def test_a_planted_difference_of_a_tenth_is_found_and_none_is_not() -> None:
    base = [[1.00, 1.01, 0.99, 1.02]] * 5
    slower = [[each * 1.1 for each in steps] for steps in base]
    found = intervals.ratio(slower, "median", base, "median", 0)
    assert found.middle == pytest.approx(1.1)
    assert 1.05 < found.low <= found.high < 1.15
    none = intervals.ratio(base, "median", base, "median", 0)
    assert none.low <= 1 <= none.high


# -- order and time ---------------------------------------------------------------------------------------------------


def test_every_round_has_every_job_once_in_an_order_of_its_own() -> None:
    jobs = [job(name) for name in "abcdef"]
    plan = interleaved(jobs, 4, seed=1)
    rounds = [[each.case for repeat, each in plan if repeat == number] for number in range(4)]
    assert [repeat for repeat, _ in plan] == sorted(repeat for repeat, _ in plan)
    assert all(sorted(each) == list("abcdef") for each in rounds)
    assert len({tuple(each) for each in rounds}) > 1
    assert plan == interleaved(jobs, 4, seed=1)
    assert plan != interleaved(jobs, 4, seed=2)


def test_the_time_left_is_what_jobs_took_before() -> None:
    assert time_left_s({}, ["a"]) is None
    # a takes 3 on average, b took 10, c is unknown: the mean of 2, 4 and 10.
    assert time_left_s({"a": [2.0, 4.0], "b": [10.0]}, ["a", "b", "c"]) == pytest.approx(3 + 10 + 16 / 3)
    assert time_left_s({"a": [2.0]}, []) == 0


def test_stolen_time_is_read_from_its_field() -> None:
    assert machine_facts.stolen_ticks("cpu  1 2 3 4 5 6 7 42 9 10\ncpu0 1 1 1 1 1 1 1 1 1 1\n") == 42
    with pytest.raises(ValueError, match="no line"):
        machine_facts.stolen_ticks("cpu 1 2 3\n")


def test_what_only_plans_and_reports_is_no_reason_to_measure_again(tmp_path: Path) -> None:
    for name in ("strategies/ring/node.py", "bench/table.py", "bench/peers/ddp.py", "cli/bench.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    before = machine_facts.code_sha256(tmp_path)
    for name, same in (("bench/table.py", True), ("cli/bench.py", True), ("strategies/ring/node.py", False)):
        (tmp_path / name).write_text("2")
        assert (machine_facts.code_sha256(tmp_path) == before) is same, name
    before = machine_facts.code_sha256(tmp_path)
    (tmp_path / "bench/peers/ddp.py").write_text("2")
    assert machine_facts.code_sha256(tmp_path) != before


# -- which steps count ------------------------------------------------------------------------------------------------


def test_a_step_counts_from_the_end_of_the_one_before_it() -> None:
    def step(number: int, at: float, samples: int = 8, epoch: int = 0) -> StepDone:
        return StepDone(at, number, epoch, 0.0, 0.1, samples, 0.001)  # its own wall_s leaves out what lies between

    stream = [
        *run_events(0.5, steps=0)[:1],
        step(0, 10.0), step(1, 15.0),  # to warm up
        step(2, 16.0), step(3, 18.0),
        step(4, 18.5, samples=3),  # the rest of an epoch
        Evaluated(30.0, 5, 0, 100, 0.0, None, None),
        step(5, 31.0, epoch=1), step(6, 32.5, epoch=1),
        CheckpointSaved(40.0, 7, 7.0, 100),
        step(7, 41.0, epoch=1), step(8, 44.0, epoch=1),
    ]  # fmt: skip
    (part,) = parts_of(stream)
    assert step_times(part.steps, part.pauses, batch_size=8, warm_up=2) == (1.0, 2.0, 1.5, 3.0)


def test_where_every_step_is_an_epoch_a_step_takes_what_it_says() -> None:
    """Tests and shuffling lie between all of them."""
    steps = [StepDone(10.0 * number, number, number, 0.0, 0.1, 1438, 1.0 + number) for number in range(4)]
    assert step_times(steps, [5.0, 15.0, 25.0], batch_size=1438, warm_up=2) == (3.0, 4.0)
    assert step_times(steps[:1], (), batch_size=1438, warm_up=0) == ()


def test_why_a_lab_failed_is_what_its_master_said_last() -> None:
    said = "n1: ringtmp node: run begins\nringtmp: 3 workers cannot share it\nn1: ringtmp node: run ended; waiting\n"
    assert run_command.last_line(said) == "ringtmp: 3 workers cannot share it"
    assert run_command.last_line("n1: ringtmp node: run ended") == "n1: ringtmp node: run ended"
    assert run_command.last_line(" \n") == "nothing was said"
