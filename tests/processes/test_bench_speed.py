"""`bench speed` and `bench messages` for real, at tiny sizes; what the command writes and prints."""

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

from invented import measurement
from ringtmp.bench.measuring import measure_jobs
from ringtmp.bench.measuring.jobs import Job
from ringtmp.bench.measuring.measurement_files import Measurement, Result
from ringtmp.bench.training_runs.speed_cases import CASES
from ringtmp.bench.training_runs.workloads import QUICK
from ringtmp.cli import bench as verb
from ringtmp.errors import RingError, UsageError

BY_NAME = {case.name: case for case in CASES}
needs_isolation = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None,
    reason="needs root on Linux and iproute2",
)


# -- the command, with nothing run --------------------------------------------------------------------------------------


def pretend(monkeypatch: pytest.MonkeyPatch, result: Result | None) -> None:
    """As if every job had been run and had given this."""

    def measure(job: Job, repeat: int, *_: object) -> Measurement:
        found = measurement(job, repeat, result or Result(()))
        failed = {"outcome": "failed", "error": "exit code 1\nno such thing", "result": None}
        return found if result else msgspec.structs.replace(found, **failed)

    monkeypatch.setattr(measure_jobs, "measure", measure)


def run(*words: object) -> str:
    done = CliRunner().invoke(verb.command, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


SPEED = ("speed", "--settings", "two", "--cases", "ring,ddp", "--workloads", "mlp", "--repeats", 3, "--quiet")
TIMES = Result((1.0, 1.0), {"parameters": 10, "cut_values": 10})


def test_speed_prints_a_table_per_workload_and_setting_and_keeps_figures_and_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    pretend(monkeypatch, TIMES)
    said = run(*SPEED, "--out", tmp_path)
    assert "mlp, 2 nodes, 1 core each, one machine" in said
    assert "one process 1000 ms; ideal 500 ms; ceiling 1000 ms; best peer ddp" in said
    assert f"{tmp_path}/report.html, results.md, results.json, measurements/" in said
    assert "ringtmp bench speed --repeats 3 --cases ring,ddp --workloads mlp" in (tmp_path / "results.md").read_text()
    assert (tmp_path / "figures" / "speed-mlp-two.svg").stat().st_size > 1000
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [(row["case"], row["repeats"]) for row in rows] == [("one", 3), ("side-by-side", 3), ("ring", 3), ("ddp", 3)]
    assert json.loads(run(*SPEED, "--out", tmp_path, "--json"))["rows"] == rows


def test_experiments_of_all_kinds_go_together_in_one_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, msgspec.structs.replace(TIMES, facts=TIMES.facts | {"gloo_s": [2e-4], "bare_s": [1e-4]}))
    said = run("messages", *SPEED, "--out", tmp_path, "--json")
    found = json.loads(said)
    assert [section["name"] for section in found["page"]["sections"]] == ["speed", "messages"]
    assert (len(found["speed"]["rows"]), found["messages"]["size_bytes"]) == (4, 1024)


def test_without_matplotlib_the_rest_is_written_and_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, TIMES)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    verb.command.main([*map(str, SPEED), "--out", str(tmp_path)], standalone_mode=False)
    assert "ringtmp[plots]" in capsys.readouterr().err
    assert len(json.loads((tmp_path / "results.json").read_text())["rows"]) == 4


def test_an_option_of_another_experiment_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    for words, said in (
        (("speed", "--beds", "gpt-2"), "--beds is an option of plan and choice, and speed does not take it"),
        (("plan", "--devices", "four.toml"), "--devices is an option of idle"),
        (("speed", "--microbatches", "4,0"), "positive numbers"),
    ):
        with pytest.raises(UsageError, match=said):
            verb.command.main([*words, "--out", str(tmp_path / "out")], standalone_mode=False)
    assert not (tmp_path / "out").exists()


def test_where_everything_fails_there_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, None)
    with pytest.raises(RingError, match="nothing could be measured, no such thing"):
        verb.command.main([*map(str, SPEED), "--out", str(tmp_path)], standalone_mode=False)


def test_help_lists_every_option_under_the_experiments_that_take_it() -> None:
    shown = CliRunner().invoke(verb.command, ["speed", "--help"]).output
    for option in ("--cases", "--workloads", "--settings", "--repeats", "--steps", "--seed", "--out", "--json"):
        assert option in shown
    assert "--beds" in shown.partition("Options of plan")[2]


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


@pytest.mark.long  # the same command with nothing run, above
@pytest.mark.timeout(300)  # eight processes that load torch, on whatever machine
def test_the_ring_and_its_peers_do_the_same_work_and_are_measured_once(tmp_path: Path) -> None:
    words = ("--workloads", "mlp", "--settings", "two", "--cases", "ring,ddp", "--steps", "3")
    first, said = bench(tmp_path, *words)
    learned = losses(tmp_path)
    assert [row["case"] for row in first["rows"]] == ["one", "side-by-side", "ring", "ddp"]
    assert all(row["step_s"] is not None and row["failed"] == 0 for row in first["rows"]), said
    assert "4/4" in said
    assert len(learned) == 4
    for case in ("ring", "ddp"):
        assert learned[case] == pytest.approx(learned["one"], rel=1e-4)
    assert "--quick" in (tmp_path / "out" / "results.md").read_text()
    second, said = bench(tmp_path, *words)
    assert "4 of 4 were already measured" in said
    assert second == first


@pytest.mark.nightly
@pytest.mark.alone
@pytest.mark.timeout(1500)
@needs_isolation
@pytest.mark.parametrize("workload", QUICK)
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
    assert set(rows) == {"node to node, encrypted", "bare ZeroMQ, encrypted", "Gloo, in the clear"}
    assert all(len(seconds) == 2 and 0 < min(seconds) <= max(seconds) < 10 for seconds in rows.values())
