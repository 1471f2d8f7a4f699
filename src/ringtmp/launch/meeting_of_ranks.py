"""Where ranks that torchrun, Slurm or Kubernetes has started meet: torch's own store. Each says what it is, rank 0 says what
the ring is called, or why there will be none.

The store may outlive a start: torchrun keeps it when it starts its ranks again. And the ranks of one start need not agree on
how often that was, because every torchrun counts its own restarts. So rank 0 opens a new meeting whenever it starts, and the
others come to the newest one. Its orders name who was there; whoever reads orders that do not name it came too late for that
meeting, and waits for the next.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from datetime import timedelta
from typing import NoReturn

import msgspec
import torch
from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from ringtmp import __version__
from ringtmp.errors import UsageError
from ringtmp.launch.device_facts import usable_cores
from ringtmp.launch.rank_environment import KeptIn, Rank
from ringtmp.launch.threads_of_ranks import CHOSEN_BY
from ringtmp.runtime import compute_device
from ringtmp.system.resources import free_memory_bytes
from ringtmp.transport.torch_distributed import TorchTransport

MEET_LIMIT_S = 120.0
#: How long rank 0 stays for the others to read why there will be no ring, where the store ends with it.
HEAR_LIMIT_S = 2.0
#: Between two messages of a peer; silence is no failure, and a dead process closes its connections.
SILENCE = timedelta(days=30)
LOOK_EVERY_S = 0.2

#: Orders come first; where ranks compute on GPUs, others follow when all have said on which.
FIRST, AGREED = "orders", "agreed"
#: How many meetings rank 0 has opened in this store.
_OPENED = "opened"
#: Where rank 0 keeps the run, from the moment it has chosen the folder.
_KEPT_IN = "kept in"


class Facts(msgspec.Struct, frozen=True):
    """What a rank says of itself."""

    torch: str
    ringtmp: str
    threads: int
    memory_bytes: int
    host: str
    process: str = ""  # a name that no other process has, before or after
    cores: tuple[int, ...] = ()  # those it may run on
    chosen: bool = False  # somebody said how many threads it should have


class Orders(msgspec.Struct, frozen=True):
    """What rank 0 tells the others. With a `refusal` there is no ring."""

    ring: str = ""
    generation: int = 0
    threads: int = 0
    device: str = "cpu"
    refusal: str = ""
    mesh: bool = False  # torch's own default group is wanted, too
    to: tuple[str, ...] = ()  # the processes that came


def own_facts() -> Facts:
    return Facts(
        str(torch.__version__), __version__, torch.get_num_threads(), free_memory_bytes(), os.uname().nodename,
        cores=tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else tuple(range(usable_cores())),
        chosen=CHOSEN_BY in os.environ,
    )  # fmt: skip


class Meeting:
    def __init__(self, rank: Rank, limit_s: float = MEET_LIMIT_S, facts: Callable[[], Facts] = own_facts) -> None:
        """`rank` is what the environment says; how often ranks were started before, the store knows better."""
        self._limit_s = limit_s
        self._facts = facts
        self._process = secrets.token_hex(8)
        self._came: dict[int, Facts] = {}
        self._hosts = rank.leads and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # else torchrun does
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        try:
            store = TCPStore(
                host, port, is_master=self._hosts, timeout=timedelta(seconds=limit_s), wait_for_workers=False
            )
        except (dist.DistError, ValueError, RuntimeError) as error:
            raise UsageError(
                f"rank {rank.number} of {rank.world} did not reach rank 0 at {host}:{port} within {limit_s:.0f} s: {error}"
            ) from None
        self._meetings = PrefixStore("ringtmp", store)
        self._number = 0
        self._store = self._meetings
        if rank.leads:
            self._enter(self._meetings.add(_OPENED, 1))
            rank = msgspec.structs.replace(rank, restarts=max(rank.restarts, self._number - 1))
        self.rank = rank

    @property
    def outlives_ranks(self) -> bool:
        """Whether ranks that are started after these find the same store."""
        return not self._hosts

    @property
    def kept_in(self) -> KeptIn | None:
        """Where the ranks before kept this run. None: there were none, or they chose no folder, or had another store."""
        if not self._meetings.check([_KEPT_IN]):
            return None
        return msgspec.json.decode(self._meetings.get(_KEPT_IN), type=KeptIn)

    def keep_in(self, kept: KeptIn) -> None:
        """For ranks that are started after these, in the same store."""
        self._meetings.set(_KEPT_IN, msgspec.json.encode(kept).decode())

    def everyone(self) -> list[Facts]:
        """What all ranks are. Refuses, and tells the others, when one does not come or is of another version."""
        self._come()
        limit = time.monotonic() + self._limit_s
        while missing := [number for number in range(self.rank.world) if not self._came_already(number)]:
            if time.monotonic() > limit:
                names = ", ".join(f"rank {number}" for number in missing)
                self.refuse(f"{names} of {self.rank.world} did not come within {self._limit_s:.0f} s")
            time.sleep(LOOK_EVERY_S)
        found = [self._came[number] for number in range(self.rank.world)]
        for number, each in enumerate(found):
            mine, its = (found[0].torch, found[0].ringtmp), (each.torch, each.ringtmp)
            if its != mine:
                self.refuse(
                    f"rank {number} ({each.host}) has torch {its[0]} and ringtmp {its[1]}, rank 0 has torch {mine[0]} and "
                    f"ringtmp {mine[1]}: install the same on all machines"
                )
        return found

    def refuse(self, why: str) -> NoReturn:
        self.tell(Orders(refusal=why), FIRST)
        self.tell(Orders(refusal=why), AGREED)
        heard = [f"heard {number}" for number in self._came if number != self.rank.number]
        limit = time.monotonic() + HEAR_LIMIT_S
        while self._hosts and not self._store.check(heard) and time.monotonic() < limit:
            time.sleep(LOOK_EVERY_S / 4)
        raise UsageError(why)

    def tell(self, orders: Orders, which: str) -> None:
        """Those who came."""
        to = tuple(each.process for each in self._came.values())
        self._store.set(which, msgspec.json.encode(msgspec.structs.replace(orders, to=to)).decode())

    def told(self, which: str, gone: Callable[[], bool]) -> Orders | None:
        """What rank 0 says to this rank. None: whoever started this rank is gone. UsageError: there will be no ring."""
        while not gone():
            try:
                orders = self._heard(which)
            except (dist.DistError, RuntimeError) as error:
                raise UsageError(f"rank {self.rank.number} lost the store where all ranks meet: {error}") from None
            if orders is not None:
                return orders
            time.sleep(LOOK_EVERY_S)
        return None

    def _heard(self, which: str) -> Orders | None:
        """None: nothing yet."""
        newest = self._meetings.add(_OPENED, 0)
        if newest != self._number:
            if which != FIRST:
                raise UsageError(f"rank 0 was started again while rank {self.rank.number} waited for it")
            self._enter(newest)
            self._come()
        if not newest or not self._store.check([which]):
            return None
        orders = msgspec.json.decode(self._store.get(which), type=Orders)
        if self._process not in orders.to:
            return None  # orders to processes that this one follows
        if orders.refusal:
            self._store.set(f"heard {self.rank.number}", "")
            raise UsageError(orders.refusal)
        return orders

    def say_gpu(self) -> None:
        """Which one this rank computes on, once it knows."""
        self._store.set(f"gpu {self.rank.number}", compute_device.maker_name())

    def gpus(self) -> list[str]:
        """Of all ranks, which have been told by now where they compute."""
        names = [f"gpu {number}" for number in range(self.rank.world)]
        try:
            self._store.wait(names, timedelta(seconds=self._limit_s))
        except (dist.DistError, RuntimeError):
            missing = [name.removeprefix("gpu ") for name in names if not self._store.check([name])]
            raise UsageError(
                f"rank {', '.join(missing)} did not say within {self._limit_s:.0f} s which GPU it computes on: see what it "
                "printed"
            ) from None
        return [self._store.get(name).decode() for name in names]

    def transport(self, mesh: bool = False) -> TorchTransport:
        """With a `mesh` every rank waits here for all others."""
        number, world = self.rank.number, self.rank.world
        group = dist.ProcessGroupGloo(PrefixStore("links", self._store), number, world, SILENCE)
        if not mesh:
            return TorchTransport(group)
        from torch.distributed.device_mesh import DeviceMesh

        dist.init_process_group(
            "gloo", store=PrefixStore("mesh", self._store), rank=number, world_size=world, timeout=SILENCE
        )
        return TorchTransport(group, DeviceMesh("cpu", list(range(world))))

    def _enter(self, number: int) -> None:
        self._number = number
        self._store = PrefixStore(f"meeting {number}", self._meetings)

    def _come(self) -> None:
        facts = msgspec.structs.replace(self._facts(), process=self._process)
        self._store.set(f"rank {self.rank.number}", msgspec.json.encode(facts).decode())

    def _came_already(self, number: int) -> bool:
        name = f"rank {number}"
        if number not in self._came and self._store.check([name]):
            self._came[number] = msgspec.json.decode(self._store.get(name), type=Facts)
        return number in self._came
