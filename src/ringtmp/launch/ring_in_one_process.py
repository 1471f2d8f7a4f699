"""A whole ring in this process, on the in-memory transport: the same nodes, driven in turn by a seed.

Used by `--nodes 1`, where there is nobody to talk to, and by everything that wants many rings quickly.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Set

from ringtmp.errors import NodeLost
from ringtmp.launch.planned_devices import as_this_process, on_accelerator
from ringtmp.plan.devices import Device, quota_of
from ringtmp.runtime.mailbox import Endpoint
from ringtmp.runtime.snapshot_store import SnapshotStore
from ringtmp.runtime.worker import Worker
from ringtmp.strategies.registry import member
from ringtmp.strategies.ring.device_trials import Answers
from ringtmp.system.container_limits import group_limits
from ringtmp.transport.base import Transport
from ringtmp.transport.in_process import Hub
from ringtmp.wire.address import NOWHERE, Address

Wrapper = Callable[[Transport], Transport]

#: How often, and for how many rounds at most, a worker is left out; it wakes when the others have long had nothing to do.
NAP_CHANCE = 0.01
LONGEST_NAP = 40
QUIET_ROUNDS = 10


class InMemoryPool:
    same_machine = True
    outlives_master = False
    ranks_of_torch = False

    def __init__(
        self,
        nodes: int,
        seed: int = 0,
        wrap: Wrapper = lambda transport: transport,
        threads: int = 1,
        clock: Callable[[], float] = time.monotonic,
        memory_bytes: int | None = None,
    ) -> None:
        """Every node may take `memory_bytes`; what is free here, unless told otherwise."""
        self._clock = clock
        self._memory_bytes = memory_bytes
        self.nodes = nodes
        self.threads = threads
        self._hub = Hub()
        self._random = random.Random(seed)
        self._wrap = wrap
        self._workers: list[Worker] = []
        self._leaving: int | None = None
        self._dead: set[int] = set()
        self.found_lost: list[NodeLost] = []
        self._naps: dict[int, int] = {}  # rounds a worker still sleeps
        self._quiet = 0  # rounds in which no worker had anything to do

    def start(self, ring: str, generation: int) -> Endpoint:
        """The master's endpoint; the workers are made."""
        endpoint = self._endpoint(0, ring, generation)
        for node in range(1, self.nodes):
            self._make(node, ring, generation)
        return endpoint

    def _make(self, node: int, ring: str, generation: int) -> None:
        self._workers.append(Worker(self._endpoint(node, ring, generation), NOWHERE, member, Answers()))

    def _endpoint(self, node: int, ring: str, generation: int) -> Endpoint:
        given = self._memory_bytes
        snapshots = SnapshotStore() if given is None else SnapshotStore(None, lambda: given)
        return Endpoint(self._wrap(self._hub.transport(node)), ring, generation, self._clock, given, snapshots)

    def all_anew(self) -> bool:
        return True

    def replace_lost(
        self, ring: str, generation: int, compact: bool, need_bytes: int, spared: Set[int] = frozenset()
    ) -> Collection[int]:
        living = {worker.endpoint.node for worker in self._workers}
        self.found_lost = [NodeLost(f"node {node} was killed", node) for node in sorted(self._dead)]
        for node in set(range(1, self.nodes)) - living:
            self._make(node, ring, generation)
        self._dead.clear()
        return living

    def await_another(self, why: str, leaving: Callable[[], bool]) -> bool:
        return False  # all there will ever be are on this machine

    def addresses(self) -> dict[int, Address]:
        return dict.fromkeys(range(self.nodes), NOWHERE)

    def devices(self) -> tuple[Device, ...]:
        if self.nodes == 1:
            limits = group_limits()
            quota = quota_of(limits.cores, limits.period_s, 1) if self.threads == 1 else None
            return on_accelerator([as_this_process(Device("master", quota=quota))])
        return tuple(Device("master" if node == 0 else f"node {node}") for node in range(self.nodes))

    def alone(self) -> Device | None:
        return self.devices()[0]

    def send_home(self) -> None:
        self.stop()
        self.nodes = 1

    def pids(self) -> dict[int, int]:
        return {}

    def advance(self) -> bool:
        order = list(self._workers)
        self._random.shuffle(order)
        # Each works a random number of turns, so that seeds give different interleavings; now and then one gets none
        # for long, as a process that lost its processor.
        awake = [worker for worker in order if self._awake(worker)]
        worked = [worker.turn() for worker in awake for _ in range(self._random.randint(1, 3))]
        self._quiet = 0 if any(worked) else self._quiet + 1
        if self._quiet > QUIET_ROUNDS:
            self._naps.clear()
        return any(worked)

    def _awake(self, worker: Worker) -> bool:
        left = self._naps.get(worker.endpoint.node, 0)
        if left:
            left -= 1
        elif self._random.random() < NAP_CHANCE:
            left = self._random.randint(1, LONGEST_NAP)
        self._naps[worker.endpoint.node] = left
        return not left

    def changed(self) -> str | None:
        return None if self._leaving is None else f"node {self._leaving} was released"

    def release(self, node: int) -> None:
        """Ask one to leave at the next step boundary."""
        self._leaving = node

    def regroup(self, ring: str, generation: int) -> Endpoint:
        self.stop()
        self.nodes -= self._leaving is not None
        self._leaving = None
        return self.start(ring, generation)

    def kill(self, node: int) -> None:
        """It stops in the middle of whatever it does, and says nothing."""
        self._workers = [worker for worker in self._workers if worker.endpoint.node != node]
        self._dead.add(node)

    def check(self, step: int) -> None:
        for node in self._dead:
            raise NodeLost(f"node {node} was killed in step {step}", node)

    def drop(self, node: int) -> None:
        self.kill(node)
        self._dead.discard(node)

    def expel(self, node: int, sure: bool) -> None:
        self.drop(node)

    def stop(self) -> None:
        for worker in self._workers:
            worker.endpoint.close()
        self._workers.clear()
