"""`train --supervised`: a master that is killed is started again and goes on, with the same bits and one result.

Most of it with a master of a few lines, which dies as it is told and needs no torch.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import psutil
import pytest

from commands import REMEMBERING, assert_all_gone, begin, here, remembering_model, ringtmp, wait_for_step
from ringtmp.cli import supervised
from ringtmp.cli.train import command as train
from ringtmp.launch.start_process import ask_to_leave_snapshots, end
from ringtmp.launch.supervise import Death, goes_on, steps_done, why_not_again
from ringtmp.metrics import events

SIGKILL = signal.SIGKILL
#: Each life takes the next line of `lives`: how many steps it does (-: it does not even begin), and how it ends.
MASTER = """
import functools, json, os, signal, sys, time
from pathlib import Path
from ringtmp.system.end_with_parent import end_with_parent

say = functools.partial(json.dumps, separators=(",", ":"))
run, here = Path("run"), Path(__file__).parent
print("half a result", end="", flush=True)
with (here / "told").open("a") as told:
    print(*sys.argv[1:], file=told)
lives = (here / "lives").read_text().splitlines()
(here / "lives").write_text("\\n".join(lives[1:]))
steps, end = lives[0].split()
run.mkdir(exist_ok=True)
if steps != "-":
    log = (run / "events.jsonl").open("a")
    begun = {"type": "run", "at": 0, "wall_clock": "", "schema": 1, "run": "", "version": "", "config": {}, "facts": {}}
    node = {"type": "node", "at": 0, "node": 0, "role": "", "pid": 0, "generation": 1, "segments": [], "parameters": 0}
    print(say({**begun, "generation": 1, "first_step": 0}), say(node), sep="\\n", file=log, flush=True)
    (run / "config.json").touch()
    for step in range(int(steps)):
        done = {"type": "step", "at": 0, "step": step, "epoch": 0, "loss": 0, "lr": 0, "samples": 1, "wall_s": 1}
        print(say(done), file=log)
    log.write('{"type":"st')  # as one that is killed while it writes
    log.flush()
if end == "wait":
    wishes = []
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda number, frame: wishes.append(number))
    end_with_parent()  # as the real one does
    (here / "ready").touch()
    limit = time.monotonic() + 60
    while not wishes and time.monotonic() < limit:
        time.sleep(0.01)
    time.sleep(0.3)
    (here / "wishes").write_text(str(wishes))
    print(": interrupted")
    sys.exit(130)
if end.startswith("SIG"):
    os.kill(os.getpid(), getattr(signal, end))
print(" and the other half")
sys.exit(int(end))
"""
SUPERVISOR = """
import sys
from pathlib import Path
from ringtmp.errors import RingError
from ringtmp.launch import supervise
supervise.PAUSE_S = 0.05
begun = supervise.Begun(("all",), ("first",), ("again",))
say = lambda text: print(text, file=sys.stderr, flush=True)
try:
    sys.exit(supervise.Supervisor(Path("run"), begun, 4, say, [sys.executable, "master.py"]).to_the_end())
except RingError as error:
    say(str(error))
    sys.exit(error.exit_code)
"""

COMPUTING = """
import sys, threading
from pathlib import Path
from ringtmp.launch import compute_process

class Store:
    def leave(self):
        Path("left").touch()

sys.stdin.buffer.readline()
threading.Thread(target=compute_process._follow_parent, args=([Store()],)).start()
Path("begun").touch()
"""


def supervise(folder: Path, *lives: str) -> subprocess.Popen[str]:
    (folder / "master.py").write_text(MASTER)
    (folder / "lives").write_text("\n".join(lives))
    return subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip


def ended(process: subprocess.Popen[str], code: int) -> tuple[str, str]:
    out, said = process.communicate(timeout=60)
    assert process.returncode == code, said
    return out, said


def wait_for(path: Path) -> None:
    limit = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < limit, f"no {path}"
        time.sleep(0.02)


def test_a_killed_master_is_started_again_from_its_run_and_its_result_comes_once(tmp_path: Path) -> None:
    out, said = ended(supervise(tmp_path, "- SIGKILL", "- SIGKILL", "3 SIGSEGV", "5 SIGKILL", "1 0"), 0)
    assert out == "half a result and the other half\n"
    assert (tmp_path / "told").read_text().split() == ["first", "first", "first", "again", "again"]
    starts = [line for line in said.splitlines() if "starting it again" in line]
    assert [line.split(";")[0] for line in starts] == [
        "the master was killed by SIGKILL before its first step (by someone, or by the system because memory ran out)",
        "the master was killed by SIGKILL before its first step (by someone, or by the system because memory ran out)",
        "the master was killed by SIGSEGV after step 3",
        "the master was killed by SIGKILL after step 5 (by someone, or by the system because memory ran out)",
    ]
    kept = [each.text for each in events.read(tmp_path / "run" / "events.jsonl") if isinstance(each, events.Warned)]
    assert kept == starts[2:], "what happened after the run had begun is among its events"
    assert goes_on(tmp_path / "run", ["all"])
    assert not goes_on(tmp_path / "run", ["something", "else"])


@pytest.mark.parametrize(
    ("lives", "why"),
    [
        (["3 SIGKILL", "3 SIGKILL"], "for the second time in this very step"),
        (["- SIGKILL", "- SIGKILL", "- SIGKILL"], "3 times in a row without a step"),
        ([f"{steps} SIGKILL" for steps in range(5)], "and --restarts 4 allows no more"),
    ],
)
def test_a_master_that_is_killed_again_and_again_is_given_up_with_a_word(
    lives: list[str], why: str, tmp_path: Path
) -> None:
    out, said = ended(supervise(tmp_path, *lives), 4)
    assert not out, "nothing of what it had begun to say"
    assert why in said.splitlines()[-1]
    assert ("ringtmp train --resume run" in said) == (lives[0] != "- SIGKILL")


def test_an_error_of_the_master_is_not_tried_again(tmp_path: Path) -> None:
    out, said = ended(supervise(tmp_path, "3 3", "1 0"), 3)
    assert (out, said) == ("half a result and the other half\n", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_wish_to_stop_goes_through_once_and_ends_both(number: signal.Signals, tmp_path: Path) -> None:
    process = supervise(tmp_path, "3 wait", "1 0")
    wait_for(tmp_path / "ready")
    process.send_signal(number)
    out, said = ended(process, 130)
    assert (out, said) == ("half a result: interrupted\n", "")
    assert (tmp_path / "wishes").read_text() == f"[{int(number)}]"
    assert (tmp_path / "lives").read_text() == "1 0"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent is gone")
def test_a_killed_supervisor_takes_its_master_along(tmp_path: Path) -> None:
    process = supervise(tmp_path, "3 wait")
    wait_for(tmp_path / "ready")
    (master,) = psutil.Process(process.pid).children()
    process.kill()
    process.communicate()
    assert_all_gone([master])
    assert (tmp_path / "wishes").read_text() == f"[{int(signal.SIGTERM)}]"


@pytest.mark.parametrize("asked", [True, False])
def test_a_compute_process_leaves_its_snapshots_where_it_is_asked_to(asked: bool, tmp_path: Path) -> None:
    """What a store writes down, and who finds it: test_left_with_nodes."""
    child = subprocess.Popen([sys.executable, "-c", COMPUTING], cwd=tmp_path, stdin=subprocess.PIPE)
    assert child.stdin is not None
    child.stdin.write(b'{"orders": "read already"}\n')
    child.stdin.flush()
    wait_for(tmp_path / "begun")
    if asked:
        ask_to_leave_snapshots(child)
    end(child, 60)
    assert child.returncode == 0
    assert (tmp_path / "left").exists() == asked


def test_a_signal_without_a_name_is_told_by_its_number() -> None:
    assert str(Death(40, 3)) == "the master was killed by signal 40 after step 3"


def test_when_it_is_enough() -> None:
    once = Death(SIGKILL, 3)
    assert why_not_again([once], 1) is None
    assert why_not_again([once, Death(SIGKILL, 4)], 1) is not None
    assert why_not_again([once, Death(SIGKILL, None), Death(SIGKILL, 4)], 5) is None
    assert why_not_again([once, Death(SIGKILL, None), once], 5) is not None, "it comes back with the step"
    never = Death(SIGKILL, None)
    assert why_not_again([never, never, once, never, never], 9) is None
    assert why_not_again([once, never, never, never], 9) is not None


def test_where_a_master_was_is_read_from_what_it_wrote_itself(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    assert steps_done(log, 0) is None
    begun = events.RunStarted(0, "", 1, "", "", {}, {}, 1, first_step=20)
    node = events.NodeStarted(0, 0, "", 0, 1, (), 0)
    lines = [events.encode(each) + b"\n" for each in (begun, node, events.StepDone(0, 20, 0, 0, 0, 1, 1))]
    log.write_bytes(lines[0])
    assert steps_done(log, 0) is None, "it has not come to a step"
    log.write_bytes(b"".join(lines[:2]))
    assert steps_done(log, 0) == 20, "in the first one it was to do"
    log.write_bytes(b"".join(lines) + b'{"type":"st')
    assert steps_done(log, 0) == 21
    assert steps_done(log, log.stat().st_size) is None, "what the one before wrote is not its own"


@pytest.mark.parametrize(
    "words",
    [
        "mine.toml --nodes 3 --opt lr=0.1 --opt betas=0.9,0.99 --no-discovery --listen 127.0.0.1:5 --cuts 0-1,2,-",
        "--supervised --restarts 3 --steps 5 --epochs 2 --log csv:a --log jsonl:b --json",
    ],
)
def test_options_become_the_words_they_were(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def parsed(given: list[str]) -> tuple[dict[str, Any], list[str]]:
        with train.make_context("train", given, auto_envvar_prefix="RINGTMP_TRAIN") as context:
            assert context is click.get_current_context()
            return context.params, supervised._words(lambda name: name not in ("seed",))

    monkeypatch.setenv("RINGTMP_TRAIN_BATCH_SIZE", "17")
    options, again = parsed(words.split())
    assert "--batch-size=17" in again
    monkeypatch.delenv("RINGTMP_TRAIN_BATCH_SIZE")
    assert parsed(again)[0] == options


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--restarts", "3"], "goes with --supervised"),
        (["--supervised", "--restarts", "0"], "restarts"),
        (["--silent-after", "60"], "--silent-after goes with --supervised"),
        (["--supervised", "--silent-after", "1"], "silent-after"),
        (["--supervised", "--data", "-", "--model", "x.py:m"], "cannot be read again"),
    ],
)
def test_what_cannot_be_supervised_is_refused(words: list[str], why: str, tmp_path: Path) -> None:
    assert why in here("train", *words, cwd=tmp_path, code=2).stderr


# -- the real master --------------------------------------------------------------------------------------------------

FLAGS = (*REMEMBERING, "--steps", 160)


def master_of(process: subprocess.Popen[str], before: set[int]) -> psutil.Process:
    limit = time.monotonic() + 100
    while time.monotonic() < limit:
        for each in psutil.Process(process.pid).children():
            if each.pid not in before:
                before.add(each.pid)
                return each
        time.sleep(0.05)
    raise AssertionError("no master within a minute")


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("starts", "steps"), [pytest.param(1, 1, marks=pytest.mark.long), pytest.param(2, 2, marks=pytest.mark.nightly)]
)
def test_a_master_killed_at_random_moments_ends_with_the_bits_of_an_undisturbed_one(
    starts: int, steps: int, tmp_path: Path
) -> None:
    """Before its first step and within steps; resumed by hand in test_healing_processes."""
    (tmp_path / "mine.py").write_text(remembering_model(128))
    chance = random.Random(time.time_ns())
    command = ("train", *FLAGS, "--nodes", 3, "--checkpoint-every", 20, "--run-dir", tmp_path / "run")
    process = begin(*command, "--supervised", cwd=tmp_path)
    seen: set[int] = set()
    workers: list[psutil.Process] = []
    for moment in [chance.uniform(0, 4) for _ in range(starts)]:
        master = master_of(process, seen)
        time.sleep(moment)
        master.kill()
    for step in sorted(chance.sample(range(10, 130), steps)):
        master = master_of(process, seen)
        wait_for_step(tmp_path / "run", step, process, 300)
        workers += master.children()
        master.kill()
    out, said = process.communicate(timeout=400)
    assert process.returncode == 0, said
    assert said.count("starting it again") == starts + steps, said
    summary = json.loads(out)
    alone = here("train", *FLAGS, "--nodes", 1, "--run-dir", "alone", cwd=tmp_path)
    assert summary["weights_sha256"] == json.loads(alone.stdout)["weights_sha256"]
    assert summary["steps"] == 160
    recoveries = [each for each in summary["recoveries"] if each["kind"] == "restarted"]
    assert recoveries, "the last of them had a run to go on with"
    assert all(each["lost"] == [0] and "SIGKILL" in each["reason"] for each in recoveries)
    assert_all_gone(workers)
    assert not (tmp_path / "run" / "snapshots").exists()
    again = ringtmp(*command, "--supervised", cwd=tmp_path, timeout=400)
    assert json.loads(again.stdout)["weights_sha256"] == summary["weights_sha256"], "the same command goes on"
    assert "already holds a run" in here(*command, cwd=tmp_path, code=2).stderr


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_stopped_master_of_groups_is_ended_and_started_again_beside_its_page(tmp_path: Path) -> None:
    """SIGSTOP: nobody gets a word out of it, and only its silence shows."""
    pytest.importorskip("uvicorn")
    (tmp_path / "mine.py").write_text(remembering_model(64).replace("BatchNorm1d", "LayerNorm"))
    groups = ("--nodes", 3, "--groups", "2", "--sum-tree", 2)
    command = ("train", *REMEMBERING, "--steps", 120, "--checkpoint-every", 10, "--run-dir", tmp_path / "run", *groups)
    process = begin(*command, "--supervised", "--silent-after", 10, "--dashboard", cwd=tmp_path)
    assert process.stderr is not None
    page = next(each.split()[-1] for each in process.stderr if "http" in each)
    master = next(each for each in _children(process) if "train" in each.cmdline())
    wait_for_step(tmp_path / "run", 25, process, 200)
    master.suspend()
    out, said = process.communicate(timeout=400)
    assert process.returncode == 0, said
    assert "because it had written no event for 1" in said
    summary = json.loads(out)
    (found,) = [each for each in summary["recoveries"] if each["kind"] == "restarted"]
    assert found["step"] >= 20
    assert page.startswith("http")
    alone = here(
        "train", *REMEMBERING, "--steps", 120, "--nodes", 1, "--sum-tree", 2, "--run-dir", "alone", cwd=tmp_path
    )
    assert summary["weights_sha256"] == json.loads(alone.stdout)["weights_sha256"]
    assert_all_gone([master])


def _children(process: subprocess.Popen[str]) -> list[psutil.Process]:
    limit = time.monotonic() + 100
    while time.monotonic() < limit:
        found = psutil.Process(process.pid).children()
        if any("train" in each.cmdline() for each in found):
            return found
        time.sleep(0.05)
    raise AssertionError("no master within a minute")
