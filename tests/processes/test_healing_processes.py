"""Real processes stopped, or killed again and again, and those that take their place; a killed master resumed: the bits
are those of an undisturbed run.

Kills at named moments are in test_killed_at_named_moments.py, at random ones in test_killed_at_random_moments.py.
"""

from __future__ import annotations

import json
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from commands import REMEMBERING, assert_all_gone, begin, here, remembering_model, wait_for_step, workers_of
from ringtmp.metrics import events

MODEL = remembering_model(128)
FLAGS = (*REMEMBERING, "--steps", 160)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("alone")
    (folder / "mine.py").write_text(MODEL)
    digest: str = json.loads(here("train", "--nodes", 1, *FLAGS, cwd=folder).stdout)["weights_sha256"]
    return digest


def start(folder: Path, *more: object) -> subprocess.Popen[str]:
    (folder / "mine.py").write_text(MODEL)
    return begin("train", *FLAGS, "--nodes", 3, "--run-dir", folder / "run", *more, cwd=folder)


def ended(process: subprocess.Popen[str], limit_s: float = 90) -> dict[str, Any]:
    out, said = process.communicate(timeout=limit_s)
    assert process.returncode == 0, said
    assert "healing" in said
    summary: dict[str, Any] = json.loads(out)
    return summary


@pytest.mark.long
def test_a_killed_worker_is_replaced_a_stopped_one_lost_after_the_limit_and_snapshots_on_disk_leave_nothing(
    tmp_path: Path, expected: str
) -> None:
    process = start(tmp_path, "--notice", 1, "--protect", "disk")
    wait_for_step(tmp_path / "run", 40, process)
    workers = workers_of(process)
    workers[2].kill()
    wait_for_step(tmp_path / "run", 100, process)
    workers[1].suspend()
    summary = ended(process)
    assert summary["weights_sha256"] == expected
    killed, stopped = summary["recoveries"]
    assert (killed["lost"], stopped["lost"]) == ([2], [1])
    assert killed["notice_s"] < 1, "a closed pipe tells at once"
    assert 1 <= stopped["notice_s"] < 2.5
    assert stopped["source"] == "snapshot"
    assert not (tmp_path / "run" / "snapshots").exists()
    assert_all_gone(list(workers.values()))


@pytest.mark.long
def test_a_killed_master_is_resumed_with_the_same_bits(tmp_path: Path, expected: str) -> None:
    process = start(tmp_path, "--checkpoint-every", 20)
    wait_for_step(tmp_path / "run", 50, process)
    workers = list(workers_of(process).values())
    psutil.Process(process.pid).suspend()  # or it might be done before the other has begun
    refused = here("train", "--resume", tmp_path / "run", "--quiet", cwd=tmp_path, code=2)
    assert f"is in use by process {process.pid}" in refused.stderr
    process.kill()
    process.communicate()
    assert_all_gone(workers)
    done = here("train", "--resume", tmp_path / "run", "--json", "--quiet", cwd=tmp_path)
    assert json.loads(done.stdout)["weights_sha256"] == expected
    assert not (tmp_path / "run" / "snapshots").exists()


def waiting_spare(process: subprocess.Popen[str], used: set[int]) -> int:
    """The process id of a spare that has loaded all it needs: it waits and uses no processor time."""
    limit = time.monotonic() + 60
    while time.monotonic() < limit:
        for each in psutil.Process(process.pid).children():
            if "spare" in each.cmdline() and each.pid not in used:
                before = each.cpu_times().user
                time.sleep(0.5)
                if before > 0 and each.cpu_times().user == before:
                    return each.pid
        time.sleep(0.1)
    raise AssertionError("no spare process within a minute")


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.timeout(400)
def test_a_spare_process_takes_the_place_of_a_killed_one_within_two_seconds(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODEL)
    # A schedule would depend on the number of steps.
    flags = ("--model", "mine.py:model", "--optimizer", "adamw", "--clip-norm", 1, "--json", "--quiet")
    process = begin("train", *flags, "--steps", 10**6, "--nodes", 3, "--run-dir", tmp_path / "run", cwd=tmp_path)
    run, used = tmp_path / "run", set[int]()

    def told(kind: type[Any]) -> list[Any]:
        return [each for each in events.read(run / "events.jsonl") if isinstance(each, kind)]

    try:
        wait_for_step(run, 10, process)
        for kill in range(3):
            used.add(spare := waiting_spare(process, used))
            node = 1 + kill % 2
            psutil.Process([each.pid for each in told(events.NodeStarted) if each.node == node][-1]).kill()
            wait_for_step(run, len(told(events.StepDone)) + 20, process)
            assert [each.pid for each in told(events.NodeStarted) if each.node == node][-1] == spare
        everyone = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
        assert process.returncode == 130
    finally:
        process.kill()
        process.communicate()
    assert_all_gone(everyone)
    healed = told(events.Regrouped)
    assert len(healed) == 3
    assert statistics.median(each.notice_s + each.seconds for each in healed) < 2, healed
    assert sorted(each.name for each in (run / "logs").iterdir()) == ["node-1.log", "node-2.log"]
    steps = max(each.step for each in told(events.StepDone)) + 2
    gone_on = here("train", "--resume", run, "--nodes", 1, "--steps", steps, "--json", "--quiet", cwd=tmp_path)
    calm = here("train", *flags, "--nodes", 1, "--steps", steps, cwd=tmp_path)
    assert json.loads(gone_on.stdout)["weights_sha256"] == json.loads(calm.stdout)["weights_sha256"]


@pytest.mark.alone
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "kills", [pytest.param(10, marks=pytest.mark.long), pytest.param(30, marks=pytest.mark.nightly)]
)
def test_the_same_node_killed_again_and_again_costs_neither_memory_nor_open_files(kills: int, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODEL)
    flags = [*REMEMBERING, "--steps", 25 * (kills + 2)]
    process = begin("train", *flags, "--nodes", 3, "--run-dir", tmp_path / "run", cwd=tmp_path)
    master = psutil.Process(process.pid)
    used: list[tuple[int, int]] = []
    survivor = None
    for kill in range(kills):
        wait_for_step(tmp_path / "run", 25 * (kill + 1), process)
        log = [
            event for event in events.read(tmp_path / "run" / "events.jsonl") if isinstance(event, events.NodeStarted)
        ]
        survivor = survivor or psutil.Process(next(event.pid for event in log if event.node == 1))
        newest = psutil.Process([event.pid for event in log if event.node == 2][-1])
        used.append((master.num_fds() + survivor.num_fds(), master.memory_info().rss + survivor.memory_info().rss))
        newest.kill()
    summary = ended(process)
    assert len(summary["recoveries"]) == kills
    alone = here("train", *flags, "--nodes", 1, cwd=tmp_path)
    assert summary["weights_sha256"] == json.loads(alone.stdout)["weights_sha256"]
    files, memory = zip(*used, strict=True)
    assert files[-1] <= files[2] + 2, files
    assert memory[-1] <= memory[2] * 1.1, memory


def wait_for_regrouping(run: Path, process: subprocess.Popen[str]) -> None:
    limit = time.monotonic() + 100
    while not any(isinstance(each, events.Regrouped) for each in events.read(run / "events.jsonl")):
        assert process.poll() is None
        assert time.monotonic() < limit, "nobody was missed"
        time.sleep(0.2)
    wait_for_step(
        run, sum(isinstance(each, events.StepDone) for each in events.read(run / "events.jsonl")) + 5, process
    )


@pytest.mark.long
@pytest.mark.timeout(500)
def test_workers_killed_together_after_a_cleaner_came_by_are_replaced_and_all_named(tmp_path: Path) -> None:
    """Sockets, logs and the spare process are gone or stopped: each is made again, and nobody is waited for."""
    (tmp_path / "mine.py").write_text(MODEL)
    # Until it is told to stop: on a fast machine a spare process takes hundreds of steps to come. No schedule, which would
    # depend on their number.
    flags = ("--model", "mine.py:model", "--optimizer", "adamw", "--clip-norm", 1, "--json", "--quiet")
    process = begin("train", *flags, "--steps", 10**6, "--nodes", 4, "--run-dir", tmp_path / "run", cwd=tmp_path)
    wait_for_step(tmp_path / "run", 20, process)
    workers = workers_of(process)
    psutil.Process(waiting_spare(process, set())).suspend()
    (sockets,) = Path(tempfile.gettempdir()).glob(f"ringtmp_{process.pid}-*")
    shutil.rmtree(sockets)
    shutil.rmtree(tmp_path / "run" / "logs")
    workers[2].kill()
    workers[3].kill()
    wait_for_regrouping(tmp_path / "run", process)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    steps = max(
        each.step for each in events.read(tmp_path / "run" / "events.jsonl") if isinstance(each, events.StepDone)
    )
    more = ("--nodes", 1, "--steps", steps + 2)
    summary = json.loads(here("train", "--resume", tmp_path / "run", *more, "--json", "--quiet", cwd=tmp_path).stdout)
    calm = here("train", *flags, *more, cwd=tmp_path)
    assert summary["weights_sha256"] == json.loads(calm.stdout)["weights_sha256"]
    (healed,) = [each for each in summary["recoveries"] if each["kind"] != "rebalanced"]
    assert sorted(healed["lost"]) == [2, 3]
    assert sorted(each.name for each in (tmp_path / "run" / "logs").iterdir()) == ["node-2.log", "node-3.log"]
    assert not sockets.exists()
    assert_all_gone(list(workers.values()))
