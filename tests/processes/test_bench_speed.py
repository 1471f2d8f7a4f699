"""`bench speed`: the commands of its cases, its arithmetic by hand, and real runs of tiny sizes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from ringtmp.bench import figure, table
from ringtmp.bench.analysis.step_time_bounds import Sizes, busiest_cuts, ideal_s, limit_s
from ringtmp.bench.experiments.speed import analyse, chosen, jobs, require_room
from ringtmp.bench.measuring.jobs import Job
from ringtmp.bench.measuring.machine import Environment
from ringtmp.bench.measuring.measurement_files import SCHEMA, Measurement, Result
from ringtmp.bench.peers.pipelining import even_ends
from ringtmp.bench.training_runs.device_setups import SETTINGS
from ringtmp.bench.training_runs.device_setups import devices_file as devices_text
from ringtmp.bench.training_runs.speed_cases import ALONE, CASES, job, stage_ranks
from ringtmp.bench.training_runs.workloads import QUICK, WORKLOADS
from ringtmp.cli import bench as verb
from ringtmp.errors import UsageError
from ringtmp.lab import devices_file

ENVIRONMENT = Environment("0", "code", "torch", "AVX2", "3.11", "Linux", "a processor", 2)
BY_NAME = {case.name: case for case in CASES}
needs_isolation = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None,
    reason="needs root on Linux and iproute2",
)


# -- planning ---------------------------------------------------------------------------------------------------------


def command(case: str, setting: str, workload: str = "gpt") -> str:
    return job(BY_NAME[case], WORKLOADS[workload], SETTINGS[setting], 2).text


def test_every_case_becomes_the_command_one_would_type() -> None:
    work = "--batch-size 32 --microbatches"
    assert f"{work} 8 " in command("ring", "two")
    assert command("ring", "two").startswith("python -P -m ringtmp train --model gpt --set depth=8 --set width=256 ")
    assert command("ring", "lab-100").startswith(
        "python -P -m ringtmp lab --devices devices.toml -- train --model gpt "
    )
    assert "--strategy ps:bsp --with servers=1 " in command("ps:bsp", "lab-100")
    assert f"{work} 3 " in command("ps:bsp", "lab-100"), "one microbatch per worker; the fourth node serves"
    assert "--strategy ps:bsp --with servers=workers " in command("ps:bsp:workers", "lab-100")
    assert f"{work} 4 " in command("ps:bsp:workers", "lab-100")
    assert "--strategy ps:ssp:3 " in command("ps:ssp:3", "two")
    assert "--strategy allreduce:ring " in command("allreduce:ring", "two")
    assert command("ddp", "two").startswith(
        "python -P -m ringtmp lab exec --no-isolation --devices devices.toml -- python "
    )
    assert "lab exec --devices" in command("ddp", "lab-100")
    assert "--batch-size 512 --microbatches 4 " in command("ring", "two", "mlp")


def test_one_process_is_always_measured_and_only_once_per_workload() -> None:
    made = jobs(list(WORKLOADS.values()), list(SETTINGS.values()), "ring,ddp", 2, [])
    assert [each.case for each in made].count("one") == len(WORKLOADS)
    assert len(made) == len(WORKLOADS) * (1 + len(SETTINGS) * 2)
    assert len({each.file_stem for each in made}) == len(made)


def test_several_microbatch_counts_make_several_cases_of_a_pipeline_alone() -> None:
    made = jobs([WORKLOADS["gpt"]], [SETTINGS["two"]], "ring,ddp,pipelining:1f1b", 2, [4, 16])
    names = [each.case for each in made]
    assert names == ["one", "ring:m4", "ring:m16", "ddp", "pipelining:1f1b:m4", "pipelining:1f1b:m16"]


def test_a_ring_that_chooses_its_microbatches_is_told_so_and_is_one_case_whatever_is_asked_for() -> None:
    made = jobs([WORKLOADS["gpt"]], [SETTINGS["two"]], "ring:*", 2, [4, 16])
    assert [each.case for each in made] == [
        "one", "ring:auto", "ring:zero-bubble", "ring:staleness=1", "ring:protected:m4", "ring:protected:m16",
    ]  # fmt: skip
    assert all("--microbatches auto" in each.text for each in made[1:4])


def test_the_devices_file_is_one_the_lab_takes() -> None:
    parsed = devices_file.parse(devices_text(SETTINGS["lab-100"]), "devices.toml")
    assert [(each.cpu, each.link_mbps) for each in parsed] == [(0.45, 100.0)] * 4


def test_wrong_names_and_missing_rights_are_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="did you mean 'gpt'"):
        chosen("workload", "gtp", WORKLOADS)
    with pytest.raises(UsageError, match="unknown case 'rnig'"):
        jobs([WORKLOADS["gpt"]], [SETTINGS["two"]], "rnig", 2, [])
    with pytest.raises(UsageError, match="lab-fast and lab-100 .*need the lab.*--settings two"):
        require_room(list(SETTINGS.values()), 2, can_emulate=False)
    with pytest.raises(UsageError, match="two needs 2 cores, and this machine has 1"):
        require_room([SETTINGS["two"]], 1, can_emulate=True)
    with pytest.raises(UsageError, match="numbers from 1"):
        verb.command.main(["speed", "--microbatches", "4,0", "--out", str(tmp_path / "out")], standalone_mode=False)
    assert not (tmp_path / "out").exists()


# -- arithmetic -------------------------------------------------------------------------------------------------------


def test_stages_lie_where_the_schedules_expect_them() -> None:
    assert stage_ranks("straight", 4) == [0, 1, 2, 3]
    assert stage_ranks("looped", 2) == [0, 1, 0, 1]
    assert stage_ranks("v", 3) == [0, 1, 2, 2, 1, 0]


@pytest.mark.parametrize(
    ("ranks", "cuts"),
    [
        ([0], 0),
        ([0, 1], 1),  # activations one way, gradients the other
        ([0, 1, 2], 2),  # the middle one sends both
        ([0, 1, 2, 3, 0], 2),  # the ring: everybody sends both
        ([0, 1, 0, 1], 3),
        ([0, 1, 1, 0], 2),  # the bottom of the V stays at home
    ],
)
def test_the_busiest_device_sends_this_many_cuts(ranks: list[int], cuts: int) -> None:
    assert busiest_cuts(ranks) == cuts


def test_ideal_and_limits_by_hand() -> None:
    """784-1024x9-10, batch 512, on 4 x 0.45 core: 0.32 s alone; 2 MiB per cut, 168 ms at 100 Mbit/s."""
    parameters = 784 * 1024 + 8 * 1024 * 1024 + 1024 * 10 + 9 * 1024 + 10
    sizes, slow, fast = Sizes(0.32, parameters, 1024, 512), SETTINGS["lab-100"], SETTINGS["lab-fast"]
    assert ideal_s(sizes, SETTINGS["two"]) == pytest.approx(0.16)
    assert ideal_s(sizes, slow) == pytest.approx(0.32 / 1.8)  # 178 ms, just above the 168 of the link
    assert limit_s(BY_NAME["ring"], sizes, slow) == pytest.approx(2 * 512 * 1024 * 4 / 12.5e6)
    assert limit_s(BY_NAME["ring"], sizes, fast) == pytest.approx(0.32 / 1.8)
    assert limit_s(BY_NAME["ps:bsp"], sizes, slow) == pytest.approx(3 * parameters * 4 / 12.5e6)
    assert limit_s(BY_NAME["ps:bsp"], sizes, SETTINGS["two"]) == pytest.approx(0.32)  # one of the two only serves
    assert limit_s(BY_NAME["ddp"], sizes, slow) == pytest.approx(1.5 * parameters * 4 / 12.5e6)
    assert limit_s(BY_NAME["allreduce:ring"], sizes, slow) == limit_s(BY_NAME["ps:bsp:workers"], sizes, slow)


def test_stages_are_cut_so_that_the_dearest_is_cheapest() -> None:
    assert even_ends([1, 1, 1, 3], 2) == [3, 4]
    assert even_ends([1, 2, 3, 4, 5, 6], 3) == [3, 5, 6]  # 6, 9, 6
    assert even_ends([1, 1, 1, 1], 4) == [1, 2, 3, 4]
    with pytest.raises(SystemExit, match="5 stages need as many layers"):
        even_ends([1, 1, 1, 1], 5)


# -- what measurements say --------------------------------------------------------------------------------------------


def measurement(made: Job, step_s: float | None, busy: float = 0.02, **facts: Any) -> Measurement:
    result = None if step_s is None else Result((step_s,) * 4, facts)
    return Measurement(
        SCHEMA, made, 0, "digest", ENVIRONMENT, "2026-11-15", 10.0, 0.5, busy, 0.4,
        "measured" if result else "failed", None if result else "exit code 2\nringtmp: unknown strategy 'ps'", result,
    )  # fmt: skip


def synthetic() -> list[Measurement]:
    """Measured in any order: alone 2 s, the ring 1.2, the peers 1.5 and 1.6, a server that fails."""
    work, two = WORKLOADS["gpt"], SETTINGS["two"]
    cases = {"ring": 1.2, "pipelining:1f1b": 1.6, "ps:bsp": None, "ddp": 1.5}
    found = [measurement(job(BY_NAME[name], work, two, 2), step_s) for name, step_s in cases.items()]
    alone = job(BY_NAME["one"], work, ALONE, 2)
    return [*found, measurement(alone, 2.0, parameters=7_000_000, cut_values=128 * 256)]


def test_rows_compare_with_the_ideal_and_with_the_best_peer() -> None:
    rows = analyse(synthetic(), seed=0)
    assert [row.case for row in rows] == ["one", "ring", "ps:bsp", "ddp", "pipelining:1f1b"]
    ring, server = rows[1], rows[2]
    assert ring.over_ideal == pytest.approx(1.2)
    assert ring.best_peer == "ddp"
    assert ring.over_best_peer is not None
    assert ring.over_best_peer.middle == pytest.approx(0.8)
    assert ring.stolen_share == pytest.approx(0.02)  # 0.4 s of 10 s on two cores
    assert (server.step_s, server.failed) == (None, 1)
    assert rows[3].over_best_peer is None, "a peer is not compared with itself"


def test_without_one_process_there_are_times_and_no_ratio() -> None:
    rows = analyse([each for each in synthetic() if each.job.case != "one"], seed=0)
    assert rows[0].step_s is not None
    assert rows[0].over_ideal is None


def test_the_page_has_command_date_table_and_failures() -> None:
    page = table.markdown(analyse(synthetic(), 0), ENVIRONMENT, "ringtmp bench speed", "2026-11-15", 1, "")
    assert "`ringtmp bench speed`, 2026-11-15. a processor, 2 cores" in page
    assert "| ring | 8 | 1200 | 1200–1200 | 1.20 | 1.67 | 1000 | 1.20 |  |  |  | 0.80 (0.80–0.80) | 2.0% |" in page
    assert "- failed: ps:bsp: ringtmp: unknown strategy 'ps'" in page
    assert "one process 2000 ms; ideal 1000 ms; best peer ddp" in page


def test_a_machine_that_was_not_quiet_is_said_to_be_so() -> None:
    quiet = table.sections(analyse(synthetic(), 0))
    assert "QUIET" not in quiet[0].base
    ring = measurement(job(BY_NAME["ring"], WORKLOADS["gpt"], SETTINGS["two"], 2), 1.2, busy=0.45)
    assert "NOT A QUIET MACHINE: others used up to 45%" in table.sections(analyse([*synthetic(), ring], 0))[0].base


def test_the_figure_is_written_and_names_every_case(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert [path.name for path in figure.draw(analyse(synthetic(), 0), tmp_path, "a note")] == [
        "speed.svg",
        "speed.png",
    ]
    assert (tmp_path / "speed.png").stat().st_size > 5000
    drawn = (tmp_path / "speed.svg").read_text()
    for text in ("ring", "ddp", "pipelining:1f1b", "a note", "ms per step"):
        assert f"<!-- {text} -->" in drawn
    assert figure.draw([], tmp_path, "") == []


def test_without_matplotlib_the_rest_is_written_and_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with verb.speed.make_context("speed", ["--repeats", "3"]):
        verb._write(analyse(synthetic(), 0), tmp_path, ENVIRONMENT, 3, "")
    assert "ringtmp[plots]" in capsys.readouterr().err
    assert "`ringtmp bench speed --repeats 3`" in (tmp_path / "results.md").read_text()
    assert len(json.loads((tmp_path / "results.json").read_text())) == 5


def test_help_lists_the_experiment_and_its_options() -> None:
    assert "speed" in CliRunner().invoke(verb.command, ["--help"]).output
    shown = CliRunner().invoke(verb.command, ["speed", "--help"]).output
    for option in ("--cases", "--workloads", "--settings", "--repeats", "--steps", "--seed", "--out", "--json"):
        assert option in shown


# -- the real thing ---------------------------------------------------------------------------------------------------


def bench(folder: Path, *words: str) -> tuple[dict[str, Any], str]:
    given = ["--quick", "--repeats", "1", "--json", "--out", "out", *words]
    argv = [sys.executable, "-m", "ringtmp", "bench", "speed", *given]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found, done.stderr


def losses(folder: Path) -> dict[str, tuple[float, float]]:
    found = {}
    for path in (folder / "out" / "measurements").iterdir():
        measured = msgspec.json.decode(path.read_bytes(), type=Measurement)
        assert measured.result is not None, measured.error
        loss = measured.result.facts["loss"]
        found[measured.job.case] = (loss["first"], loss["last"])
    return found


@pytest.mark.long  # messages and the harness below and in test_bench
@pytest.mark.timeout(300)  # eight processes that load torch, on whatever machine
def test_the_ring_and_its_peers_do_the_same_work_and_are_measured_once(tmp_path: Path) -> None:
    words = ("--workloads", "mlp", "--settings", "two", "--cases", "ring,ddp", "--steps", "3")
    first, said = bench(tmp_path, *words)
    learned = losses(tmp_path)
    assert [row["case"] for row in first["rows"]] == ["one", "ring", "ddp"]
    assert all(row["step_s"] is not None and row["failed"] == 0 for row in first["rows"]), said
    assert "3/3" in said
    assert len(learned) == 3
    for case in ("ring", "ddp"):
        assert learned[case] == pytest.approx(learned["one"], rel=1e-4)
    assert "--quick" in (tmp_path / "out" / "results.md").read_text()
    second, said = bench(tmp_path, *words)
    assert "3 of 3 were measured before" in said
    assert second == first


@pytest.mark.alone
@pytest.mark.timeout(1500)
@needs_isolation
@pytest.mark.parametrize(
    "workload",
    [pytest.param(each, marks=pytest.mark.nightly if at else pytest.mark.long) for at, each in enumerate(QUICK)],
)
def test_every_case_works_in_the_lab_and_learns_the_same(tmp_path: Path, workload: str) -> None:
    words = ("--workloads", workload, "--settings", "lab-fast", "--steps", "3")
    rows, _ = bench(tmp_path, *words)
    assert {row["case"] for row in rows["rows"]} == set(BY_NAME)
    learned = losses(tmp_path)
    for name, case in BY_NAME.items():
        if case.centre == "median":  # asynchronous servers and stale gradients take their own way
            assert learned[name] == pytest.approx(learned["one"], rel=1e-3), name


@pytest.mark.long
def test_messages_go_between_two_processes_by_the_ring_and_by_gloo() -> None:
    command = [sys.executable, "-P", "-m", "ringtmp", "bench", "messages", "--count", "20", "--rounds", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["one_way_s"]
    assert set(rows) == {"node to node, encrypted", "Gloo, in the clear"}
    assert all(len(seconds) == 2 and 0 < min(seconds) <= max(seconds) < 10 for seconds in rows.values())
