"""A ring of processes on this machine, joined by Unix sockets in a private folder.

Each child is a session of its own (Ctrl-C reaches the master alone) and holds a pipe from its parent: when the parent
is gone, however it went, the pipe closes and the child ends.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from dataclasses import replace
from pathlib import Path

import psutil

from ringtmp.errors import NodeLost, UsageError
from ringtmp.launch import planned_devices
from ringtmp.launch.compute_process import Orders
from ringtmp.launch.device_facts import usable_cores
from ringtmp.launch.private_folder import PrivateFolder, remove_leftovers
from ringtmp.launch.spare_process import Spare
from ringtmp.launch.start_process import by_whom, end, is_stopped, last_words, let_go, signal_name, spawn
from ringtmp.plan.devices import Device
from ringtmp.runtime.mailbox import Endpoint
from ringtmp.runtime.snapshot_store import SnapshotStore
from ringtmp.system.container_limits import group_limits
from ringtmp.system.resources import machine_free_bytes, own_memory_bytes
from ringtmp.transport.zeromq import ZeroMQTransport, ipc_address
from ringtmp.wire.address import Address

STEPS_BEFORE_SPARE = 3


class LocalPool:
    same_machine = True
    outlives_master = False
    ranks_of_torch = False

    def __init__(self, nodes: int, threads: int, logs: Path, notice_s: float = 3.0, spare: bool = False, keeps: bool = True,
        device: str = "cpu"
    ) -> None:  # fmt: skip
        """`spare`: have a process ready for the place of one that dies; `keeps`: snapshots in the run's own folder, which has
        one pool that trains and any number that look; `device`: where they compute."""
        self._device = device
        self.nodes = nodes
        self._numbers = range(1, nodes)
        self._absent = set[int]()  # the ring goes on without them until a fresh process has loaded what it needs
        self.threads = threads
        self._logs = logs
        self._keeps = keeps
        self._folder: PrivateFolder | None = None
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._transport: ZeroMQTransport | None = None
        self._checked = time.monotonic()
        self._notice_s = notice_s
        self._stopped: set[int] = set()
        self._stopped_at: dict[int, float] = {}
        self.found_lost: list[NodeLost] = []
        self._spare = Spare(threads) if spare else None
        self._at = (0, 0)  # the step, and how many there were since the ring was laid out

    def start(self, ring: str, generation: int) -> Endpoint:
        """Start the other nodes; returns the master's endpoint. They need a second or two to say hello."""
        remove_leftovers()
        self._folder = PrivateFolder()
        addresses = self.addresses()
        self._transport = ZeroMQTransport(0, addresses[0].endpoints)
        self.nodes, self._absent = 1 + len(self._numbers), set()
        for node in self._numbers:
            self._spawn(node, ring, generation)
        return Endpoint(self._transport, ring, generation, snapshots=SnapshotStore(self._snapshots(0)))

    @property
    def _private(self) -> PrivateFolder:
        assert self._folder is not None, "not started"
        return self._folder

    def addresses(self) -> dict[int, Address]:
        return {node: ipc_address(str(self._private.path), node) for node in (0, *self._present)}

    @property
    def _present(self) -> list[int]:
        return [node for node in self._numbers if node not in self._absent]

    def devices(self) -> tuple[Device, ...]:
        master, *others = planned_devices.local_processes(
            self.nodes, self.threads, usable_cores(), machine_free_bytes(), group_limits()
        )
        limit = own_memory_bytes()  # of this process, which those it starts inherit
        # What the processes have taken already is theirs, and not free any more.
        taken = {node: _rss_bytes(self._children.get(node)) for node in self._present}
        each = (
            replace(other, name=f"node {node}", memory_bytes=min(other.memory_bytes + has, limit))
            for other, (node, has) in zip(others, taken.items(), strict=True)
        )
        return planned_devices.on_accelerator((planned_devices.as_this_process(master), *each))

    def alone(self) -> Device:
        master, *_ = planned_devices.local_processes(
            1, self.threads, usable_cores(), machine_free_bytes(), group_limits()
        )
        return planned_devices.on_accelerator([planned_devices.as_this_process(master)])[0]

    def send_home(self) -> None:
        """Their processes end; for one node nobody need be ready to take a place."""
        for child in self._children.values():
            let_go(child)
        for child in self._children.values():
            end(child)
        self._children.clear()
        self.nodes, self._numbers, self._absent = 1, range(0), set()
        if self._spare is not None:
            self._spare.end()
            self._spare = None

    def pids(self) -> dict[int, int]:
        return {node: child.pid for node, child in self._children.items()}

    def advance(self) -> bool:
        return False

    def release(self, node: int) -> None:
        raise UsageError("it is a process on this machine, not a device that joined; only devices are released")

    def changed(self) -> str | None:
        """A run that went on without a node gets a fresh process for it at the next step boundary."""
        if self._absent and self._spare is not None and self._spare.loaded:
            return f"a fresh process for node {min(self._absent)}"
        missing = [f"node {node}" for node in self._present if node not in self._children]
        return f"a fresh process for {' and '.join(missing)}" if missing else None

    def regroup(self, ring: str, generation: int) -> Endpoint:
        self.stop()
        return self.start(ring, generation)

    def all_anew(self) -> bool:
        return False

    def replace_lost(
        self, ring: str, generation: int, compact: bool, need_bytes: int, spared: Set[int] = frozenset()
    ) -> Collection[int]:
        """A fresh process takes the place of each that has died, at its number. For one of the `spared` nobody waits until it
        has loaded torch."""
        self._private.remake()  # a cleaner of temporary files may have come by; nodes make their sockets again themselves
        self.found_lost = list(self._lost(self._at[0]))
        living = set(self._children) - {each.node for each in self.found_lost} - self._stopped
        gone = [node for node in self._present if node not in living]
        for node in gone:
            if node in self._children:
                self.drop(node)
        filled = self._places_to_fill(gone, spared)
        self._absent = (self._absent | set(gone)) - set(filled)
        self.nodes = 1 + len(self._present)
        for node in filled:
            self._spawn(node, ring, generation)
        if self._absent and self._spare is not None:
            self._spare.hurry()
        self._stopped.clear()
        self._stopped_at.clear()
        self._at = (self._at[0], 0)
        return living

    def _places_to_fill(self, gone: Sequence[int], spared: Set[int]) -> list[int]:
        """All, if somebody is lost whom the ring needs; or else those for whom a process is ready: one."""
        places = sorted({*gone, *self._absent})
        if self._spare is None or len(gone) > 1 or not spared >= set(gone):
            return places
        return places[:1] if self._spare.loaded else []

    def await_another(self, why: str, leaving: Callable[[], bool]) -> bool:
        return False  # all there will ever be are on this machine

    def _spawn(self, node: int, ring: str, generation: int) -> None:
        addresses = self.addresses()
        shutil.rmtree(self._snapshots(node), ignore_errors=True)  # of the one before
        orders = Orders(
            ring, generation, node, addresses[node].endpoints, addresses[0], self.threads,
            snapshots=str(self._snapshots(node)), device=self._device,
        )  # fmt: skip
        ready = self._spare.take(orders, self._log(node)) if self._spare is not None else None
        self._children[node] = ready or spawn(orders, self._log(node))

    def check(self, step: int) -> None:
        self._mind_the_spare(step)
        for loss in self._lost(step):
            raise loss

    def _lost(self, step: int) -> Iterator[NodeLost]:
        now = time.monotonic()
        since, self._checked = now - self._checked, now
        for node, child in self._children.items():
            who = f"node {node} (process {child.pid})"
            code = child.poll()
            if code is not None:
                words = last_words(self._log(node))
                log = f"its log is {self._log(node)}" + (f" (last line: {words})" if words else "")
                yield NodeLost(f"{who} {_how_it_died(code, step)}; {log}", node, since)
            elif (silent := self._stopped_s(node, child, now)) > self._notice_s:
                self._stopped.add(node)
                yield NodeLost(f"{who} has been stopped for {silent:.1f} s in step {step}", node, silent)

    def _mind_the_spare(self, step: int) -> None:
        """Only once steps are done is it known how much memory the run leaves."""
        before, steps = self._at
        if step != before:
            self._at = (step, steps + 1)
        if self._spare is not None and steps >= STEPS_BEFORE_SPARE:
            self._spare.mind()

    def _stopped_s(self, node: int, child: subprocess.Popen[bytes], now: float) -> float:
        """For how long. Longer than the limit is lost. Slow is not: a slow process is not stopped."""
        if is_stopped(child.pid):
            return now - self._stopped_at.setdefault(node, now)
        self._stopped_at.pop(node, None)
        return 0.0

    def drop(self, node: int) -> None:
        child = self._children.pop(node)
        child.kill()
        end(child)

    def expel(self, node: int, sure: bool) -> None:
        """A process of our own: a fresh one will do."""
        if node in self._children:
            self.drop(node)

    def _snapshots(self, node: int) -> Path:
        return (self._logs.parent if self._keeps else self._private.path) / "snapshots" / str(node)

    def _log(self, node: int) -> Path:
        return self._logs / f"node-{node}.log"

    def stop(self) -> None:
        """End every child and remove the sockets. Safe to call twice."""
        if self._spare is not None:
            self._spare.end()
        for child in self._children.values():
            let_go(child)
        for child in self._children.values():
            end(child)
        self._children.clear()
        if self._transport is not None:
            self._transport.close()
            self._transport = None
        if self._folder is not None:
            shutil.rmtree(self._snapshots(0).parent, ignore_errors=True)
            self._folder.remove()
            self._folder = None


def _rss_bytes(child: subprocess.Popen[bytes] | None) -> int:
    try:
        return int(psutil.Process(child.pid).memory_info().rss) if child is not None else 0
    except psutil.Error:
        return 0


def _how_it_died(code: int, step: int) -> str:
    if code >= 0:
        return f"ended with code {code} in step {step}"
    return f"was killed by {signal_name(-code)} in step {step}{by_whom(-code)}"
