"""Devices as the planner sees them: from a devices file, or the processes of this machine.

A device of the file is a share of this machine's cores, as the lab makes it: it runs at this machine's speed until the
quota of a period is used up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ringtmp.lab import devices_file
from ringtmp.lab.control_groups import quota as lab_quota
from ringtmp.plan.devices import (
    CURVE_BYTE_CPU_S,
    MESSAGE_CPU_S,
    NETWORK_MESSAGE_CPU_S,
    PLAIN_BYTE_CPU_S,
    Device,
    Link,
    Quota,
    quota_of,
)
from ringtmp.plan.memory_forecast import PROCESS_BYTES
from ringtmp.runtime import compute_device
from ringtmp.system.container_limits import Limits
from ringtmp.system.resources import own_memory_bytes, peak_rss_bytes, rss_bytes

#: Of a full Ethernet frame (1538 bytes with gap and preamble) this is payload; the rest is headers.
PAYLOAD_SHARE = 0.94
#: Unix sockets between processes: 1 MiB in 283 us.
LOCAL_BYTES_PER_S = 3.5e9
LOCAL_LATENCY_S = 60e-6
#: The agent that lends a device, beside the compute process it starts.
AGENT_BYTES = 32 * 2**20


def from_file(devices: Sequence[devices_file.Device], threads: int) -> tuple[Device, ...]:
    """The first is the master, which has no agent."""
    found = []
    for index, each in enumerate(devices):
        wanted = each.wanted_cpu(threads)
        period_us, quota_us = lab_quota(wanted)
        rate = each.link_mbps * 1e6 / 8 * PAYLOAD_SHARE
        # Of `threads` cores it may use `wanted`: that part of the time all threads run.
        bucket = Quota(quota_us / threads * 1e-6, period_us * 1e-6) if wanted < threads else None
        found.append(
            Device(
                each.name,
                quota=bucket,
                cores=threads,
                memory_bytes=each.memory_mb * 2**20,
                extra_bytes=AGENT_BYTES if index else 0.0,
                idle_w=each.idle_w,
                busy_w=each.busy_w,
                link=Link(rate, rate, each.latency_ms / 1000, NETWORK_MESSAGE_CPU_S, CURVE_BYTE_CPU_S),
                busy_share=each.busy_share(threads),
                nj_per_byte=each.nj_per_byte,
            )
        )
    return tuple(found)


def as_this_process(device: Device) -> Device:
    """It may have a limit of its own, and holds data and what built the model."""
    taken = rss_bytes()
    memory = min(device.memory_bytes + taken, own_memory_bytes())
    return replace(device, memory_bytes=memory, extra_bytes=max(0, taken - PROCESS_BYTES))


def on_accelerator(devices: Sequence[Device]) -> tuple[Device, ...]:
    """Nodes of this machine: where they compute on accelerators, they share those, and what this process's has left tells what
    every one has. No quota of the processor slows them down."""
    free = compute_device.free_bytes()
    if free is None:
        return tuple(devices)
    sharing = -(-len(devices) // compute_device.count())
    return tuple(
        replace(
            each, speed=1 / sharing, quota=None, takes_turns=sharing > 1, memory_bytes=free / sharing, extra_bytes=0.0
        )
        for each in devices
    )


def with_master_here(devices: Sequence[Device], counted_bytes: int, described: bool = False) -> tuple[Device, ...]:
    """For a plan on paper: what this process holds by now (data, the model's builder) the master will hold then.
    `counted_bytes`: what it held when the memory beside it was measured; of a described device, whose memory is all there
    is, none."""
    memory = devices[0].memory_bytes + counted_bytes
    extra = max(0.0, float(peak_rss_bytes() - PROCESS_BYTES))
    found = (replace(devices[0], memory_bytes=memory, extra_bytes=extra), *devices[1:])
    return found if described else on_accelerator(found)


def local_processes(
    nodes: int, threads: int, cores: int, free_bytes: int, limits: Limits | None = None
) -> tuple[Device, ...]:
    """`nodes` processes on one machine: cores and memory shared evenly, and what a control group leaves them of both."""
    speed = min(1.0, cores / (nodes * threads))
    link = Link(
        LOCAL_BYTES_PER_S, LOCAL_BYTES_PER_S, LOCAL_LATENCY_S / 2, MESSAGE_CPU_S / speed, PLAIN_BYTE_CPU_S / speed
    )
    # With more than one thread layers are profiled by the clock on the wall, which has the quota in it.
    capped = limits if limits is not None and threads == 1 else Limits()
    quota = quota_of(capped.cores, capped.period_s, min(nodes, cores))
    return tuple(
        Device(
            "master" if node == 0 else f"node {node}", speed, quota, threads,
            memory_bytes=free_bytes / nodes, link=link, takes_turns=nodes * threads > cores,
        )
        for node in range(nodes)
    )  # fmt: skip
