"""ZeroMQ sockets: every node listens on a ROUTER per channel, the node with the higher number connects a DEALER.

ROUTER/DEALER, not PAIR, which ignores a returning peer. No limit on queues: the window bounds what is in flight, and
a send must never block. What is lost when a connection breaks is sent again by the link above.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import zmq

from ringtmp.errors import UsageError
from ringtmp.transport.base import Arrival, Channel, Frame

#: Below this a copy is cheaper than tracking the buffer.
ZERO_COPY_FROM_BYTES = 32 * 1024
#: The longest path the operating system takes for a Unix socket.
MAX_IPC_PATH = 107
CLOSE_LINGER_MS = 500
RECONNECT_MS = 50
MAX_RECONNECT_MS = 1000


def ipc_address(folder: str, node: int) -> str:
    """The base address of a node: `-c`, `-t`, `-b` are added for the three channels."""
    path = os.path.join(folder, str(node))
    if len(path) + 2 > MAX_IPC_PATH:
        raise UsageError(f"the socket path {path} is longer than {MAX_IPC_PATH} bytes: set TMPDIR to a shorter folder")
    return f"ipc://{path}"


def _on(address: str, channel: Channel) -> str:
    return address + {Channel.CONTROL: "-c", Channel.TENSOR: "-t", Channel.BULK: "-b"}[channel]


class ZeroMQTransport:
    def __init__(self, node: int, address: str, context: zmq.Context[zmq.Socket[bytes]] | None = None) -> None:
        self.node = node
        self._context = context or zmq.Context()
        self._own_context = context is None
        self._poller = zmq.Poller()
        self._routers: dict[Channel, zmq.Socket[bytes]] = {}
        self._dealers: dict[tuple[int, Channel], zmq.Socket[bytes]] = {}
        self._sources: dict[zmq.Socket[bytes], tuple[int | None, Channel]] = {}
        for channel in Channel:
            router = self._socket(zmq.ROUTER)
            # A returning peer takes its name over from its dead connection.
            router.setsockopt(zmq.ROUTER_HANDOVER, 1)
            router.bind(_on(address, channel))
            self._routers[channel] = router
            self._watch(router, None, channel)

    def connect(self, peer: int, address: str) -> None:
        """Only the higher number connects; the lower one listens, so each pair has one connection per channel."""
        if peer > self.node:
            return
        for channel in Channel:
            dealer = self._socket(zmq.DEALER)
            dealer.setsockopt(zmq.ROUTING_ID, b"n%d" % self.node)
            dealer.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
            dealer.setsockopt(zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_MS)
            dealer.connect(_on(address, channel))
            self._dealers[peer, channel] = dealer
            self._watch(dealer, peer, channel)

    def send(self, peer: int, channel: Channel, frames: Sequence[Frame]) -> None:
        dealer = self._dealers.get((peer, channel))
        if dealer is not None:
            self._put(dealer, frames)
        else:
            self._put(self._routers[channel], [b"n%d" % peer, *frames])

    def receive(self) -> list[Arrival]:
        arrivals: list[Arrival] = []
        # One poll over all sockets: asking each in turn costs an exception for every empty one.
        for socket, _ in self._poller.poll(0):
            peer, channel = self._sources[socket]
            while socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                parts = socket.recv_multipart(zmq.NOBLOCK, copy=False)
                frames: list[Frame] = [part.buffer for part in parts]
                if peer is None:
                    name = bytes(frames[0])
                    if not (name.startswith(b"n") and name[1:].isdigit()):
                        continue
                    arrivals.append(Arrival(int(name[1:]), channel, frames[1:]))
                else:
                    arrivals.append(Arrival(peer, channel, frames))
        return arrivals

    def wait(self, timeout_s: float) -> bool:
        return bool(self._poller.poll(max(0, round(timeout_s * 1000))))

    def close(self) -> None:
        for socket in self._sources:
            socket.close(linger=CLOSE_LINGER_MS)
        self._sources.clear()
        if self._own_context:
            self._context.term()

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        return socket

    def _watch(self, socket: zmq.Socket[bytes], peer: int | None, channel: Channel) -> None:
        self._poller.register(socket, zmq.POLLIN)
        self._sources[socket] = (peer, channel)

    @staticmethod
    def _put(socket: zmq.Socket[bytes], frames: Sequence[Frame]) -> None:
        last = len(frames) - 1
        for position, frame in enumerate(frames):
            more = zmq.SNDMORE if position < last else 0
            socket.send(frame, zmq.NOBLOCK | more, copy=len(frame) < ZERO_COPY_FROM_BYTES)
