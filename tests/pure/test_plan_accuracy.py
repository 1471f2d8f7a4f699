"""`bench plan` on paper: forecasts against measurements, errors over all rings, and what a plan gains."""

from __future__ import annotations

import pytest

from invented import choices, measurement, page
from ringtmp.bench.bench_request import Choices
from ringtmp.bench.experiments import plan_accuracy
from ringtmp.bench.measuring.jobs import Job
from ringtmp.bench.measuring.measurement_files import Measured, Measurement, Result
from ringtmp.errors import UsageError
from ringtmp.report.page_text import markdown


def asked(beds: str) -> Choices:
    return choices(names=("plan",), beds=beds, steps=3, warm_up=1)


def measured(job: Job, step_s: list[float], predicted_s: float, memory: list[tuple[float, float]]) -> Measurement:
    facts = {
        "forecast": {
            "step_s": predicted_s, "idle_fraction": 0.1, "left_out": ["n3"],
            "per_node": [
                {"node": node, "device": f"n{node}", "memory_bytes": said, "free_bytes": None, "busy_s": 0.1}
                for node, (said, _) in enumerate(memory)
            ],
        },
        "per_node": [{"node": node, "peak_rss_bytes": came} for node, (_, came) in enumerate(memory)],
    }  # fmt: skip
    return measurement(job, 0, Result(tuple(step_s), facts))


def test_ten_rings_differ_in_devices_speeds_links_caps_and_models() -> None:
    beds = plan_accuracy.BEDS
    assert len({bed.name for bed in beds}) == 10
    assert {len(bed.devices) for bed in beds} >= {2, 3, 4, 5, 6}
    ratios = [max(d.cpu for d in bed.devices) / min(d.cpu for d in bed.devices) for bed in beds]
    assert (min(ratios), max(ratios)) == (1.0, pytest.approx(10.0))
    rates = {device.link_mbps for bed in beds for device in bed.devices}
    assert (min(rates), max(rates)) == (10, 1000)
    assert {bed.model for bed in beds} == {"gpt", "mlp", "convnet"}
    assert all(sum(device.cpu for device in bed.devices) <= 1.9 for bed in beds), "they run side by side on two cores"


def test_errors_are_told_per_ring_and_over_all() -> None:
    two = asked("gpt-2,gpt-4")
    jobs = plan_accuracy.jobs(two)
    assert [job.setting for job in jobs] == ["gpt-2", "gpt-4"]
    taken = [
        measured(jobs[0], [1.0, 1.0, 4.0], 1.1, [(95.0, 100.0), (120.0, 100.0)]),
        measured(jobs[0], [1.2, 1.2, 1.2], 1.2, [(100.0, 100.0)]),
        measured(jobs[1], [2.0], 1.8, [(100.0, 100.0)]),
    ]
    found = plan_accuracy.rows(two, Measured(taken))
    assert found[0].step_error == pytest.approx(0.05)
    assert found[0].spread == pytest.approx(0.2 / 1.1)
    assert found[0].memory_error == pytest.approx(0.2)
    assert found[1].step_error == pytest.approx(-0.1)
    total = plan_accuracy.errors(found)
    assert total is not None
    assert (total.step_median, total.memory_worst) == (pytest.approx(0.075), pytest.approx(0.2))
    made = page(two, taken)
    assert "| +5.0% | 18.2% | +20.0% |" in markdown(made)
    assert [(each.aim, each.holds) for each in made.verdicts] == [(plan_accuracy.AIM, "no")]
    assert "median error 7.5% (wanted 7%)" in made.verdicts[0].sentence


def test_a_contrast_is_the_plan_against_equal_parts_and_against_one() -> None:
    one = asked("10:10:10:1")
    jobs = plan_accuracy.jobs(one)
    assert [job.case for job in jobs] == list(plan_accuracy.WAYS)
    assert jobs[2].files["devices.toml"].count("[[device]]") == 1
    taken = [measured(job, [step], 1.0, []) for job, step in zip(jobs, (1.0, 6.0, 1.5), strict=True)]
    (found,) = plan_accuracy.contrasts(one, Measured(taken))
    assert (found.over("equal parts"), found.over("best alone"), found.left_out) == (6.0, 1.5, ("n3",))
    assert "6.0 (wanted 5) | 1.50 (wanted 1)" in markdown(page(one, taken))


def test_a_ring_that_was_not_measured_is_named_and_leaves_the_others() -> None:
    one = asked("gpt-2")
    assert plan_accuracy.rows(one, Measured([])) == []
    assert plan_accuracy.errors([]) is None
    made = plan_accuracy.section(one, Measured([]))
    assert made.verdicts[0].holds == "open"
    assert [each.what for each in made.skipped] == ["gpt gpt-2 forecast"]


def test_wrong_names_and_a_machine_without_a_lab_are_refused() -> None:
    with pytest.raises(UsageError, match="unknown ring of devices 'gtp-2'"):
        plan_accuracy.jobs(asked("gtp-2"))
    with pytest.raises(UsageError, match="needs the lab"):
        plan_accuracy.jobs(choices(names=("plan",), isolated=False))
