"""ZeroMQ sockets: every node listens on a ROUTER per channel, the node with the higher number connects a DEALER.

ROUTER/DEALER, not PAIR, which ignores a returning peer. No limit on what waits to be sent: the window bounds what is in
flight, and a send must never block. What is lost when a connection breaks is sent again by the link above. A peer that
sends more than is read fills its own connection: only so much waits here, and `receive` returns with a part of it, so
that it can be judged.

On one machine the sockets are Unix sockets in a private folder and a peer is who it says it is. Over TCP everything is
CURVE, and a peer is who its key says it is: a name in a message counts for nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import zmq

from ringtmp.errors import UsageError
from ringtmp.transport.base import Arrival, Channel, Frame
from ringtmp.transport.encryption import NOT_YET, Gatekeeper, KeyPair, connect_securely, serve_securely
from ringtmp.wire.address import Address

#: Below this a copy is cheaper than tracking the buffer.
ZERO_COPY_FROM_BYTES = 32 * 1024
#: The longest path the operating system takes for a Unix socket.
MAX_IPC_PATH = 107
CLOSE_LINGER_MS = 500
RECONNECT_MS = 50
MAX_RECONNECT_MS = 1000
DOMAIN = "links"
INTRODUCTION = b""
INTRODUCE_EVERY_S = 0.5
#: A piece, its header and CURVE's overhead stay far below; a layer's graph is the largest header.
MAX_FRAME_BYTES = 32 * 1024 * 1024
#: Plain numbers: joining flags of their own kind takes longer than handing over a frame.
_LAST, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
#: Packets of one connection that wait to be taken; the rest waits with its sender.
MOST_WAITING = 1000
#: What one socket gives in one go.
MOST_PACKETS = 1000
MOST_BYTES = 32 * 2**20
_ENDS = {Channel.CONTROL: "c", Channel.TENSOR: "t", Channel.BULK: "b"}


def ipc_address(folder: str, node: int) -> Address:
    """The Unix sockets of a node in a folder only we can enter."""
    base = os.path.join(folder, str(node))
    if len(os.fsencode(base)) + 2 > MAX_IPC_PATH:
        raise UsageError(f"the socket path {base} is longer than {MAX_IPC_PATH} bytes: set TMPDIR to a shorter folder")
    control, tensor, bulk = (f"ipc://{base}-{_ENDS[channel]}" for channel in Channel)
    return Address((control, tensor, bulk))


def has_mail(socket: zmq.Socket[bytes]) -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def mail(
    socket: zmq.Socket[bytes], most: int = MOST_PACKETS, most_bytes: int = MOST_BYTES, found: bool = False
) -> Iterator[list[zmq.Frame]]:
    """What is there, at most so much: the rest comes in the next go. A poll finds it at once. `found`: one has, so that the
    socket need not be asked for the first."""
    taken_bytes = 0
    for number in range(most):
        if taken_bytes >= most_bytes or not ((found and number == 0) or has_mail(socket)):
            return
        parts = _take(socket)
        taken_bytes += sum(map(len, parts))
        yield parts


def _take(socket: zmq.Socket[bytes]) -> list[zmq.Frame]:
    """One message, not copied. A frame knows whether another follows; asking the socket takes longer than the frame."""
    parts = [socket.recv(_LAST, copy=False)]
    while parts[-1].more:
        parts.append(socket.recv(_LAST, copy=False))
    return parts


class ZeroMQTransport:
    def __init__(self, node: int, endpoints: Sequence[str], keys: KeyPair | None = None) -> None:
        """Listens on the three endpoints; over TCP `keys` are this node's own, fresh for every generation."""
        self.node = node
        self._keys = keys
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._gatekeeper = Gatekeeper(self._context, NOT_YET) if keys is not None else None
        self._poller = zmq.Poller()
        self._routers: dict[Channel, zmq.Socket[bytes]] = {}
        self._dealers: dict[tuple[int, Channel], zmq.Socket[bytes]] = {}
        self._sources: dict[zmq.Socket[bytes], tuple[int | None, Channel]] = {}
        self._routes: dict[tuple[int, Channel], bytes] = {}  # who was last heard on which connection
        self._introduced = 0.0
        self._known: dict[int, str] = {}  # link keys by peer
        self._ready: list[tuple[Any, int]] = []  # what the last wait found
        bound = []
        try:
            for channel, endpoint in zip(Channel, endpoints, strict=True):
                router = self._routers[channel] = self._socket(zmq.ROUTER, None, channel)
                self._listen(router, endpoint)
                bound.append(router.getsockopt_string(zmq.LAST_ENDPOINT))
        except BaseException:
            self.close()
            raise
        control, tensor, bulk = bound
        self.address = Address((control, tensor, bulk), keys.public if keys is not None else "")

    def connect(self, peer: int, address: Address) -> None:
        """Know a peer. Only the higher number connects; the lower one listens, so each pair has one line per channel."""
        if self._gatekeeper is not None:
            before = self._known.get(peer)
            if before is not None and before != address.key:
                self._gatekeeper.forbid(DOMAIN, before)
                for channel in Channel:
                    self._routes.pop((peer, channel), None)
            self._known[peer] = address.key
            self._gatekeeper.allow(DOMAIN, address.key, f"n{peer}")
        self.hang_up(peer)  # what waits for one who is gone must not reach the one who takes its place
        if peer > self.node:
            return
        for channel, endpoint in zip(Channel, address.endpoints, strict=True):
            dealer = self._dealers[peer, channel] = self._socket(zmq.DEALER, peer, channel)
            dealer.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
            dealer.setsockopt(zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_MS)
            if self._keys is not None:
                connect_securely(dealer, self._keys, address.key, DOMAIN)
            else:
                dealer.setsockopt(zmq.ROUTING_ID, b"n%d" % self.node)
            dealer.connect(endpoint)
            if self._keys is not None:
                self._put(dealer, [INTRODUCTION])

    def hang_up(self, peer: int) -> None:
        """Nothing more for this peer, and nothing kept for it."""
        for channel in Channel:
            dealer = self._dealers.pop((peer, channel), None)
            if dealer is not None:
                self._poller.unregister(dealer)
                del self._sources[dealer]
                dealer.close(linger=0)

    def listen_again(self) -> None:
        """A cleaner of temporary files takes Unix sockets too. Whoever is connected does not notice; bound once more, the
        same name leads here again. Where even its folder is gone, nothing can be done here."""
        for channel, endpoint in zip(Channel, self.address.endpoints, strict=True):
            path = endpoint.removeprefix("ipc://")
            if path != endpoint and not os.path.exists(path) and os.path.isdir(os.path.dirname(path)):
                self._routers[channel].bind(endpoint)

    def send(self, peer: int, channel: Channel, frames: Sequence[Frame]) -> None:
        dealer = self._dealers.get((peer, channel))
        if dealer is not None:
            self._put(dealer, frames)
            return
        route = self._routes.get((peer, channel)) if self._keys is not None else b"n%d" % peer
        if route is not None:
            self._put(self._routers[channel], [route, *frames])

    def receive(self) -> list[Arrival]:
        self._introduce_again()
        arrivals: list[Arrival] = []
        # One poll over all sockets: asking each in turn costs an exception for every empty one.
        ready, self._ready = self._ready or self._poller.poll(0), []
        for socket, _ in ready:
            if socket not in self._sources:
                continue  # hung up since the wait
            peer, channel = self._sources[socket]
            for parts in mail(socket, found=True):
                if peer is not None:
                    arrivals.append(Arrival(peer, channel, [part.buffer for part in parts]))
                elif (sender := self._sender(parts, channel)) is not None:
                    arrivals.append(Arrival(sender, channel, [part.buffer for part in parts[1:]]))
        return arrivals

    def _introduce_again(self) -> None:
        """A listening peer answers on the connection it last heard us on. After a reconnect that is a new one, and the
        side that has nothing to say would never be found on it."""
        now = time.monotonic()
        if self._keys is not None and now - self._introduced > INTRODUCE_EVERY_S:
            self._introduced = now
            for dealer in self._dealers.values():
                self._put(dealer, [INTRODUCTION])

    def wait(self, timeout_s: float) -> bool:
        self._ready = self._poller.poll(max(0, round(timeout_s * 1000)))
        return bool(self._ready)

    def close(self) -> None:
        for socket in self._sources:
            socket.close(linger=CLOSE_LINGER_MS)
        self._sources.clear()
        if self._gatekeeper is not None:
            self._gatekeeper.close()
            self._gatekeeper = None
        self._context.term()

    def _sender(self, parts: Sequence[zmq.Frame], channel: Channel) -> int | None:
        """Over TCP the name the gatekeeper gave the key; on this machine the name the peer gave itself."""
        route = parts[0].bytes
        if self._keys is None:
            name = route.decode(errors="replace")
        else:
            try:
                name = str(parts[-1].get("User-Id"))
            except zmq.ZMQError:
                return None
        if not (name.startswith("n") and name[1:].isdigit()):
            return None
        sender = int(name[1:])
        self._routes[sender, channel] = route
        return sender if len(parts) > 2 or parts[1].bytes != INTRODUCTION else None

    def _listen(self, router: zmq.Socket[bytes], endpoint: str) -> None:
        try:
            if self._keys is not None and self._gatekeeper is not None:
                serve_securely(router, self._keys, DOMAIN)
                router.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
                self._gatekeeper.listen(router, endpoint)
            else:
                # A returning peer takes its name over from its dead connection.
                router.setsockopt(zmq.ROUTER_HANDOVER, 1)
                router.bind(endpoint)
        except (zmq.ZMQError, ValueError) as error:  # a name that is no text is a ValueError
            raise UsageError(f"cannot listen on {endpoint}: {getattr(error, 'strerror', None) or error}") from error

    def _socket(self, kind: int, peer: int | None, channel: Channel) -> zmq.Socket[bytes]:
        """Known to `close` from its first moment: a context waits for ever for a socket that nobody closes."""
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        self._sources[socket] = (peer, channel)
        self._poller.register(socket, zmq.POLLIN)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, MOST_WAITING)
        return socket

    @staticmethod
    def _put(socket: zmq.Socket[bytes], frames: Sequence[Frame]) -> None:
        """A line that is down and not yet up again takes nothing: the packet is lost, and the link sends it again."""
        last = len(frames) - 1
        for position, frame in enumerate(frames):
            try:
                socket.send(frame, _MORE if position < last else _LAST, len(frame) < ZERO_COPY_FROM_BYTES)
            except zmq.Again:
                if position:
                    raise  # a message half taken is taken whole
                return
