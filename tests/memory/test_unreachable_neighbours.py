"""Nodes that live and cannot be reached: one that answers nobody, two that cannot reach each other; and one place too few."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringtmp.errors import DoesNotFit, NodeLost
from ringtmp.launch import joined_devices, start_on_devices
from ringtmp.launch.agent import join
from ringtmp.launch.agent_messages import Facts
from ringtmp.launch.authenticate_devices import Device, Hub
from ringtmp.launch.device_facts import device_facts
from ringtmp.launch.join_token import Token
from ringtmp.launch.joined_devices import DevicePool
from ringtmp.launch.key_store import Rings, identity
from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.launch.start_on_devices import start_on
from ringtmp.plan.memory_forecast import PROCESS_BYTES
from ringtmp.plan.route import kept_apart
from ringtmp.transport.base import Transport
from ringtmp.transport.faults import Severed
from ringtmp.wire.address import NOWHERE
from test_healing import run
from test_join_security import free_port


class Clock:
    """Jumps when the master has nothing to do."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


class Waiting(Severed):
    def __init__(self, inner: Transport, cuts: set[tuple[int, int]], clock: Clock) -> None:
        super().__init__(inner, cuts)
        self._clock = clock

    def wait(self, timeout_s: float) -> bool:
        if not super().wait(0):
            self._clock.now += timeout_s
        return True


class Split(InMemoryPool):
    """When the first worker comes to a step, lines are cut or one of the workers does nothing any more."""

    def __init__(self, nodes: int, at: int, cuts: set[tuple[int, int]] | None = None, idle: int | None = None) -> None:
        clock, lines = Clock(), set[tuple[int, int]]()
        super().__init__(nodes, wrap=lambda transport: Waiting(transport, lines, clock), clock=clock)
        self._at, self._lines, self._coming, self._idle = at, lines, cuts or set(), idle
        self.stuck: int | None = None

    def advance(self) -> bool:
        if (self._coming or self._idle is not None) and any(each.step >= self._at for each in self._workers):
            self._lines |= self._coming
            self.stuck, self._idle = self._idle, None
            self._coming = set()
        workers = self._workers
        self._workers = [each for each in workers if each.endpoint.node != self.stuck]
        try:
            return super().advance()
        finally:
            self._workers = workers

    def drop(self, node: int) -> None:
        super().drop(node)
        self.stuck = None


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str | None:
    return run(tmp_path_factory.mktemp("calm") / "run", InMemoryPool(4)).summary.weights_sha256


def test_a_node_that_is_there_and_does_nothing_is_replaced_after_the_stall_limit(tmp_path: Path, expected: str) -> None:
    hit = run(tmp_path / "hit", Split(4, 6, idle=2))
    (healed,) = hit.summary.recoveries
    assert "node 2 is alive but answers nobody" in healed.reason
    assert (healed.lost, healed.nodes, healed.notice_s) == ((2,), 4, 60)
    assert hit.summary.weights_sha256 == expected


@pytest.mark.parametrize("cuts", [{(1, 2)}, {(2, 1)}, {(1, 2), (2, 1)}], ids=["one way", "the other", "both"])
def test_two_neighbours_that_cannot_reach_each_other_are_put_apart(
    cuts: set[tuple[int, int]], tmp_path: Path, expected: str
) -> None:
    hit = run(tmp_path / "hit", Split(4, 6, cuts))
    (healed,) = hit.summary.recoveries
    assert "cannot reach each other" in healed.reason
    assert (healed.lost, healed.nodes) == ((), 4)
    assert all(each.segments for each in hit.summary.per_node)
    assert hit.summary.weights_sha256 == expected


def test_where_no_order_keeps_them_apart_one_is_left_out_and_that_is_said(tmp_path: Path, expected: str) -> None:
    hit = run(tmp_path / "hit", Split(3, 6, {(1, 2)}))
    assert any("node 2 is left out: no order of the ring" in text for text in hit.summary.warnings)
    assert hit.summary.weights_sha256 == expected


def test_a_ring_is_ordered_so_that_pairs_are_apart_or_loses_as_few_as_it_must() -> None:
    pair = frozenset((1, 2))
    assert kept_apart([0, 1, 2, 3], {pair}) == [0, 1, 3, 2]
    assert kept_apart([0, 1, 2], {pair}) == [0, 1]
    for order in (kept_apart([0, 1, 2, 4, 5], {pair, frozenset((2, 4)), frozenset((4, 5))}),):
        assert sorted(order) == [0, 1, 2, 4, 5]
        assert not {frozenset(each) for each in itertools.pairwise(order)} & {
            pair,
            frozenset((2, 4)),
            frozenset((4, 5)),
        }


class Table:
    """A hub to which one device comes after a while."""

    def __init__(self, device: Device, after: int) -> None:
        self._device, self._after = device, after
        self.devices: dict[str, Device] = {}
        self.door = False

    def poll(self, timeout_s: float = 0.0) -> None:
        self._after -= 1
        if self._after == 0:
            assert self.door, "nobody can come in"
            self.devices[self._device.key] = self._device

    def present(self, heard_within_s: float) -> list[Device]:
        return list(self.devices.values())

    def refresh(self) -> None: ...

    def open_door(self) -> None:
        self.door = True


def test_a_run_pauses_while_memory_is_missing_says_how_much_and_goes_on_when_a_device_joins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joined_devices, "free_memory_bytes", lambda: 100 * 2**20)
    said: list[str] = []
    pool: Any = DevicePool(
        Rings(tmp_path), "home", "127.0.0.1", 1, nodes=3, threads=1, phase=said.append, tell=said.append
    )
    facts = Facts("late", "cpu", 1, PROCESS_BYTES + 300 * 2**20, "2", "1", 1)
    pool._opened = Table(Device("key", "1", facts, b"", 0.0), after=5)
    with pytest.raises(DoesNotFit) as short:
        pool._gather_spares(350 * 2**20)
    assert pool.await_another(str(short.value), lambda: False)
    pool._gather_spares(350 * 2**20)
    assert [device.facts.name for device in pool._devices.values()] == ["late"]
    assert len(said) == 1
    assert said[0].startswith("paused: the remaining devices are 250.0 MiB of memory short")


def test_a_device_lost_by_its_silence_gets_no_place_again_until_it_speaks(tmp_path: Path) -> None:
    """It did where --notice is less than three seconds, and the ring waited half a minute for it to start."""
    rings = Rings(tmp_path)
    rings.open("home", create=True)
    pool: Any = DevicePool(
        rings, "home", "127.0.0.1", free_port(), nodes=2, threads=1, phase=len, tell=len, notice_s=1.0
    )
    pool._opened = hub = Hub("home", rings, "127.0.0.1", free_port())
    pool._transport = object()  # nobody is to be linked
    try:
        key = identity(tmp_path / "device").public
        rings.admit("home", rings.new_secret("home", 1), key, "alpha")
        hub.refresh()
        device = Device(key, "1", device_facts("alpha"), b"", time.monotonic() - 1.5)
        hub.devices[key] = pool._devices[1] = device
        (lost,) = pool._lost(7)
        assert "alpha) has been silent for" in str(lost)
        assert (pool.replace_lost("run", 2, False, 0), pool.nodes, pool.changed()) == (set(), 1, None)
        device.last_heard = time.monotonic()
        assert pool.changed() == "alpha joined"
    finally:
        hub.close()


def test_a_device_that_falls_silent_while_its_process_starts_is_lost_as_soon_as_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a minute of silence was let pass there: the ring waited so long for one that went with another, just taken in."""
    monkeypatch.setattr(start_on_devices, "START_LIMIT_S", 0.5)
    rings = Rings(tmp_path)
    rings.open("home", create=True)
    hub = Hub("home", rings, "127.0.0.1", free_port())
    device = Device("key", "1", device_facts("alpha"), b"", time.monotonic() - 3.5)
    links: Any = SimpleNamespace(address=NOWHERE)
    try:
        with pytest.raises(NodeLost, match=r"alpha\) fell silent before its compute process had started"):
            list(start_on({1: device}, hub, links, "run", 2, threads=1, notice_s=1.0))
    finally:
        hub.close()


def test_the_door_opens_when_a_device_is_gone_and_a_taken_port_does_not_end_the_run(tmp_path: Path) -> None:
    """A parameter server continues without a lost worker: nothing is rebuilt, and its device may come back."""
    port, said = free_port(), list[str]()
    rings = Rings(tmp_path)
    rings.open("home", create=True)
    pool: Any = DevicePool(rings, "home", "127.0.0.1", port, nodes=2, threads=1, phase=said.append, tell=said.append)
    pool._opened = hub = Hub("home", rings, "127.0.0.1", port)
    try:
        hub.close_door()
        with socket.create_server(("127.0.0.1", port)):
            pool.check(1)
            pool.check(2)
            assert pool._hub._door is None
        assert len(said) == 1
        assert said[0].startswith(f"nobody can join yet: cannot listen on port {port}: Address already in use")
        pool._door_not_before = 0.0  # a while later
        pool.check(3)
        keys, facts = identity(tmp_path / "device"), device_facts("back")
        token = Token("home", f"127.0.0.1:{port}", rings.open("home").public, rings.new_secret("home", 1))
        joining = threading.Thread(target=join, args=(token, keys, facts))
        joining.start()
        while joining.is_alive():
            hub.poll(0.05)
        assert [each.name for each in rings.open("home").nodes] == ["back"]
    finally:
        hub.close()
