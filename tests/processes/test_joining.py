"""Devices join a master over TCP on loopback, as real processes with the real command line."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from commands import CLI, assert_all_gone, here, remembering_model, ringtmp, wait_for_step
from ringtmp.metrics import events
from ringtmp.metrics.events import LineTried
from test_join_security import free_port

FLAGS = ["--threads", "1", "--quiet", "--json"]
#: For a device that is to come in mid-run: batches come slowly until there is a file `joined`. How long a device takes to
#: start is up to the machine; the run neither ends before that nor needs many steps on a machine that is slow.
PACED_STEPS = 200
PACED_DATA = f"""
import time
from pathlib import Path

import torch

def data():
    generator = torch.Generator().manual_seed(1)
    for step in range({PACED_STEPS}):
        if step > 30 and not Path(__file__).with_name("joined").exists():
            time.sleep(0.4)
        yield torch.randn(32, 1, 8, 8, generator=generator), torch.randint(10, (32,), generator=generator)
"""
PACED = ("--model", "mine.py:model", "--data", "mine.py:data", "--steps", PACED_STEPS)


class Ring:
    """A master and its devices, each with a config directory of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.token = ""

    def environment(self, name: str) -> dict[str, str]:
        return {**os.environ, "RINGTMP_CONFIG": str(self.folder / f"config-{name}")}

    def begin(self, name: str, *args: object, stdin: str = "") -> subprocess.Popen[str]:
        with (self.folder / f"{name}.err").open("a") as log:
            process = subprocess.Popen(
                [*CLI, *map(str, args)], cwd=self.folder, env=self.environment(name), stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip
        assert process.stdin is not None
        process.stdin.write(stdin)
        process.stdin.close()
        self.processes[name] = process
        return process

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.err").read_text()

    def until(self, name: str, pattern: str, seconds: float = 90) -> str:
        limit = time.monotonic() + seconds
        living = True
        while living and time.monotonic() < limit:
            living = self.processes[name].poll() is None  # asked first: the last it said counts too
            if found := re.search(pattern, self.said(name)):
                return found[0]
            time.sleep(0.05)
        raise AssertionError(f"{name} never said {pattern!r}: {self.said(name)}")

    def master(self, nodes: int, *args: object, run: str = "run") -> subprocess.Popen[str]:
        process = self.begin(
            "master",
            "train",
            "--listen",
            f"127.0.0.1:{self.port}",
            "--nodes",
            nodes,
            "--run-dir",
            run,
            "--all-devices",
            *FLAGS,
            *args,
        )
        self.token = self.until("master", r"rt1\.[\w-]+", 300)
        return process

    def device(self, name: str, *args: object) -> subprocess.Popen[str]:
        """The token goes in by standard input: it shows in no process list."""
        return self.begin(name, "node", "--join", "-", "--name", name, *args, stdin=self.token + "\n")

    def paced(self, *args: object) -> subprocess.Popen[str]:
        """A master of three whose batches come slowly until `joined` is called."""
        (self.folder / "mine.py").write_text(remembering_model(32) + PACED_DATA)
        return self.master(3, *PACED, *args)

    def joined(self, name: str) -> None:
        """Once a device is in, there is nothing to wait for any more."""
        limit = time.monotonic() + 90
        while not any(
            isinstance(each, events.Regrouped) and each.reason == f"{name} joined"
            for each in events.read(self.folder / "run" / "events.jsonl")
        ):
            assert self.processes["master"].poll() is None, f"it ended without {name}: {self.said('master')}"
            assert time.monotonic() < limit, f"{name} never joined: {self.said('master')}"
            time.sleep(0.2)
        (self.folder / "joined").touch()

    def paced_alone(self) -> str:
        """The weights one process ends with."""
        alone = here("train", "--nodes", 1, *PACED, *FLAGS, cwd=self.folder)
        digest: str = json.loads(alone.stdout)["weights_sha256"]
        return digest

    def result(self, seconds: float = 90) -> dict[str, object]:
        """Of the master, which has to end within so many seconds."""
        process = self.processes["master"]
        process.stdin = None  # closed already
        out, _ = process.communicate(timeout=seconds)
        assert process.returncode == 0, self.said("master")
        loaded: dict[str, object] = json.loads(out)
        return loaded

    def close(self) -> None:
        everyone = [psutil.Process(each.pid) for each in self.processes.values() if each.poll() is None]
        family = everyone + [child for each in everyone for child in each.children(recursive=True)]
        for each in self.processes.values():
            if each.poll() is None:
                each.send_signal(signal.SIGINT)
        for each in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                each.wait(10)
            each.kill()
            each.wait()
            assert each.stdout is not None
            each.stdout.close()
        assert_all_gone(family)


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[Ring]:
    made = Ring(tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("alone")
    digest: str = json.loads(here("train", "--nodes", 1, "--steps", 150, *FLAGS, cwd=folder).stdout)["weights_sha256"]
    return digest


def crowd(ports: list[int]) -> list[socket.socket]:
    """Hundreds of strangers who connect and say nothing, and one who drips a byte at a time."""
    made = []
    for number in range(500):
        with contextlib.suppress(OSError):
            each = socket.create_connection(("127.0.0.1", ports[number % len(ports)]), timeout=0.3)
            made.append(each)
    made[0].sendall(b"\xff")
    return made


def test_all_or_none_gives_up_when_its_wait_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGTMP_CONFIG", str(tmp_path / "config"))
    where = ("--listen", f"127.0.0.1:{free_port()}", "--nodes", 3, "--start-with", 3, "--wait", 0.5)
    done = here("train", *where, "--steps", 1, *FLAGS, cwd=tmp_path, code=1)
    assert "only 0 of 2 devices joined within 500.0 ms: try again, or use --start-with" in done.stderr


def test_devices_join_and_train_with_the_same_bits_among_strangers(ring: Ring, expected: str) -> None:
    process = ring.master(3, "--steps", 150)
    for name in ("alpha", "beta"):
        ring.device(name)
    ring.until("master", r"\d\. alpha: .* core")
    wait_for_step(ring.folder / "run", 1, process)
    listening = [
        each.laddr.port
        for each in psutil.Process(process.pid).net_connections("tcp")
        if each.status == psutil.CONN_LISTEN
    ]
    assert len(listening) == 4, "the table and three channels; the door is closed"
    strangers = crowd(listening)
    try:
        summary = ring.result()
    finally:
        for each in strangers:
            each.close()
    assert summary["weights_sha256"] == expected
    assert summary["nodes"] == 3, ring.said("master")
    tried = [each for each in events.read(ring.folder / "run" / "events.jsonl") if isinstance(each, LineTried)]
    assert sorted((each.source, each.target) for each in tried) == [(0, 1), (0, 2), (1, 2)], "also between the two"
    assert all(min(each.there_bytes_per_s, each.back_bytes_per_s) > 1e6 for each in tried), tried
    secret = ring.token[20:60]
    for path in (ring.folder / "run").rglob("*"):
        assert not path.is_file() or secret not in path.read_text(errors="ignore"), f"the token is in {path}"


@pytest.mark.long
def test_devices_that_stay_train_again_without_a_new_token(ring: Ring) -> None:
    ring.master(3, "--steps", 2)
    for name in ("alpha", "beta"):
        ring.device(name)
    assert ring.result()["nodes"] == 3
    ring.begin(
        "master",
        "train",
        "--listen",
        f"127.0.0.1:{ring.port}",
        "--nodes",
        3,
        "--run-dir",
        "again",
        "--steps",
        2,
        "--all-devices",
        *FLAGS,
    )
    again = ring.result()
    assert (again["nodes"], again["steps"]) == (3, 2)


@pytest.mark.long
def test_a_device_revoked_in_mid_run_is_out_and_no_bit_changes(ring: Ring, expected: str) -> None:
    process = ring.master(3, "--steps", 150)
    ring.device("alpha")
    ring.device("beta")
    wait_for_step(ring.folder / "run", 3, process)
    said = subprocess.run(
        [*CLI, "ring", "revoke", "beta"], env=ring.environment("master"), capture_output=True, text=True, check=True
    )
    assert "beta" in said.stdout
    summary = ring.result()
    assert summary["weights_sha256"] == expected
    assert summary["nodes"] == 2
    (change,) = summary["recoveries"]  # type: ignore[misc]
    assert change["reason"] == "beta was revoked"
    assert change["generation"] == 2
    # What it was is told to the device when it tries to come back.
    ring.until("beta", "out of the run|run ended|no longer knows")
    listed = subprocess.run(
        [*CLI, "ring", "list"], env=ring.environment("master"), capture_output=True, text=True, check=True
    )
    assert "1 admitted, 1 revoked" in listed.stdout


@pytest.mark.long  # exit 4 of a lost process in test_ring_of_processes
def test_unprotected_a_device_that_leaves_is_named_and_ends_the_run_with_code_4(ring: Ring) -> None:
    process = ring.master(2, "--epochs", 500, "--protect", "off")
    device = ring.device("alpha")
    wait_for_step(ring.folder / "run", 3, process)
    device.send_signal(signal.SIGINT)
    assert device.wait(10) == 0
    assert "leaving" in ring.said("alpha")
    assert process.wait(15) == 4
    assert "node 1 (alpha)" in ring.said("master")


@pytest.mark.long
def test_a_killed_compute_process_is_started_again_by_its_agent(ring: Ring, expected: str) -> None:
    process = ring.master(2, "--steps", 150)
    device = ring.device("alpha")
    wait_for_step(ring.folder / "run", 3, process)
    (compute,) = psutil.Process(device.pid).children()
    compute.kill()
    summary = ring.result()
    assert "(alpha): its compute process ended with code -9" in ring.said("master")
    assert device.poll() is None
    assert summary["weights_sha256"] == expected
    assert summary["nodes"] == 2


@pytest.mark.long  # a lost process of a device below, a change of the pool in test_node_pools
def test_the_ring_goes_on_without_one_that_left_and_takes_it_in_when_it_comes_back(ring: Ring) -> None:
    process = ring.paced("--checkpoint-every", 50)
    first, _ = ring.device("alpha"), ring.device("beta")
    wait_for_step(ring.folder / "run", 10, process)
    first.send_signal(signal.SIGINT)
    assert first.wait(10) == 0
    ring.until("master", r"nodes continue")
    ring.device("alpha")
    ring.joined("alpha")
    summary = ring.result()
    assert summary["weights_sha256"] == ring.paced_alone()
    lost, back = summary["recoveries"]  # type: ignore[misc]
    assert (lost["nodes"], back["nodes"]) == (2, 3)
    assert back["reason"] == "alpha joined"


@pytest.mark.long  # a stopped worker is lost in test_healing_processes
def test_a_device_that_falls_silent_is_lost_in_time_and_back_when_it_wakes(ring: Ring) -> None:
    """As with a pulled cable: neither the agent nor its compute process says anything, and then both go on."""
    process = ring.paced()
    zombie, _ = ring.device("alpha"), ring.device("beta")
    wait_for_step(ring.folder / "run", 20, process)
    family = [psutil.Process(zombie.pid), *psutil.Process(zombie.pid).children()]
    for each in family:
        each.suspend()
    try:
        ring.until("master", r"alpha\) has been silent for 3\.\d s")
        ring.until("master", r"nodes continue")
    finally:
        for each in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.resume()
    ring.joined("alpha")
    summary = ring.result()
    assert summary["weights_sha256"] == ring.paced_alone()
    lost, back = summary["recoveries"]  # type: ignore[misc]
    assert 3 <= lost["notice_s"] < 4
    assert (back["reason"], back["nodes"]) == ("alpha joined", 3)


@pytest.mark.long  # a killed master is resumed in test_healing_processes
def test_a_killed_master_finds_its_devices_again(ring: Ring, expected: str) -> None:
    process = ring.master(3, "--steps", 150, "--checkpoint-every", 10)
    ring.device("alpha")
    ring.device("beta")
    wait_for_step(ring.folder / "run", 15, process)
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()
    listen = ("--listen", f"127.0.0.1:{ring.port}")
    ring.begin("master", "train", "--resume", "run", *listen, "--nodes", 3, *FLAGS)
    summary = ring.result()
    assert summary["weights_sha256"] == expected
    assert summary["nodes"] == 3


@pytest.mark.long  # one that is revoked above, one released in memory in test_node_pools
def test_a_released_device_sits_out_the_run(ring: Ring, expected: str) -> None:
    process = ring.master(3, "--steps", 150)
    ring.device("alpha")
    ring.device("beta")
    wait_for_step(ring.folder / "run", 3, process)
    subprocess.run([*CLI, "ring", "release", "beta"], env=ring.environment("master"), check=True)
    summary = ring.result()
    assert summary["weights_sha256"] == expected
    (change,) = summary["recoveries"]  # type: ignore[misc]
    assert (change["reason"], change["nodes"]) == ("beta was released", 2)


@pytest.mark.long  # the wait itself above
def test_fewer_devices_than_wished_for_start_after_the_wait(ring: Ring, expected: str) -> None:
    ring.master(4, "--steps", 150, "--start-with", 2, "--wait", 1)
    ring.device("alpha", "--once")
    assert ring.result()["weights_sha256"] == expected
    assert ring.processes["alpha"].wait(10) == 0


@pytest.mark.long
def test_a_new_device_that_comes_late_gets_layers_and_no_bit_changes(ring: Ring) -> None:
    process = ring.paced("--start-with", 2, "--wait", 1)
    ring.device("alpha")
    wait_for_step(ring.folder / "run", 20, process)
    ring.device("beta")
    ring.joined("beta")
    summary = ring.result()
    assert summary["weights_sha256"] == ring.paced_alone()
    # On a busy machine a device may be silent for so long that it counts as lost, and heals: not what this is about.
    joined = [each for each in summary["recoveries"] if each["reason"] == "beta joined"]  # type: ignore[attr-defined]
    assert [each["nodes"] for each in joined] == [3]


@pytest.mark.long  # the API with processes in test_ring_of_processes
def test_the_same_from_python(ring: Ring, expected: str) -> None:
    script = (
        "from ringtmp import Ring\n"
        f"result = Ring(listen='127.0.0.1:{ring.port}', nodes=2, all_devices=True, threads=1)\n"
        "result = result.fit('mlp', 'digits', steps=150, run_dir='run')\n"
        "print(result.summary.weights_sha256)\n"
    )
    with (ring.folder / "master.err").open("a") as log:
        process = ring.processes["master"] = subprocess.Popen(
            [sys.executable, "-c", script], cwd=ring.folder, env=ring.environment("master"), stdout=subprocess.PIPE,
            stderr=log, text=True,
        )  # fmt: skip
    ring.token = ring.until("master", r"rt1\.[\w-]+")
    ring.device("alpha", "--once")
    assert process.stdout is not None
    assert process.stdout.read().strip() == expected


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["train", "--listen", "192.0.2.7", "--nodes", "2"], "192.0.2.7 is not an address of this machine; it has"),
        (["train", "--listen", "127.0.0.1:99999", "--nodes", "2"], "the port must be a number"),
        (["train", "--listen", "127.0.0.1", "--nodes", "1"], "leaves no device to wait for"),
        (["node", "--no-discovery"], "no join token"),
        (["node", "--join", "rt1.nonsense"], "token is damaged"),
        (["node", "--join", "@missing"], "token file missing cannot be read"),
        (["ring", "token", "--ring", "nowhere"], "no ring 'nowhere' here"),
        (["ring", "revoke", "x", "--ring", "../x"], "use 1 to 32 of a-z"),
    ],
)
def test_wrong_use_is_one_line_and_exit_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], says: str
) -> None:
    monkeypatch.setenv("RINGTMP_CONFIG", str(tmp_path / "config"))
    done = (here if args[0] == "train" else ringtmp)(*args, cwd=tmp_path, code=2)
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.long  # in memory: test_left_with_nodes; local processes: test_supervised_masters
@pytest.mark.timeout(1200)
def test_a_supervised_master_finds_its_devices_and_the_snapshot_they_hold(ring: Ring, expected: str) -> None:
    """There is no checkpoint but the first. Nobody types anything after the kill."""
    process = ring.master(3, "--steps", 150, "--supervised", "--protect", "memory")
    ring.device("alpha")
    ring.device("beta")
    log = ring.folder / "run" / "events.jsonl"
    wait_for_step(ring.folder / "run", 15, process, 300)
    (master,) = psutil.Process(process.pid).children()
    master.kill()
    ring.until("master", r"starting it again \(restart 1 ", 300)
    summary = ring.result(400)
    assert (summary["weights_sha256"], summary["nodes"]) == (expected, 3)
    told = list(events.read(log))
    first, then = [each.first_step for each in told if isinstance(each, events.RunStarted)]
    assert first == 0
    assert then > 0, "snapshots outlived the master"
    assert not (ring.folder / "run" / "left-with-nodes.json").exists()
