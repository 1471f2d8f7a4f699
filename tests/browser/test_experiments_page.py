"""All experiments together: what there is to run, and the page that comes of it, in a real browser too."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from browser import Browser, chromium, legible
from invented import choices, invented, measurement, page
from ringtmp.bench import jobs_of_experiments
from ringtmp.bench.experiment_registry import COMPARISONS
from ringtmp.bench.experiments import energy, idle, resilience, traffic
from ringtmp.bench.measuring.measurement_files import Measured, Result
from ringtmp.bench.training_runs import learning_rate_sweep
from ringtmp.lab import devices_file
from ringtmp.lab.devices_file import toml
from ringtmp.report import page_text
from ringtmp.report.page import write


@pytest.mark.parametrize("quick", [True, False])
def test_every_experiment_has_its_section_and_every_aim_its_verdict(quick: bool) -> None:
    asked = choices(quick, rates={"ring": 0.002})
    made = page(asked, invented(asked))
    assert [section.name for section in made.sections] == [*COMPARISONS, "method"]
    said = {verdict.aim: verdict for verdict in made.verdicts}
    for module in (idle, energy, traffic, resilience):
        assert any(aim.startswith(module.AIM) for aim in said), module.AIM
    assert said[idle.AIM].holds == "yes"
    assert "25.0%" in said[idle.AIM].sentence
    assert "0.50 (0.50–0.50)" in said[idle.AIM].sentence
    assert said["RingTMP can hold larger models"].number == "3.00"
    names = [figure.name for figure in made.figures]
    assert len(set(names)) == len(names)
    for wanted in (
        "idle-causes", "loss-per-joule", "speed-up-strong", "gantt-ring", "links-ring", "memory-per-node", "largest-model",
        "around-ring-protect-auto-device-worker", "break-even-total", "joules-per-sample",
    ):  # fmt: skip
        assert wanted in names
    tables = [table for section in made.sections for table in section.tables]
    varied = {row[0]: row for table in tables if table.title.startswith("Every conclusion") for row in table.rows}
    larger = set() if quick else {f"joules per step, {name}" for name in ("gpt", "mlp")}
    assert set(varied) == {"joules per sample", "joules to the target", *larger}
    # A second and node: 2 J idle, 4 J more while busy, 2 J for bytes, so 7 against 6; with 1, 8 and 1 it is 8 against 6, and
    # with busy watts no more than idle ones nothing is between them.
    assert {row[4:] for row in varied.values()} == {("1.17", "1.00–1.33", "stays")}, varied
    shaped = [
        row for table in tables if table.title.startswith("Bytes per step of the three shapes") for row in table.rows
    ]
    # 64 samples of 64 values over four cuts and back; three workers pull and push 179,850 parameters. Sent: as invented.
    wanted = {
        ("ring", "128.0 KiB", "2.0 KiB", "0.015", "32.0 KiB", "1000 B", "0.031"),
        ("ps:bsp", "4.1 MiB", "2.0 KiB", "0.000", "2.1 MiB", "1000 B", "0.000"),
    }
    assert {row[1:] for row in shaped if row[0] == "narrow and deep"} == (set() if quick else wanted)
    text = page_text.markdown(made)
    assert f"| {idle.AIM} | yes | Idle share of workers: " in text
    assert all(f"## {section.title}" in text for section in made.sections)
    assert all(section.skipped == () or all(each.why for each in section.skipped) for section in made.sections)


def test_a_way_that_did_not_learn_is_in_no_verdict_and_that_is_said() -> None:
    asked = choices()
    found = [
        msgspec.structs.replace(
            each, result=Result((1.0,), (each.result.facts if each.result else {}) | {"accuracy": 0.2})
        )
        if each.job.case == "ring"
        else each
        for each in invented(asked)
    ]
    section = next(each for each in page(asked, found).sections if each.name == "idle")
    assert "ring:staleness=1" in section.verdicts[0].sentence, "the ring that learned"
    assert any(
        each.what == "ring: verdicts" and "20.0% where the best has 90.0%" in each.why for each in section.skipped
    )


def test_with_nothing_measured_the_report_says_so_and_claims_nothing() -> None:
    asked = choices()
    made = page(asked, [])
    known = [verdict for verdict in made.verdicts if "over shapes" not in verdict.aim]
    assert {verdict.holds for verdict in known} == {"open"}
    assert any("interrupted before it" in each.why for section in made.sections for each in section.skipped)


def test_a_run_several_experiments_read_is_measured_once_per_repeat() -> None:
    asked = choices()
    plan = jobs_of_experiments.plan(asked)
    stems = [(repeat, job.file_stem) for repeat, job in plan]
    assert len(set(stems)) == len(stems)
    wanted = sum(len({each.file_stem for each in jobs_of_experiments.jobs_of(name, asked)}) for name in asked.names)
    assert len({stem for _, stem in stems}) < wanted
    assert [repeat for repeat, job in plan if job.experiment == "capacity"] == [0, 0], "a size is found once"


def test_every_way_gets_the_rate_that_was_best_for_it() -> None:
    asked = choices()
    losses = {
        ("one process", 0.0007): 0.9,
        ("one process", 0.002): 0.4,
        ("ps:async", 0.0007): 0.3,
        ("ps:async", 0.002): 2.0,
    }
    found = [
        measurement(each.job, 0, Result((1.0,), {"test_loss": losses[each.way.label, each.work.lr]}))
        for each in learning_rate_sweep.cells(asked)
        if (each.way.label, each.work.lr) in losses
    ]
    rates = learning_rate_sweep.rates(asked, Measured(found))
    assert rates == {"ring": 0.002, "ps:bsp": 0.002, "ps:async": 0.0007}, "staleness 1 was not measured"
    table = learning_rate_sweep.table(msgspec.structs.replace(asked, rates=rates), Measured(found))
    assert [row[-1] for row in table.rows] == ["0.002", "none", "0.002", "0.0007"]


def test_the_devices_become_a_file_the_lab_takes() -> None:
    made = choices().place(3, link_mbps=20.0)
    assert devices_file.parse(toml(made), "devices.toml") == made
    given = devices_file.parse(
        '[[device]]\nname = "a"\npreset = "pi-4b"\n[[device]]\nname = "b"\npreset = "pi-3b"\n', "f"
    )
    assert devices_file.parse(toml(given), "devices.toml") == given
    assert choices(devices=given).nodes == 2
    assert choices(devices=given).node_counts == (1, 2)


def test_without_isolation_capacity_is_left_out_with_its_reason() -> None:
    asked = choices(isolated=False)
    made = page(asked, [])
    section = next(each for each in made.sections if each.name == "capacity")
    assert "needs the lab" in section.skipped[0].why
    assert not [job for _, job in jobs_of_experiments.plan(asked) if job.experiment == "capacity"]
    labs = [job.text for _, job in jobs_of_experiments.plan(asked) if "devices.toml" in job.text]
    assert labs
    assert all("--no-isolation" in text and "--all-devices" in text for text in labs), "none is left out as too slow"


def test_devices_that_joined_are_used_as_they_are_and_what_would_change_them_is_left_out_with_its_reason() -> None:
    asked = choices(listen="192.0.2.1:47100", joined=3, rates={"ring": 0.002})
    jobs = [job for _, job in jobs_of_experiments.plan(asked)]
    assert asked.node_counts == (1, 2, 3)
    there = [job.text for job in jobs if "--listen 192.0.2.1:47100" in job.text]
    assert there
    assert all("--nodes" in text and "--all-devices" in text for text in there)
    assert not [job for job in jobs if " lab " in job.text]
    made = page(asked, invented(asked))
    assert [section.name for section in made.sections] == [*COMPARISONS, "method"]
    assert not made.emulated
    for name, why in (("capacity", "memory caps"), ("resilience", "takes devices away"), ("equations", "link rates")):
        assert why in next(each for each in made.sections if each.name == name).skipped[0].why


@pytest.mark.skipif(chromium() is None, reason="there is no chromium here (Debian: apt-get install chromium)")
@pytest.mark.long  # the same page by the same means in test_report
@pytest.mark.parametrize("quick", [True, False])
def test_the_page_is_whole_and_legible_in_a_browser_and_on_a_phone(
    quick: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    asked = choices(quick)
    made = page(asked, invented(asked))
    path = write(made, tmp_path / "out")
    assert request.config.cache is not None
    shots = request.config.cache.mkdir("screenshots")
    with Browser(tmp_path / "browser") as browser:
        for width, dark in ((1280, False), (390, True)):
            assert legible(browser, path, width, dark) == {figure.name for figure in made.figures}
            words = browser.evaluate("document.body.innerText")
            assert all(verdict.sentence in words for verdict in made.verdicts)
            browser.screenshot(
                shots / f"experiments-{'quick' if quick else 'full'}-{width}-{'dark' if dark else 'light'}.png"
            )
        assert browser.problems == []
