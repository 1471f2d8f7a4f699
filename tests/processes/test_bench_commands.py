"""The harness: intervals by hand, every round complete, nothing measured twice, nothing lost, nothing left running."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil
import pytest

from invented import run_events
from ringtmp.bench.analysis import intervals
from ringtmp.bench.measuring import machine, measure_jobs, run_command
from ringtmp.bench.measuring.jobs import PYTHON, Job, digest, interleaved, time_left_s
from ringtmp.bench.measuring.machine import Environment
from ringtmp.bench.measuring.measurement_files import Measurement, Store
from ringtmp.bench.measuring.read_output import step_times
from ringtmp.errors import UsageError
from ringtmp.metrics.events import CheckpointSaved, Evaluated, StepDone
from ringtmp.metrics.run_parts import parts_of

ENVIRONMENT = Environment("0", "code", "torch", "AVX2", "3.11", "Linux", "a processor", 2)
#: What a peer prints: five steps of four samples that end a tenth of a second apart.
SPEECH = '{"ended_s": [0, 0.1, 0.2, 0.3, 0.4], "samples": [4, 4, 4, 4, 4], "epochs": [0, 0, 0, 0, 0]}'


def job(case: str, script: str = f"print('{SPEECH}')", **changes: object) -> Job:
    made = Job("test", "work", "here", case, (PYTHON, "-c", script), {}, "peer", batch_size=4, warm_up=2)
    return msgspec.structs.replace(made, **changes)


class Nobody:
    def begin(self, repeat: int, job: Job) -> None: ...
    def done(self, measurement: Measurement, reused: bool) -> None: ...


def perform(folder: Path, *jobs: Job, limit_s: float = 60.0) -> list[Measurement]:
    store = Store(folder)
    try:
        return list(measure_jobs.perform([(0, each) for each in jobs], store, ENVIRONMENT, limit_s, Nobody()))
    finally:
        store.close()


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
    assert machine.stolen_ticks("cpu  1 2 3 4 5 6 7 42 9 10\ncpu0 1 1 1 1 1 1 1 1 1 1\n") == 42
    with pytest.raises(ValueError, match="no line"):
        machine.stolen_ticks("cpu 1 2 3\n")


def test_what_only_plans_and_reports_is_no_reason_to_measure_again(tmp_path: Path) -> None:
    for name in ("strategies/ring/node.py", "bench/table.py", "bench/peers/ddp.py", "cli/bench.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    before = machine.code_sha256(tmp_path)
    for name, same in (("bench/table.py", True), ("cli/bench.py", True), ("strategies/ring/node.py", False)):
        (tmp_path / name).write_text("2")
        assert (machine.code_sha256(tmp_path) == before) is same, name
    before = machine.code_sha256(tmp_path)
    (tmp_path / "bench/peers/ddp.py").write_text("2")
    assert machine.code_sha256(tmp_path) != before


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


# -- measuring --------------------------------------------------------------------------------------------------------


def counted(path: Path) -> str:
    return f"open({str(path)!r}, 'a').write('x'); print('{SPEECH}')"


def test_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    first = perform(tmp_path, job("a", counted(mark)))
    assert first[0].outcome == "measured"
    assert first[0].result is not None
    assert first[0].result.step_s == pytest.approx((0.1, 0.1, 0.1))
    assert perform(tmp_path, job("a", counted(mark))) == first
    assert mark.read_text() == "x"


def test_other_settings_another_environment_or_a_damaged_file_are_measured_again(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    plain = job("a", counted(mark))
    perform(tmp_path, plain)
    perform(tmp_path, msgspec.structs.replace(plain, warm_up=3))
    assert mark.read_text() == "xx"
    assert digest(plain, ENVIRONMENT) != digest(plain, msgspec.structs.replace(ENVIRONMENT, torch="another"))
    store = Store(tmp_path)
    path = store.path(plain, 0)
    store.close()
    whole = path.read_bytes()
    for number, damage in enumerate((whole[: len(whole) // 2], b"", b"\xff\xfe", b"[]", b'{"schema": 1}')):
        path.write_bytes(damage)
        assert perform(tmp_path, plain)[0].outcome == "measured"
        assert mark.read_text() == "xxx" + "x" * number
        assert msgspec.json.decode(path.read_bytes(), type=Measurement).result is not None
    assert [each.name for each in path.parent.iterdir() if each.name.startswith(".")] == []


def test_what_a_command_has_started_has_time_to_tidy_up_though_the_command_is_gone(tmp_path: Path) -> None:
    """A runner that dies of SIGTERM at once, and a child of it that has something to take down first."""
    child = (
        "import signal, sys, time, pathlib\n"
        "def tidy(*_): time.sleep(1); pathlib.Path('tidy').touch(); sys.exit()\n"
        "signal.signal(signal.SIGTERM, tidy); pathlib.Path('there').touch(); signal.pause()"
    )
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]).wait()"
    ended = run_command.run([sys.executable, "-c", parent], tmp_path, (), limit_s=3.0)
    assert ended.timed_out
    assert (tmp_path / "there").exists(), "it never came to be"
    assert (tmp_path / "tidy").exists()


def test_a_case_that_fails_is_recorded_and_the_bench_goes_on(tmp_path: Path) -> None:
    broken = job("broken", "import sys; sys.exit('ringtmp: no such strategy; node --join rt1.' + 'se' + 'cret')")
    mute = job("mute", "print('nothing to read')")
    short = job("short", 'print(\'{"ended_s": [1], "samples": [4], "epochs": [0]}\')')
    found = perform(tmp_path, broken, mute, short, job("good"))
    assert [each.outcome for each in found] == ["failed", "failed", "failed", "measured"]
    assert found[0].error == "exit code 1\nringtmp: no such strategy; node --join rt1.…"
    assert "no line of JSON" in str(found[1].error)
    assert "none of its steps counts" in str(found[2].error)
    for path in (tmp_path / "measurements").iterdir():
        assert "secret" not in path.read_text()
    # Next time the reason may be gone.
    assert perform(tmp_path, broken)[0].at >= found[0].at


def test_a_measurement_has_what_it_takes_to_repeat_it(tmp_path: Path) -> None:
    made = job("a", files={"devices.toml": "here"}, options={"microbatches": 4})
    perform(tmp_path, made)
    (path,) = (tmp_path / "measurements").iterdir()
    record = json.loads(path.read_text())
    assert record["job"]["command"][0] == "python"
    assert record["job"]["files"] == {"devices.toml": "here"}
    assert record["environment"]["torch"] == "torch"
    assert record["load_before"] >= 0
    assert 0 <= record["busy_before"] <= 1
    assert sys.executable not in path.read_text()


def test_a_command_sees_its_files_its_processors_and_none_of_our_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RINGTMP_TRAIN_NODES", "7")
    script = (
        "import os, sys; text = open('given').read(); cores = getattr(os, 'sched_getaffinity', lambda _: [0])(0); "
        "sys.exit(f'{text} {len(cores)} {os.environ.get(\"RINGTMP_TRAIN_NODES\")}')"
    )
    before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    found = perform(tmp_path, job("a", script, files={"given": "hello"}, processors=1))
    assert found[0].error == "exit code 1\nhello 1 None"
    if before is not None:
        assert os.sched_getaffinity(0) == before


def test_two_benches_do_not_write_to_one_folder(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(UsageError, match="another bench is writing"):
        Store(tmp_path)
    store.close()
    Store(tmp_path).close()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be used"):
        Store(tmp_path / "file")


# -- nothing left -----------------------------------------------------------------------------------------------------


def sleepers(folder: Path) -> list[psutil.Process]:
    """Whatever was started in a session of its own by a script of `endless`."""
    found = []
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(folder) in " ".join(each.cmdline()) and each.status() != psutil.STATUS_ZOMBIE:
                found.append(each)
    return found


def endless(folder: Path, deaf: bool = False) -> str:
    """Starts a process in a session of its own, and then neither ends; `deaf` ones do not even heed SIGTERM."""
    deafness = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " if deaf else ""
    child = f"{deafness}import time; time.sleep(600) # {folder}"
    return (
        f"{deafness}import subprocess, sys, time; "
        f"subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True); "
        f"open({str(folder / 'started')!r}, 'w').close(); time.sleep(600)"
    )


def test_a_case_over_its_limit_is_ended_with_all_it_started(tmp_path: Path) -> None:
    found = perform(tmp_path, job("slow", endless(tmp_path)), job("good"), limit_s=2.0)
    assert [each.outcome for each in found] == ["timed out", "measured"]
    assert "no end within 2 s" in str(found[0].error)
    assert (tmp_path / "started").exists()
    assert sleepers(tmp_path) == []


def test_who_does_not_heed_the_signal_is_ended_by_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_command, "STOP_LIMIT_S", 0.5)
    assert perform(tmp_path, job("deaf", endless(tmp_path, deaf=True)), limit_s=2.0)[0].outcome == "timed out"
    assert sleepers(tmp_path) == []


BENCH = """
import sys
from pathlib import Path
import msgspec
from ringtmp.bench.measuring import measure_jobs, run_command
from ringtmp.bench.measuring.jobs import Job
from ringtmp.bench.measuring.machine import Environment
from ringtmp.bench.measuring.measurement_files import Store
class Nobody:
    def begin(self, repeat, job): ...
    def done(self, measurement, reused): ...
folder = Path(sys.argv[1])
plan = msgspec.json.decode((folder / "plan.json").read_bytes(), type=list[tuple[int, Job]])
environment = msgspec.json.decode((folder / "environment.json").read_bytes(), type=Environment)
try:
    with run_command.interruptible():
        list(measure_jobs.perform(plan, Store(folder), environment, 600.0, Nobody()))
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize(
    "number", [signal.SIGINT, *(pytest.param(each, marks=pytest.mark.long) for each in (signal.SIGTERM, signal.SIGHUP))]
)
def test_ctrl_c_leaves_nothing_running_and_keeps_what_was_measured(tmp_path: Path, number: signal.Signals) -> None:
    plan = [(0, job("good")), (0, job("slow", endless(tmp_path))), (0, job("never"))]
    (tmp_path / "plan.json").write_bytes(msgspec.json.encode(plan))
    (tmp_path / "environment.json").write_bytes(msgspec.json.encode(ENVIRONMENT))
    bench = subprocess.Popen([sys.executable, "-c", BENCH, str(tmp_path)], start_new_session=True)
    wait_until((tmp_path / "started").exists, bench)
    wait_until(lambda: len(sleepers(tmp_path)) >= 2, bench)
    bench.send_signal(number)
    assert bench.wait(30) == 130
    assert sleepers(tmp_path) == []
    store = Store(tmp_path)
    assert [each.name for each in (tmp_path / "measurements").iterdir()] == [store.path(plan[0][1], 0).name]
    assert store.load(plan[0][1], 0, digest(plan[0][1], ENVIRONMENT)) is not None
    store.close()


def wait_until(true: Callable[[], object], bench: subprocess.Popen[bytes]) -> None:
    limit = time.monotonic() + 60
    while not true():
        assert bench.poll() is None, "ended too early"
        assert time.monotonic() < limit
        time.sleep(0.05)
