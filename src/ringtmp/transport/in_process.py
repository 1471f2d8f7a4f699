"""Nodes in one process: queues instead of sockets, every byte copied as a network would."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ringtmp.transport.base import Arrival, Channel, Frame
from ringtmp.wire.address import Address


class Hub:
    """The network that in-memory transports share."""

    def __init__(self) -> None:
        self.queues: dict[int, deque[Arrival]] = {}

    def transport(self, node: int) -> MemoryTransport:
        return MemoryTransport(node, self)


class MemoryTransport:
    def __init__(self, node: int, hub: Hub) -> None:
        self.node = node
        self._hub = hub
        hub.queues[node] = deque()

    def connect(self, peer: int, address: Address) -> None:
        """Everyone on a hub reaches everyone."""

    def hang_up(self, peer: int) -> None:
        """Nothing is kept for anybody."""

    def listen_again(self) -> None:
        """Everyone on a hub is always heard."""

    def send(self, peer: int, channel: Channel, frames: Sequence[Frame]) -> None:
        queue = self._hub.queues.get(peer)
        if queue is not None:
            queue.append(Arrival(self.node, channel, [bytes(frame) for frame in frames]))

    def receive(self) -> list[Arrival]:
        queue = self._hub.queues[self.node]
        taken = list(queue)
        queue.clear()
        return taken

    def wait(self, timeout_s: float) -> bool:
        return bool(self._hub.queues[self.node])

    def close(self) -> None:
        self._hub.queues.pop(self.node, None)
