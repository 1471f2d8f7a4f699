"""A compute process on every device of a generation, and a link to each."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from ringtmp.errors import NodeLost
from ringtmp.launch.agent_messages import SILENCE_LIMIT_S, Died, Prepare
from ringtmp.launch.authenticate_devices import Device, Hub
from ringtmp.transport.zeromq import ZeroMQTransport

START_LIMIT_S = 60.0


def start_on(
    devices: Mapping[int, Device],
    hub: Hub,
    links: ZeroMQTransport,
    ring: str,
    generation: int,
    *,
    threads: int,
    notice_s: float,
    before: str = "",
) -> Iterator[int]:
    """The number of each node whose process has started, once it is linked. NodeLost: one has not.

    A device that loads torch has little left to speak with, so less silence than by default is no loss here."""
    for node, device in devices.items():
        device.started = device.died = None
        hub.tell(device, Prepare(ring, generation, node, links.address, threads, before, notice_s))
    limit = time.monotonic() + START_LIMIT_S
    waiting = dict(devices)
    while waiting:
        hub.poll(0.05)
        for node, device in list(waiting.items()):
            if device.started is not None and device.started.generation == generation:
                links.connect(node, device.started.address)
                del waiting[node]
                yield node
            else:
                _refuse_lost(hub, node, device, generation, max(notice_s, SILENCE_LIMIT_S))
        if time.monotonic() > limit:
            node, device = next(iter(waiting.items()))
            device.died = Died(hub.run, generation, 0, f"it did not start within {START_LIMIT_S:.0f} s")
            text = f"node {node} ({device.facts.name}) did not start a compute process within {START_LIMIT_S:.0f} s"
            raise NodeLost(text, node, START_LIMIT_S)


def _refuse_lost(hub: Hub, node: int, device: Device, generation: int, notice_s: float) -> None:
    who = f"node {node} ({device.facts.name})"
    if device.broke:
        raise NodeLost(f"{who} broke the protocol: {device.broke}", node)
    if (device.died is not None and device.died.generation == generation) or device.left:
        code = device.died.code if device.died is not None else 0
        said = device.died.last_words if device.died is not None else "it left"
        text = f"{who} could not start its compute process (code {code}): "
        raise NodeLost(text + (said or "it said nothing"), node)
    if hub.silent_s(device) > notice_s:
        raise NodeLost(f"{who} fell silent before its compute process had started", node)
