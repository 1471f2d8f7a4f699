"""What a run asks of the other nodes, wherever they live: start, stop, and be told when they change."""

from __future__ import annotations

from collections.abc import Callable, Collection, Set
from typing import Protocol

from ringtmp.config import RingPart
from ringtmp.errors import NodeLost, UsageError
from ringtmp.plan.devices import Device
from ringtmp.runtime import base_leader
from ringtmp.runtime.mailbox import Endpoint
from ringtmp.strategies import registry
from ringtmp.wire.address import Address


class NodePool(base_leader.NodePool, Protocol):
    """The other nodes, and how to start and end them. `nodes` and `threads` are settled once it has started."""

    nodes: int
    threads: int
    #: A master that is started again finds what nodes keep: snapshots, its own among them.
    outlives_master: bool
    #: torch.distributed has started the nodes, so it can make sums over all of them.
    ranks_of_torch: bool
    #: Everyone whom the last `replace_lost` found lost, those included that `check` had told of.
    found_lost: list[NodeLost]

    def start(self, ring: str, generation: int) -> Endpoint: ...
    def addresses(self) -> dict[int, Address]: ...
    def pids(self) -> dict[int, int]: ...
    def stop(self) -> None: ...

    def devices(self) -> tuple[Device, ...]:
        """Of every node, the master first, as far as it is known without trying."""
        ...

    def alone(self) -> Device | None:
        """The master's device as it is without the others, where they can be sent home; else None."""
        ...

    def send_home(self) -> None:
        """The master goes on alone; asked only where it can."""
        ...

    def replace_lost(
        self, ring: str, generation: int, compact: bool, need_bytes: int, spared: Set[int] = frozenset()
    ) -> Collection[int]:
        """Put whoever there is into the places of the lost, for the next generation. Returns the nodes that live on as
        they are, still to be told of it; the others know it from their start. `compact`: no holes in the numbers.
        DoesNotFit where all together have less memory than `need_bytes`. `spared`: if one of these is lost, others have all
        of its layers, so that the ring may go on without it until somebody is there."""
        ...

    def await_another(self, why: str, leaving: Callable[[], bool]) -> bool:
        """The run pauses until one more is there. False: nobody comes, or the user is `leaving`."""
        ...

    def changed(self) -> str | None:
        """Why the ring must be rebuilt at the next step boundary; None while it need not."""
        ...

    def release(self, node: int) -> None:
        """Ask one to leave at the next step boundary. UsageError where nobody can."""
        ...

    def all_anew(self) -> bool:
        """Whether every process must be restarted, so that nobody holds an old key."""
        ...

    def regroup(self, ring: str, generation: int) -> Endpoint:
        """Restart all remaining nodes for the next generation. The previous one has been told to stop."""
        ...


def refuse_without_ranks(ring: RingPart, pool: NodePool | None) -> None:
    """Before anything starts: sums that torch.distributed makes need nodes that it has started."""
    strategy, settings = registry.of(ring)
    if strategy.needs_ranks(settings) and (pool is None or not pool.ranks_of_torch):
        given = ", ".join(f"{name}={value}" for name, value in ring.strategy_settings.items())
        raise UsageError(
            f"--strategy {ring.strategy} with {given}: torch.distributed makes the sums, so it must have started the nodes: "
            f"torchrun --nproc-per-node {ring.nodes} -m ringtmp train …; without torchrun leave {given} out"
        )
