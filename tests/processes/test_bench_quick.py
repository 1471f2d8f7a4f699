"""Experiments for real: the prototype's ring, a program's result on disk, and `bench quick` as a whole."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from invented import ENVIRONMENT, choices
from ringtmp.bench.experiment_registry import COMPARISONS
from ringtmp.bench.experiments import traffic
from ringtmp.bench.measuring import measure_jobs, progress_bar
from ringtmp.bench.measuring.jobs import Job
from ringtmp.bench.measuring.measurement_files import Measured, Result, Store

needs_isolation = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None,
    reason="needs root on Linux and iproute2",
)


@pytest.mark.long  # bytes by formula in test_strategies
def test_three_real_processes_send_the_values_the_prototype_counted() -> None:
    job = traffic.prototype_cells(choices())[0].job
    made = measure_jobs.measure(job, 0, ENVIRONMENT, 100.0)
    assert made.outcome == "measured", made.error
    table = next(each for each in traffic.section(choices(), Measured([made])).tables if "prototype" in each.title)
    assert table.rows[0][1:4] == ("1.32e+07", "1.32e+07", "1.32e+07")


def test_a_result_without_steps_is_kept_told_and_not_measured_again(tmp_path: Path) -> None:
    script = 'print(\'{"step_s": [], "facts": {"tries": []}}\')'
    job = Job("capacity", "w", "s", "c", ("python", "-c", script), {}, "told", 1, 0)
    plan, store = [(0, job)], Store(tmp_path)
    found = []
    for _ in range(2):
        with progress_bar.telling(plan, quiet=True) as teller:
            found += measure_jobs.perform(plan, store, ENVIRONMENT, 30.0, teller)
    store.close()
    assert found[0].outcome == "measured", found[0].error
    assert found[0].result == Result((), {"tries": []})
    assert found[1] == found[0]


@pytest.mark.nightly
@pytest.mark.alone
@pytest.mark.timeout(900)
@needs_isolation
def test_bench_quick_is_complete_within_six_minutes(tmp_path: Path) -> None:
    began = time.monotonic()
    command = [sys.executable, "-m", "ringtmp", "bench", "quick", "--out", str(tmp_path / "out"), "--json", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=True)
    took_s = time.monotonic() - began
    made = json.loads(done.stdout)["page"]
    assert [section["name"] for section in made["sections"]] == [*COMPARISONS, "method"]
    failed = [
        each
        for section in made["sections"]
        for each in section["skipped"]
        if each["why"].startswith(("failed", "timed out"))
    ]
    assert not failed
    for section in made["sections"][:-1]:
        assert section["verdicts"], section["name"]
        assert section["tables"], section["name"]
    assert (tmp_path / "out" / "report.html").stat().st_size > 50_000
    assert took_s < 360
