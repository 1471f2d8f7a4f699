"""The nodes of a run that are all on this machine: this process alone, or others started beside it."""

from __future__ import annotations

from pathlib import Path

from ringtmp.launch.node_pool import NodePool
from ringtmp.launch.ring_in_one_process import InMemoryPool


def processes_here(
    nodes: int,
    threads: int,
    logs: Path,
    *,
    notice_s: float = 3.0,
    spare: bool = False,
    keeps: bool = True,
    device: str = "cpu",
) -> NodePool:
    """As `LocalPool` takes them; ZeroMQ is loaded only where there is somebody to talk to."""
    if nodes == 1:
        return InMemoryPool(1, threads=threads)
    from ringtmp.launch.ring_of_processes import LocalPool

    return LocalPool(nodes, threads, logs, notice_s, spare=spare, keeps=keeps, device=device)
