"""Measuring commands: nothing measured twice, nothing lost, nothing left running."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import psutil
import pytest

from ringtmp.bench.measuring import measure_jobs, progress_bar, run_command
from ringtmp.bench.measuring.jobs import PYTHON, Job, digest
from ringtmp.bench.measuring.machine_facts import Environment
from ringtmp.bench.measuring.measurement_files import Measurement, Store
from ringtmp.errors import UsageError

ENVIRONMENT = Environment("0", "code", "torch", "AVX2", "3.11", "Linux", "a processor", 2)
#: What a peer prints: five steps of four samples that end a tenth of a second apart.
SPEECH = '{"ended_s": [0, 0.1, 0.2, 0.3, 0.4], "samples": [4, 4, 4, 4, 4], "epochs": [0, 0, 0, 0, 0]}'


def job(case: str, script: str = f"print('{SPEECH}')", **changes: object) -> Job:
    made = Job("test", "work", "here", case, (PYTHON, "-c", script), {}, "peer", batch_size=4, warm_up=2)
    return msgspec.structs.replace(made, **changes)


class Nobody:
    def begin(self, repeat: int, job: Job) -> None: ...
    def done(self, measurement: Measurement, reused: bool) -> None: ...
    def left_out(self, job: Job, why: str) -> None: ...


def perform(folder: Path, *jobs: Job, limit_s: float = 60.0) -> list[Measurement]:
    store = Store(folder)
    try:
        return list(measure_jobs.perform([(0, each) for each in jobs], store, ENVIRONMENT, limit_s, Nobody()))
    finally:
        store.close()


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


@pytest.mark.long
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


@pytest.mark.long
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
    assert "no step could be measured" in str(found[2].error)
    for path in (tmp_path / "measurements").iterdir():
        assert "secret" not in path.read_text()
    # Next time the reason may be gone.
    assert perform(tmp_path, broken)[0].at >= found[0].at


def test_what_is_needless_after_what_was_measured_is_left_out_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def needless(each: Job, found: Sequence[Measurement]) -> str | None:
        return "b took less" if each.case == "c" and "b" in {one.job.case for one in found} else None

    plan, store = [(0, job("b")), (0, job("c", "raise SystemExit(1)"))], Store(tmp_path)
    with progress_bar.telling(plan, quiet=False) as teller:
        found = list(measure_jobs.perform(plan, store, ENVIRONMENT, 60.0, teller, needless))
    store.close()
    assert [each.job.case for each in found] == ["b"]
    assert [path.name for path in (tmp_path / "measurements").iterdir()] == ["test.work.here.b.0.json"]
    assert "work here c: left out, b took less" in capsys.readouterr().err


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


@pytest.mark.long
def test_a_case_over_its_limit_is_ended_with_all_it_started(tmp_path: Path) -> None:
    found = perform(tmp_path, job("slow", endless(tmp_path)), job("good"), limit_s=2.0)
    assert [each.outcome for each in found] == ["timed out", "measured"]
    assert "did not finish within 2 s" in str(found[0].error)
    assert (tmp_path / "started").exists()
    assert sleepers(tmp_path) == []


@pytest.mark.long
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
from ringtmp.bench.measuring.machine_facts import Environment
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
