"""Emulated devices with real namespaces and control groups: bits, rates, caps, and nothing left on any way out."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click
import psutil
import pytest

from commands import begin
from ringtmp.cli import lab as verb
from ringtmp.errors import DoesNotFit, UsageError
from ringtmp.lab import control_groups
from ringtmp.lab.devices_file import Device, toml

needs_isolation = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None,
    reason="needs root on Linux and iproute2",
)


def devices_file(folder: Path, *devices: Device) -> Path:
    path = folder / "devices.toml"
    path.write_text(toml(devices))
    return path


def device(name: str, cpu: float = 0.5, memory_mb: float = 2000, link_mbps: float = 100, **more: float) -> Device:
    return Device(name, cpu, cpu, memory_mb, link_mbps, **more)


def throttle(lab: int, name: str, cpu: float) -> None:
    """Another share for a device that works, as when it becomes too hot."""
    tree, (period_us, quota_us) = control_groups.this_tree(), control_groups.quota(cpu)
    group = tree.cpu / f"rtlab-{lab}" / name
    if tree.version == 1:
        (group / "cpu.cfs_quota_us").write_text(str(quota_us))
        (group / "cpu.cfs_period_us").write_text(str(period_us))
    else:
        (group / "cpu.max").write_text(f"{quota_us} {period_us}")


def finish(process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    try:
        out, err = process.communicate(timeout=100)
    except subprocess.TimeoutExpired:
        process.terminate()
        out, err = process.communicate()
        raise AssertionError(f"still running after 100 s\n{out}\n{err}") from None
    assert process.returncode == code, f"exit {process.returncode}\n{out}\n{err}"
    assert left(process.pid) == []
    return out, err


def left(pid: int) -> list[str]:
    """Whatever there is of the lab with this process id: namespaces, control groups, folders, processes."""
    names = os.listdir("/var/run/netns") if os.path.isdir("/var/run/netns") else []
    found = [name for name in names if name.startswith(f"rtlab-{pid}-")]
    for folder, children, _ in os.walk("/sys/fs/cgroup"):
        found += [os.path.join(folder, child) for child in children if child == f"rtlab-{pid}"]
    found += [name for name in os.listdir(tempfile.gettempdir()) if name.startswith(f"rtlab-{pid}-")]
    return found + [f"process {each.pid}" for each in inside(pid)]


def inside(pid: int) -> list[psutil.Process]:
    """Processes that were started in a device of this lab, whoever their parent is by now."""
    found = []
    for process in psutil.process_iter():
        try:
            marked = f"/rtlab-{pid}-" in process.environ().get("RINGTMP_CONFIG", "")
            if marked and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def wait_until(true: Callable[[], object], what: str, process: subprocess.Popen[str] | None = None) -> None:
    limit = time.monotonic() + 60
    while not true():
        if process is not None and process.poll() is not None:
            raise AssertionError(f"ended too early: {process.communicate()}")
        assert time.monotonic() < limit, f"no {what} within a minute"
        time.sleep(0.05)


TRANSFER = """
import os, socket, time
peers = dict(pair.split("=") for pair in os.environ["RINGTMP_PEERS"].split())
me, first = os.environ["RINGTMP_DEVICE"], next(iter(peers))
if me == first:
    with socket.create_server((peers[me], 5000)) as door:
        open("door", "w").close()
        link, _ = door.accept()
    for way in ("in", "out"):
        began, count = time.monotonic(), 0
        if way == "in":
            while count < SIZE:
                count += len(link.recv(65536))
        else:
            link.sendall(bytes(SIZE))
            link.recv(1)
        print(way, SIZE * 8e-6 / (time.monotonic() - began))
else:
    while not os.path.exists("door"):
        time.sleep(0.01)
    link, count = socket.create_connection((peers[first], 5000)), 0
    link.sendall(bytes(SIZE))
    while count < SIZE:
        count += len(link.recv(65536))
    link.sendall(b"!")
"""


@needs_isolation
@pytest.mark.parametrize("slow", ["first", pytest.param("second", marks=pytest.mark.long)])
def test_a_link_of_20_mbit_carries_20_mbit_in_both_directions(tmp_path: Path, slow: str) -> None:
    rates = (20, 500) if slow == "first" else (500, 20)
    pair = [device(name, link_mbps=rate) for name, rate in zip("ab", rates, strict=True)]
    script = TRANSFER.replace("SIZE", "2_500_000")
    lab = begin(
        "lab", "exec", "--devices", devices_file(tmp_path, *pair), "--", sys.executable, "-c", script, cwd=tmp_path
    )
    measured = re.findall(r"^a: (in|out) ([\d.]+)$", finish(lab)[0], re.MULTILINE)
    assert [way for way, _ in measured] == ["in", "out"]
    for _, rate in measured:
        # Headers take 4 %; a busy machine takes more; the burst gives a little.
        assert 10 < float(rate) < 21


BUSY = """
import time
began, used = time.monotonic(), time.process_time()
while time.monotonic() < began + 1.5:
    pass
print((time.process_time() - used) / (time.monotonic() - began))
"""


@needs_isolation
def test_a_device_gets_its_share_of_a_core_and_no_more(tmp_path: Path) -> None:
    file = devices_file(tmp_path, device("slow", cpu=0.05), device("half", cpu=0.5))
    out, _ = finish(begin("lab", "exec", "--devices", file, "--", sys.executable, "-c", BUSY, cwd=tmp_path))
    share = {name: float(value) for name, value in re.findall(r"^(\w+): ([\d.]+)$", out, re.MULTILINE)}
    assert 0.01 < share["slow"] < 0.08
    assert 0.1 < share["half"] < 0.56


@needs_isolation
def test_a_device_that_takes_more_memory_than_it_has_is_ended(tmp_path: Path) -> None:
    file = devices_file(tmp_path, device("small", memory_mb=64), device("large", memory_mb=400))
    script = "held = bytearray(150_000_000); print('held', len(held))"
    out, _ = finish(begin("lab", "exec", "--devices", file, "--", sys.executable, "-c", script, cwd=tmp_path), 137)
    assert out == "large: held 150000000\n"


@needs_isolation
def test_exec_keeps_the_streams_apart_names_every_line_and_returns_the_first_code(tmp_path: Path) -> None:
    file = devices_file(tmp_path, device("a"), device("b"), device("c"))
    script = 'hostname; echo "$RINGTMP_ADDRESS of $RINGTMP_PEERS" >&2; printf tail; [ $RINGTMP_DEVICE = a ] || exit 7'
    out, err = finish(begin("lab", "exec", "--devices", file, "--", "sh", "-c", script, cwd=tmp_path), 7)
    assert sorted(out.splitlines()) == ["a: a", "a: tail", "b: b", "b: tail", "c: c", "c: tail"]
    assert "b: 10.77.0.2 of a=10.77.0.1 b=10.77.0.2 c=10.77.0.3\n" in err


@needs_isolation
def test_scaling_is_said_and_handed_to_the_commands(tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    file = devices_file(tmp_path, device("a", cpu=2 * cores, link_mbps=80), device("b", cpu=2 * cores))
    _, err = finish(begin("lab", "exec", "--devices", file, "--", "true", cwd=tmp_path), 2)
    assert f"need {4 * cores} cores" in err
    script = "echo $RINGTMP_LAB_SCALE $RINGTMP_EMULATED; tc qdisc show dev eth0"
    out, err = finish(begin("lab", "exec", "--scale", "--devices", file, "--", "sh", "-c", script, cwd=tmp_path))
    assert "SCALED: every CPU and link runs at 0.25 of its speed" in err
    assert "a: 0.25 1" in out
    assert "rate 20Mbit" in out


@pytest.mark.long
@needs_isolation
def test_the_inner_exit_code_and_error_come_through(tmp_path: Path) -> None:
    file = devices_file(tmp_path, device("a", cpu=1), device("b", cpu=1))
    out, err = finish(begin("lab", "--devices", file, "--", "train", "--model", "mpl", cwd=tmp_path), 2)
    assert out == ""
    assert "did you mean 'mlp'" in err


@pytest.mark.long
@needs_isolation
def test_a_node_that_dies_before_it_joined_is_named_and_ends_the_lab(tmp_path: Path) -> None:
    file = devices_file(tmp_path, device("a", cpu=1), device("snail", cpu=0.02))
    lab = begin("lab", "--devices", file, "--", "train", "--all-devices", "--steps", 3, cwd=tmp_path)

    def snail() -> list[psutil.Process]:
        return [process for process in inside(lab.pid) if process.environ()["RINGTMP_DEVICE"] == "snail"]

    wait_until(snail, "node", lab)
    snail()[0].kill()
    assert "snail ended with code -9 before it joined" in finish(lab, 4)[1]


@pytest.mark.long  # without a lab in test_ring_of_processes, and what a killed lab leaves below
@needs_isolation
def test_ctrl_c_saves_a_checkpoint_and_leaves_nothing(tmp_path: Path) -> None:
    file = devices_file(tmp_path, device("a", cpu=1), device("b", cpu=1))
    lab = begin(
        "lab", "--devices", file, "--", "train", "--all-devices", "--steps", 10**6, "--run-dir", "run", cwd=tmp_path
    )
    log = tmp_path / "run" / "events.jsonl"
    wait_until(lambda: log.exists() and b'{"type":"step"' in log.read_bytes(), "step", lab)
    assert len(left(lab.pid)) >= 2 + 2 + 1 + 3, "namespaces, groups, a folder, processes"
    lab.send_signal(signal.SIGINT)
    _, err = finish(lab, 130)
    assert "--resume" in err


@pytest.mark.long
@needs_isolation
def test_after_a_kill_the_devices_die_and_the_next_start_cleans_up(tmp_path: Path) -> None:
    file = devices_file(tmp_path, device("a", cpu=1), device("b", cpu=1))
    lab = begin(
        "lab", "--devices", file, "--", "train", "--all-devices", "--steps", 10**6, "--run-dir", "run", cwd=tmp_path
    )
    # Master, agent and its compute process.
    wait_until(lambda: len(inside(lab.pid)) >= 3, "compute process", lab)
    lab.kill()
    lab.communicate()
    wait_until(lambda: not inside(lab.pid), "end of the devices")
    finish(begin("lab", "exec", "--devices", file, "--", "true", cwd=tmp_path))
    assert left(lab.pid) == []


@needs_isolation
def test_orphans_of_a_killed_lab_are_ended_by_the_next(tmp_path: Path) -> None:
    file = devices_file(tmp_path, device("a"))
    lab = begin("lab", "exec", "--devices", file, "--", "sh", "-c", "setsid sleep 600 & sleep 600", cwd=tmp_path)
    wait_until(lambda: len(inside(lab.pid)) == 3, "orphan", lab)
    lab.kill()
    lab.communicate()
    finish(begin("lab", "exec", "--devices", file, "--", "true", cwd=tmp_path))
    assert left(lab.pid) == []


KILLED = """
from pathlib import Path
from commands import begin

def test_that_is_killed() -> None:
    here = Path(__file__).parent
    lab = begin("lab", "exec", "--devices", "devices.toml", "--", "sh", "-c", "setsid sleep 600 & sleep 600", cwd=here)
    (here / "lab").write_text(str(lab.pid))
    lab.communicate()
"""


@pytest.mark.long
@needs_isolation
def test_a_killed_test_run_leaves_no_lab(tmp_path: Path) -> None:
    """Nor another process that asked what it starts to end with it."""
    devices_file(tmp_path, device("a"), device("b"))
    (tmp_path / "test_killed.py").write_text(KILLED)
    tests = Path(__file__).parent.parent
    paths = [str(tests), str(tests / "support"), *filter(None, [os.environ.get("PYTHONPATH")])]
    killed = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", ".", "-p", "conftest", "test_killed.py"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    note = tmp_path / "lab"
    wait_until(lambda: note.exists() and note.read_text(), "lab", killed)
    lab = int(note.read_text())
    wait_until(lambda: [each.name() for each in inside(lab)].count("sleep") == 4, "four sleeps", killed)
    killed.kill()
    killed.communicate()
    wait_until(lambda: not psutil.pid_exists(lab) and not left(lab), "end of the lab")


@needs_isolation
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stopped_exec_ends_what_its_commands_left_running(tmp_path: Path, number: signal.Signals) -> None:
    """A shell that gets SIGINT alone goes on waiting for the command it runs."""
    file = devices_file(tmp_path, device("a"), device("b"))
    lab = begin("lab", "exec", "--devices", file, "--", "sh", "-c", "setsid sleep 600 & sleep 600", cwd=tmp_path)
    # Not merely forked: a shell's child loses a SIGINT that comes before it has become the command.
    wait_until(lambda: [each.name() for each in inside(lab.pid)].count("sleep") == 4, "four sleeps", lab)
    lab.send_signal(number)
    finish(lab, 128 + (signal.SIGINT if number == signal.SIGINT else signal.SIGTERM))


@needs_isolation
def test_exec_ends_when_nobody_reads_its_output(tmp_path: Path) -> None:
    lab = begin("lab", "exec", "--devices", devices_file(tmp_path, device("a")), "--", "yes", cwd=tmp_path)
    assert lab.stdout is not None
    assert lab.stderr is not None
    assert lab.stdout.readline() == "a: y\n"
    lab.stdout.close()
    assert lab.wait(60) == 1
    lab.stderr.close()
    assert left(lab.pid) == []


@pytest.mark.long
def test_without_isolation_it_trains_and_says_what_is_not_emulated(tmp_path: Path) -> None:
    watts = {"idle_w": 2.0, "busy_w": 6.0, "nj_per_byte": 1000.0}
    file = devices_file(tmp_path, device("a", cpu=64, memory_mb=10**6, **watts), device("b"))
    flags = ["--steps", 3, "--json", "--run-dir", "run"]
    out, err = finish(
        begin("lab", "--no-isolation", "--devices", file, "--", "train", "--all-devices", *flags, cwd=tmp_path)
    )
    summary = json.loads(out)
    assert summary["nodes"] == 2
    told, silent = summary["per_node"]
    seconds = told["busy_s"] + told["idle_s"]
    joules = 2 * seconds + 4 * told["busy_s"] + 1e-6 * (told["bytes_sent"] + told["bytes_received"])
    assert told["energy_j"] == pytest.approx(joules * summary["lab_scale"], rel=1e-3)
    assert [each["device"] for each in summary["per_node"]] == ["master", "b"]
    assert [each["power"] and each["power"]["name"] for each in summary["per_node"]] == ["given", None]
    assert (told["energy_source"], silent["energy_j"]) == ("modelled", None), (
        "nobody said what b needs: not a Pi's watts"
    )
    assert "--join" not in err, "nobody has to type it: the lab has"
    assert "NOT emulated: CPU shares, memory caps, a network of their own" in err


@pytest.mark.parametrize(("platform", "user", "words"), [("linux", 1000, "needs root"), ("darwin", 0, "needs Linux")])
def test_without_root_or_linux_it_offers_to_go_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, platform: str, user: int, words: str
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    with pytest.raises(UsageError, match=f"{words}.*--no-isolation"):
        verb.command.main(["--devices", str(devices_file(tmp_path, device("a"))), "train"], standalone_mode=False)


@pytest.mark.parametrize("words", [[], ["trian"], ["exec"]])
def test_neither_train_nor_a_command_is_refused(tmp_path: Path, words: list[str]) -> None:
    with pytest.raises(UsageError, match="lab runs train, evaluate, predict, generate or 'exec COMMAND…'"):
        verb.command.main(["--devices", str(devices_file(tmp_path, device("a"))), *words], standalone_mode=False)


def test_a_missing_devices_file_is_named() -> None:
    with pytest.raises(UsageError, match="devices file nowhere.toml cannot be read"):
        verb.command.main(["--devices", "nowhere.toml", "train"], standalone_mode=False)
    with pytest.raises(click.ClickException) as refused:
        verb.command.main(["train"], standalone_mode=False)
    assert "--devices" in refused.value.format_message()


def test_a_device_without_room_for_torch_is_refused_at_once(tmp_path: Path) -> None:
    file = devices_file(tmp_path, device("a"), device("tiny", memory_mb=200))
    with pytest.raises(DoesNotFit, match="tiny has 200 MiB, but torch alone needs 230"):
        verb.command.main(["--devices", str(file), "train"], standalone_mode=False)
