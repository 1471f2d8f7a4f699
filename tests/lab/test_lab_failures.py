"""Failures in the lab: real namespaces, cables pulled, routes lost, hosts stopped, links and processors slowed.

Every run is interrupted when its story is over and finished by a single process: the bits must be those of a single
process that was never disturbed.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from test_lab import device, devices_file, inside, left, needs_isolation, throttle

from commands import CLI, ringtmp
from ringtmp.metrics import events
from ringtmp.metrics.events import LineTried, NodeStarted, Regrouped
from test_killed_at_named_moments import MODEL

pytestmark = [needs_isolation, pytest.mark.alone, pytest.mark.timeout(400)]

NAMES = ("desk", "shelf", "attic", "shed", "barn")  # the first is the master
ADDRESSES = {name: f"10.77.0.{number + 1}" for number, name in enumerate(NAMES)}
FLAGS = ("--model", "mine.py:model", "--optimizer", "adamw", "--clip-norm", 1)
CPU = 0.5
WAIT_S = 90.0


class Lab:
    model: str = MODEL
    flags: tuple[object, ...] = FLAGS
    cpu = CPU  # of every device

    def __init__(self, folder: Path, devices: int, *more: object, everyone: bool = True) -> None:
        self.folder, self.names = folder, NAMES[:devices]
        self._everyone = ("--all-devices",) if everyone else ()
        (folder / "mine.py").write_text(self.model)
        self._file = devices_file(folder, *(device(name, self.cpu) for name in self.names))
        self.log = folder / "run" / "events.jsonl"
        self._said = folder / "said"
        self.begin(*self.flags, "--steps", 10**6, "--run-dir", "run", *more)

    def begin(self, *flags: object) -> None:
        with self._said.open("a") as said:
            self.process = subprocess.Popen(
                [*CLI, "lab", "--devices", str(self._file), "--", "train", *self._everyone, *map(str, flags)],
                cwd=self.folder, stdout=subprocess.DEVNULL, stderr=said, text=True, start_new_session=True,
            )  # fmt: skip

    def said(self) -> str:
        return self._said.read_text()

    def until(self, true: Callable[[], object], what: str, seconds: float = WAIT_S) -> None:
        limit = time.monotonic() + seconds
        while not true():
            assert self.process.poll() is None, f"ended too early\n{self.said()}"
            assert time.monotonic() < limit, f"no {what} within {seconds:.0f} s\n{self.said()}"
            time.sleep(0.1)

    def steps_done(self) -> int:
        content = self.log.read_bytes() if self.log.exists() else b""
        return max((int(each) for each in re.findall(rb'"type":"step","at":[\d.]+,"step":(\d+)', content)), default=-1)

    def train_on(self, steps: int) -> None:
        target = self.steps_done() + steps
        self.until(lambda: self.steps_done() >= target, f"step {target}")

    def regrouped(self) -> list[Regrouped]:
        return [each for each in events.read(self.log) if isinstance(each, Regrouped)] if self.log.exists() else []

    def until_regrouped(self, times: int, seconds: float = WAIT_S) -> Regrouped:
        self.until(lambda: len(self.regrouped()) >= times, f"new generation number {times}", seconds)
        self.train_on(5)
        return self.regrouped()[times - 1]

    # -- what is done to a device -------------------------------------------------------------------------------------

    def inside(self, name: str) -> str:
        return f"rtlab-{self.process.pid}-{name}"

    def ip(self, name: str, *words: str) -> None:
        subprocess.run(["ip", "-n", self.inside(name), *words], check=True, timeout=10)

    def processes(self, name: str) -> list[psutil.Process]:
        found = []
        for each in inside(self.process.pid):
            with contextlib.suppress(psutil.Error):
                if each.environ().get("RINGTMP_DEVICE") == name:
                    found.append(each)
        return found

    def compute(self, name: str) -> psutil.Process:
        (found,) = [each for each in self.processes(name) if "ringtmp.launch.compute_process" in each.cmdline()]
        return found

    def node(self, number: int) -> str:
        """Who has this number: they are given in the order in which devices come."""
        pids = [each.pid for each in events.read(self.log) if isinstance(each, NodeStarted) and each.node == number]
        return psutil.Process(pids[-1]).environ()["RINGTMP_DEVICE"]

    def limit_rate(self, name: str, mbit: float) -> None:
        self._shape(name, "eth0", mbit)
        self._shape("switch", f"p{NAMES.index(name) + 1}", mbit)

    def _shape(self, where: str, port: str, mbit: float) -> None:
        rate = ["rate", f"{round(mbit * 1000)}kbit", "burst", "15140", "latency", "50ms"]
        command = ["tc", "-n", self.inside(where), "qdisc", "replace", "dev", port, "root", "tbf", *rate]
        subprocess.run(command, check=True, timeout=10)

    def lay_slow_cable(self, one: str, other: str, mbit: float) -> None:
        """Between two devices, beside the switch: what they say to each other goes over it."""
        for name in (one, other):
            listed = ["ip", "-n", self.inside(name), "-brief", "address", "show", "eth0"]
            there = lambda: ADDRESSES[name] in subprocess.run(listed, capture_output=True, text=True, timeout=10).stdout  # noqa: B023, E731
            self.until(there, f"network of {name}", 20)
        self.ip(one, "link", "add", "slow0", "type", "veth", "peer", "name", "slow0", "netns", self.inside(other))
        for name, peer in ((one, other), (other, one)):
            self._shape(name, "slow0", mbit)
            self.ip(name, "link", "set", "slow0", "up")
            self.ip(name, "route", "add", f"{ADDRESSES[peer]}/32", "dev", "slow0", "src", ADDRESSES[name])

    # -- the end ------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(60) == 130, self.said()
        assert left(self.process.pid) == []

    def assert_same_bits(self) -> None:
        """Stop, do one more step alone, compare."""
        self.stop()
        steps = self.steps_done() + 2
        alone = ("--nodes", 1, "--threads", 1, "--steps", steps, "--json", "--quiet")
        gone_on = ringtmp("train", "--resume", "run", *alone, cwd=self.folder)
        calm = ringtmp("train", *FLAGS, *alone, "--run-dir", "calm", cwd=self.folder)
        assert json.loads(gone_on.stdout)["weights_sha256"] == json.loads(calm.stdout)["weights_sha256"]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
            self.process.kill()
            self.process.wait()


@pytest.fixture
def labs(tmp_path: Path) -> Iterator[Callable[..., Lab]]:
    made: list[Lab] = []

    def make(
        devices: int, *more: object, at_once: Callable[[Lab], None] = lambda lab: None, everyone: bool = True
    ) -> Lab:
        made.append(Lab(tmp_path, devices, *more, everyone=everyone))
        at_once(made[0])
        made[0].until(lambda: made[0].steps_done() >= 10, "step 10")
        return made[0]

    yield make
    for each in made:
        each.close()


@pytest.mark.long
def test_a_pulled_cable_then_an_owner_lost_with_its_holder(labs: Callable[..., Lab]) -> None:
    lab = labs(4, "--checkpoint-every", 20)
    lab.ip("shelf", "link", "set", "eth0", "down")
    lost = lab.until_regrouped(1)
    assert "(shelf) has been silent" in lost.reason
    assert lost.nodes == 3
    assert 3 <= lost.notice_s < 5
    lab.ip("shelf", "link", "set", "eth0", "up")
    back = lab.until_regrouped(2)
    assert (back.reason, back.nodes) == ("shelf joined", 4)
    lab.train_on(25)
    both = [lab.compute(lab.node(1)), lab.compute(lab.node(2))]
    for each in both:
        each.kill()
    lost = lab.until_regrouped(3)
    assert (lost.source, lost.nodes) == ("checkpoint", 4)
    lab.assert_same_bits()


@pytest.mark.nightly  # in memory: test_unreachable_neighbours
def test_a_lost_route_to_the_master_and_one_between_two_neighbours(labs: Callable[..., Lab]) -> None:
    lab = labs(4)
    lab.ip("attic", "route", "add", "blackhole", f"{ADDRESSES['desk']}/32")  # one direction
    lost = lab.until_regrouped(1)
    assert "(attic) has been silent" in lost.reason
    assert lost.nodes == 3
    lab.ip("attic", "route", "del", "blackhole", f"{ADDRESSES['desk']}/32")
    assert lab.until_regrouped(2).reason == "attic joined"
    lab.ip(lab.node(1), "route", "add", "blackhole", f"{ADDRESSES[lab.node(2)]}/32")
    link = lab.until_regrouped(3)
    assert "cannot reach each other" in link.reason
    assert (link.lost, link.nodes) == ((), 4)
    lab.train_on(20)
    lab.assert_same_bits()


@pytest.mark.long
def test_a_slow_way_between_two_devices_is_found_before_the_first_plan(labs: Callable[..., Lab]) -> None:
    lab = labs(4, at_once=lambda lab: lab.lay_slow_cable("shelf", "attic", 4), everyone=False)
    names = dict(re.findall(r"^(\d)\. (\w+):", lab.said(), re.MULTILINE))
    rates = {
        frozenset((names[str(each.source)], names[str(each.target)])): (each.there_bytes_per_s, each.back_bytes_per_s)
        for each in events.read(lab.log)
        if isinstance(each, LineTried) and each.source
    }
    slow = rates.pop(frozenset(("shelf", "attic")))
    assert 3e5 < min(slow) <= max(slow) < 6e5, "4 Mbit/s"
    assert len(rates) == 2
    assert min(map(min, rates.values())) > 5e6, "100 Mbit/s"


@pytest.mark.nightly  # processes: test_joining
def test_a_host_stopped_for_half_a_minute_is_lost_in_time_and_back_when_it_wakes(labs: Callable[..., Lab]) -> None:
    lab = labs(3, "--no-rebalance")  # while one sleeps, the others have more of the processors than planned
    family = lab.processes("attic")
    stopped = time.monotonic()
    for each in family:
        each.suspend()
    lost = lab.until_regrouped(1)
    assert "(attic) has been silent" in lost.reason
    assert lost.nodes == 2
    assert 3 <= lost.notice_s < 5
    time.sleep(max(0.0, stopped + 30 - time.monotonic()))
    for each in family:
        each.resume()
    assert lab.until_regrouped(2).reason == "attic joined"
    lab.assert_same_bits()


@pytest.mark.long
def test_a_minute_at_1_mbit_and_a_tenth_of_the_processor_evicts_nobody(labs: Callable[..., Lab]) -> None:
    lab = labs(3)
    lab.limit_rate("shelf", 1)
    throttle(lab.process.pid, "attic", CPU / 10)
    time.sleep(60)
    assert [each.reason for each in lab.regrouped() if each.lost] == []
    lab.limit_rate("shelf", 100)
    throttle(lab.process.pid, "attic", CPU)
    lab.train_on(20)
    assert [each.reason for each in lab.regrouped() if each.lost] == []
    lab.assert_same_bits()


@pytest.mark.nightly  # processes: test_joining
def test_a_killed_master_is_resumed_with_all_devices(labs: Callable[..., Lab]) -> None:
    lab = labs(3, "--checkpoint-every", 10)
    lab.train_on(15)
    (master,) = [each for each in lab.processes("desk") if "train" in each.cmdline()]
    master.kill()
    assert lab.process.wait(60) == 137, lab.said()
    assert left(lab.process.pid) == []
    reached = lab.steps_done()
    lab.begin("--resume", "run", "--steps", 10**6)
    lab.until(lambda: lab.steps_done() >= reached + 20, "steps after the resume")
    lab.assert_same_bits()


@pytest.mark.nightly
def test_a_device_with_a_wiped_disk_comes_back_with_a_new_token(labs: Callable[..., Lab]) -> None:
    lab = labs(3)
    agent, *_ = sorted(lab.processes("shelf"), key=lambda each: each.pid)
    environment = agent.environ()
    for each in lab.processes("shelf"):
        each.kill()
    lost = lab.until_regrouped(1)
    assert "(shelf)" in lost.reason
    assert lost.nodes == 2
    fresh = lab.folder / "fresh"
    desk = next(each.environ() for each in lab.processes("desk"))
    token = subprocess.run([*CLI, "ring", "token"], env=desk, capture_output=True, text=True, check=True, timeout=30)
    new = subprocess.Popen(
        ["ip", "netns", "exec", lab.inside("shelf"), *CLI, "node", "--join", "-", "--name", "shelf", "--memory", "1500"],
        env={**environment, "RINGTMP_CONFIG": str(fresh)}, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        assert new.stdin is not None
        new.stdin.write(token.stdout)
        new.stdin.close()
        back = lab.until_regrouped(2)
        assert (back.reason, back.nodes) == ("shelf joined", 3)
    finally:
        lab.process.send_signal(signal.SIGINT)
        lab.process.wait(60)
        new.terminate()
        new.wait(20)
    steps = lab.steps_done() + 2
    alone = ("--nodes", 1, "--threads", 1, "--steps", steps, "--json", "--quiet")
    gone_on = ringtmp("train", "--resume", "run", *alone, cwd=lab.folder)
    calm = ringtmp("train", *FLAGS, *alone, "--run-dir", "calm", cwd=lab.folder)
    assert json.loads(gone_on.stdout)["weights_sha256"] == json.loads(calm.stdout)["weights_sha256"]
