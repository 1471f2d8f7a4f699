"""Ranks that torchrun, Slurm or Kubernetes has started: rank 0 is the master, every other rank is a node.

Who is where comes from the environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), as for every program that uses
torch.distributed. Ranks meet in torch's own store: each says what it is, the master says what the ring is called, or why
there will be none. A rank that dies is not replaced here: torchrun ends the others and, with --max-restarts, starts all of
them again; the run then goes on from its newest whole checkpoint.

Nothing is encrypted and nobody is admitted or refused: this is for machines and networks you trust.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Sequence, Set
from datetime import timedelta

import msgspec
import torch
from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from ringtmp import __version__
from ringtmp.errors import NodeLost, UsageError
from ringtmp.launch import gpus_of_ranks, planned_devices
from ringtmp.launch.device_facts import usable_cores
from ringtmp.launch.rank_environment import Rank
from ringtmp.launch.worker_loop import work
from ringtmp.plan.devices import Device
from ringtmp.plan.route import MASTER
from ringtmp.runtime import compute_device
from ringtmp.runtime.mailbox import Endpoint
from ringtmp.runtime.snapshot_store import SnapshotStore
from ringtmp.system.container_limits import group_limits
from ringtmp.system.resources import free_memory_bytes, machine_free_bytes, set_threads
from ringtmp.transport.torch_distributed import TorchTransport
from ringtmp.wire.address import NOWHERE, Address

MEET_LIMIT_S = 120.0
#: Between two messages of a peer; silence is no failure, and a dead process closes its connections.
SILENCE = timedelta(days=30)
LOOK_EVERY_S = 0.2


#: Orders come first; where ranks compute on GPUs, others follow when all have said on which.
_FIRST, _AGREED = "orders", "agreed"


class Facts(msgspec.Struct, frozen=True):
    """What a rank says of itself."""

    torch: str
    ringtmp: str
    threads: int
    memory_bytes: int
    host: str


class Orders(msgspec.Struct, frozen=True):
    """What rank 0 tells the others. With a `refusal` there is no ring."""

    ring: str = ""
    generation: int = 0
    threads: int = 0
    device: str = "cpu"
    refusal: str = ""


class Meeting:
    """The store where all ranks of one start meet."""

    def __init__(self, rank: Rank, limit_s: float = MEET_LIMIT_S) -> None:
        self._rank = rank
        self._limit_s = limit_s
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        hosts = rank.leads and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # else torchrun does
        try:
            store = TCPStore(host, port, is_master=hosts, timeout=timedelta(seconds=limit_s), wait_for_workers=False)
        except (dist.DistError, ValueError, RuntimeError) as error:
            raise UsageError(
                f"rank {rank.number} of {rank.world} did not reach rank 0 at {host}:{port} within {limit_s:.0f} s: {error}"
            ) from None
        self._store = PrefixStore(f"ringtmp {rank.restarts}", store)
        self._store.set(f"rank {rank.number}", msgspec.json.encode(_facts()).decode())

    def everyone(self) -> list[Facts]:
        """What all ranks are. Refuses, and tells the others, when one does not come or is of another version."""
        names = [f"rank {number}" for number in range(self._rank.world)]
        limit = time.monotonic() + self._limit_s
        while missing := [name for name in names if not self._store.check([name])]:
            if time.monotonic() > limit:
                self.refuse(f"{', '.join(missing)} of {self._rank.world} did not come within {self._limit_s:.0f} s")
            time.sleep(LOOK_EVERY_S)
        found = [msgspec.json.decode(self._store.get(name), type=Facts) for name in names]
        for number, each in enumerate(found):
            mine, its = (found[0].torch, found[0].ringtmp), (each.torch, each.ringtmp)
            if its != mine:
                self.refuse(
                    f"rank {number} ({each.host}) has torch {its[0]} and ringtmp {its[1]}, rank 0 has torch {mine[0]} and "
                    f"ringtmp {mine[1]}: install the same on all machines"
                )
        return found

    def refuse(self, why: str) -> None:
        self.tell(Orders(refusal=why), _FIRST)
        self.tell(Orders(refusal=why), _AGREED)
        raise UsageError(why)

    def tell(self, orders: Orders, which: str) -> None:
        self._store.set(which, msgspec.json.encode(orders).decode())

    def told(self, which: str, gone: Callable[[], bool]) -> Orders | None:
        """What rank 0 says. None: whoever started this rank is gone. UsageError: there will be no ring."""
        while not self._store.check([which]):
            if gone():
                return None
            time.sleep(LOOK_EVERY_S)
        orders = msgspec.json.decode(self._store.get(which), type=Orders)
        if orders.refusal:
            raise UsageError(orders.refusal)
        return orders

    def say_gpu(self) -> None:
        """Which one this rank computes on, once it knows."""
        self._store.set(f"gpu {self._rank.number}", compute_device.maker_name())

    def gpus(self) -> list[str]:
        """Of all ranks, which have been told by now where they compute."""
        names = [f"gpu {number}" for number in range(self._rank.world)]
        try:
            self._store.wait(names, timedelta(seconds=self._limit_s))
        except (dist.DistError, RuntimeError):
            missing = [name.removeprefix("gpu ") for name in names if not self._store.check([name])]
            raise UsageError(
                f"rank {', '.join(missing)} did not say within {self._limit_s:.0f} s which GPU it computes on: see what it "
                "printed"
            ) from None
        return [self._store.get(name).decode() for name in names]

    def transport(self) -> TorchTransport:
        group = dist.ProcessGroupGloo(PrefixStore("links", self._store), self._rank.number, self._rank.world, SILENCE)
        return TorchTransport(group)


def _facts() -> Facts:
    return Facts(str(torch.__version__), __version__, torch.get_num_threads(), free_memory_bytes(), os.uname().nodename)


class RankPool:
    """All ranks but this one, which is rank 0."""

    outlives_master = False
    #: torch.distributed can make sums over these nodes.
    ranks_of_torch = True

    def __init__(
        self,
        rank: Rank,
        limit_s: float = MEET_LIMIT_S,
        device: str = "cpu",
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`device`: where every rank computes. `tell`: what a person should know of the ranks."""
        self._tell = tell
        self._backend = os.environ.get(gpus_of_ranks.ASKED, gpus_of_ranks.GLOO)
        gpus_of_ranks.check_backend(self._backend)
        self._rank = rank
        self._device = device
        self._limit_s = limit_s
        self.nodes = rank.world
        self.threads = 1
        self.same_machine = rank.here == rank.world
        self.found_lost: list[NodeLost] = []
        self._facts: list[Facts] = []
        self._transport: TorchTransport | None = None
        self._dropped: set[int] = set()

    def start(self, ring: str, generation: int) -> Endpoint:
        meeting = Meeting(self._rank, self._limit_s)
        self._facts = meeting.everyone()
        self.threads = min(each.threads for each in self._facts)
        orders = Orders(ring, generation, self.threads, self._device)
        if self._device == "cpu":
            self._agree_on(meeting, [""] * self.nodes)
        meeting.tell(orders, _FIRST)
        if self._device != "cpu":
            meeting.say_gpu()
            self._agree_on(meeting, meeting.gpus())
            meeting.tell(orders, _AGREED)
        self._transport = meeting.transport()
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


def serve(rank: Rank, limit_s: float = MEET_LIMIT_S) -> int:
    """The life of a rank that is not the master. Its exit code."""
    # Whoever interrupts torchrun interrupts all ranks; the master saves, for which it needs the others, and stops them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parent = os.getppid()
    meeting = Meeting(rank, limit_s)
    orders = meeting.told(_FIRST, lambda: os.getppid() != parent)
    if orders is None:
        return 1
    set_threads(orders.threads)
    compute_device.use(compute_device.find(orders.device, int(os.environ.get("LOCAL_RANK", rank.number))))
    if orders.device != "cpu":
        meeting.say_gpu()
        if meeting.told(_AGREED, lambda: os.getppid() != parent) is None:
            return 1
    transport = meeting.transport()
    endpoint = Endpoint(transport, orders.ring, orders.generation, snapshots=SnapshotStore())
    return work(endpoint, NOWHERE, lambda: MASTER in transport.gone() or os.getppid() != parent)
