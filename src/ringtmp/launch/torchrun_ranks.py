"""Ranks that torchrun, Slurm or Kubernetes has started: rank 0 is the master, every other rank is a node.

Who is where comes from the environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), as for every program that uses
torch.distributed; they meet in its store (`meeting_of_ranks`). A rank that dies is not replaced here: torchrun ends the others
and, with --max-restarts, starts all of them again; the run then goes on from its newest whole checkpoint.

Nothing is encrypted and nobody is admitted or refused: this is for machines and networks you trust.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Collection, Sequence, Set

from ringtmp.config import RunConfig
from ringtmp.errors import NodeLost, UsageError
from ringtmp.launch import gpus_of_ranks, planned_devices, threads_of_ranks
from ringtmp.launch.device_facts import usable_cores
from ringtmp.launch.meeting_of_ranks import AGREED, FIRST, Facts, Meeting, Orders
from ringtmp.launch.rank_environment import Rank
from ringtmp.launch.worker_loop import work
from ringtmp.plan.devices import Device
from ringtmp.plan.route import MASTER
from ringtmp.runtime import compute_device
from ringtmp.runtime.mailbox import Endpoint
from ringtmp.runtime.snapshot_store import SnapshotStore
from ringtmp.strategies import registry
from ringtmp.strategies.base import OfRanks
from ringtmp.system.container_limits import group_limits
from ringtmp.system.resources import machine_free_bytes, set_threads
from ringtmp.transport.torch_distributed import TorchTransport
from ringtmp.wire.address import NOWHERE, Address


class RankPool:
    """All ranks but this one, which is rank 0."""

    outlives_master = False
    #: torch.distributed can make sums over these nodes.
    ranks_of_torch = True

    def __init__(
        self, meeting: Meeting, device: str = "cpu", tell: Callable[[str], None] = lambda text: None,
        threads: int | None = None, mesh: bool = False,
    ) -> None:  # fmt: skip
        """`device`: where every rank computes. `tell`: what a person should know of the ranks. `threads`: of every rank; None:
        as many as each has. `mesh`: they need torch's own default group, too."""
        self._tell = tell
        self._backend = os.environ.get(gpus_of_ranks.ASKED, gpus_of_ranks.GLOO)
        gpus_of_ranks.check_backend(self._backend)
        self._meeting = meeting
        self._device = device
        self.nodes = meeting.rank.world
        self._mesh = mesh
        self._given_threads = threads
        self.threads = threads or 1
        self.same_machine = meeting.rank.here == meeting.rank.world
        self.found_lost: list[NodeLost] = []
        self._facts: list[Facts] = []
        self._transport: TorchTransport | None = None
        self._dropped: set[int] = set()

    def start(self, ring: str, generation: int) -> Endpoint:
        meeting = self._meeting
        self._facts = meeting.everyone()
        self.threads = self._given_threads or threads_of_ranks.threads_for(self._facts)
        if self._given_threads is None and (text := threads_of_ranks.told(self._facts, self.threads)):
            self._tell(text)
        orders = Orders(ring, generation, self.threads, self._device, mesh=self._mesh)
        if self._device == "cpu":
            self._agree_on(meeting, [""] * self.nodes)
        meeting.tell(orders, FIRST)
        if self._device != "cpu":
            meeting.say_gpu()
            self._agree_on(meeting, meeting.gpus())
            meeting.tell(orders, AGREED)
        self._transport = meeting.transport(self._mesh)
        for node in range(1, self.nodes):
            self._transport.connect(node, NOWHERE)  # to hear its hello
        return Endpoint(self._transport, ring, generation, snapshots=SnapshotStore())

    def _agree_on(self, meeting: Meeting, gpus: Sequence[str]) -> None:
        """What ranks with these GPUs talk over."""
        try:
            gpus_of_ranks.refuse(self._backend, gpus)
        except UsageError as why:
            meeting.refuse(str(why))
        if text := gpus_of_ranks.told(gpus):
            self._tell(text)

    def addresses(self) -> dict[int, Address]:
        return dict.fromkeys(range(self.nodes), NOWHERE)

    def devices(self) -> tuple[Device, ...]:
        if self.same_machine:
            master, *others = planned_devices.local_processes(
                self.nodes, self.threads, usable_cores(), machine_free_bytes(), group_limits()
            )
            return planned_devices.on_accelerator((planned_devices.as_this_process(master), *others))
        master, *others = (
            Device("master" if node == MASTER else f"rank {node} ({each.host})", memory_bytes=each.memory_bytes)
            for node, each in enumerate(self._facts)
        )
        return planned_devices.as_this_process(master), *others

    def alone(self) -> None:
        return None  # ranks that torchrun started stay to the end

    def send_home(self) -> None:
        raise AssertionError("nobody is sent home")

    def pids(self) -> dict[int, int]:
        return {}

    def advance(self) -> bool:
        return False

    def check(self, step: int) -> None:
        for node in self._transport.gone() if self._transport is not None else ():
            if node not in self._dropped:
                raise NodeLost(f"rank {node} ({self._facts[node].host}) ended in step {step}", node)

    def drop(self, node: int) -> None:
        self._dropped.add(node)

    def expel(self, node: int, sure: bool) -> None:
        self.drop(node)

    def release(self, node: int) -> None:
        raise UsageError("it is a rank that torchrun started, not a device that joined; only devices are released")

    def changed(self) -> str | None:
        return None

    def all_anew(self) -> bool:
        return False

    def replace_lost(
        self, ring: str, generation: int, compact: bool, need_bytes: int, spared: Set[int] = frozenset()
    ) -> Collection[int]:
        lost = set(self._transport.gone() if self._transport is not None else ()) | self._dropped
        if lost:
            ranks = ", ".join(f"rank {node} ({self._facts[node].host})" for node in sorted(lost))
            raise NodeLost(
                f"{ranks} ended, and ranks are not replaced one by one: torchrun --max-restarts N starts all of them again, "
                "and the run goes on from its newest checkpoint"
            )
        return range(1, self.nodes)

    def await_another(self, why: str, leaving: Callable[[], bool]) -> bool:
        return False

    def regroup(self, ring: str, generation: int) -> Endpoint:
        raise AssertionError("ranks are never all started anew by the run itself")

    def stop(self) -> None:
        if self._transport is not None:
            self._transport.close()
            self._transport = None


def ranks_for(meeting: Meeting, config: RunConfig, tell: Callable[[str], None]) -> RankPool:
    """The ranks of a run with these settings."""
    config = registry.parse(config.ring.strategy).applied_to(config)
    strategy, settings = registry.of(config.ring)
    return RankPool(
        meeting, device=config.ring.device, tell=tell, threads=config.training.threads,
        mesh=strategy.needs_ranks(settings) is OfRanks.MESH,
    )  # fmt: skip


def leads(rank: Rank) -> Meeting:
    """Where rank 0 waits for the others. Any other rank serves until it may go, and exits here."""
    if not rank.leads:
        sys.exit(serve(rank))
    return Meeting(rank)


def serve(rank: Rank) -> int:
    """The life of a rank that is not the master. Its exit code."""
    # Whoever interrupts torchrun interrupts all ranks; the master saves, for which it needs the others, and stops them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parent = os.getppid()
    meeting = Meeting(rank)
    orders = meeting.told(FIRST, lambda: os.getppid() != parent)
    if orders is None:
        return 1
    set_threads(orders.threads)
    compute_device.use(compute_device.find(orders.device, int(os.environ.get("LOCAL_RANK", rank.number))))
    if orders.device != "cpu":
        meeting.say_gpu()
        if meeting.told(AGREED, lambda: os.getppid() != parent) is None:
            return 1
    transport = meeting.transport(orders.mesh)
    endpoint = Endpoint(transport, orders.ring, orders.generation, snapshots=SnapshotStore())
    return work(endpoint, NOWHERE, lambda: MASTER in transport.gone() or os.getppid() != parent)
