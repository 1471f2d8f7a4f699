"""The connection between two homes: one listens, the other joins with a token; encrypted, and both ends known by their keys.

Only the listening home must be reachable. Its door (authenticate_devices.py) is that of a ring of its own, so a device that may
compute is no home, and a home that was admitted once comes back with its key alone. ZeroMQ's own thread keeps the connection
and notices when it is gone, also while this process computes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

from ringtmp import untrusted
from ringtmp.errors import ProtocolError, UsageError
from ringtmp.launch import agent_messages
from ringtmp.launch import join_token as tokens
from ringtmp.launch.agent_messages import HUB_PORT_OFFSET
from ringtmp.launch.authenticate_devices import Door
from ringtmp.launch.device_facts import device_facts
from ringtmp.launch.join_token import Token
from ringtmp.launch.key_store import Rings, identity
from ringtmp.transport.encryption import NOT_YET, Gatekeeper, connect_securely, serve_securely
from ringtmp.transport.zeromq import mail
from ringtmp.wire.home_messages import MAX_BYTES, PIECE_BYTES, HomeMessage, decode

DEFAULT_PORT = 47200
DOMAIN = "homes"
KNOCK_EVERY_S = 2.0
RECONNECT_MS, MAX_RECONNECT_MS = 200, 5000
#: An empty message every so often; a connection that brings nothing for so long is gone. Pieces in hand come first.
BEAT_MS, SILENCE_MS = 5000, 30_000
#: Messages in hand: the pieces that are asked for at once, and a few words.
MOST_IN_HAND = 64
MAX_FRAME_BYTES = PIECE_BYTES + MAX_BYTES
_SEND = int(zmq.NOBLOCK)

Told = Callable[[str], None]
Mail = list[tuple[HomeMessage, memoryview]]


class ListeningHome:
    """Home 0."""

    home = 0

    def __init__(self, rings: Rings, name: str, host: str, port: int, tell: Told) -> None:
        self._heard = False  # since it was last seen to be gone
        self._rings, self._name, self._tell = rings, name, tell
        keys = rings.open(name, create=True).keys
        self._route: bytes | None = None
        self._key = ""  # of the other home
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._gatekeeper = Gatekeeper(self._context, NOT_YET)
        self._admitted: set[str] = set()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._door: Door | None = None
        try:
            serve_securely(self._socket, keys, DOMAIN)
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            _usual(self._socket)
            self._gatekeeper.listen(self._socket, f"tcp://{host}:{port + HUB_PORT_OFFSET}")
            self._door = Door(name, rings, host, port, self._refresh)
        except zmq.ZMQError as error:
            self.close()
            raise UsageError(
                f"cannot listen on {host}, ports {port} and {port + HUB_PORT_OFFSET}: {error.strerror or error}; is "
                f"another run listening for its other home? Choose other ports with --home-listen {host}:PORT"
            ) from error
        self._refresh()
        rings.set_address(name, f"{host}:{port}")
        if not self._admitted:
            token = Token(name, f"{host}:{port}", keys.public, rings.new_secret(name, 1))
            tell(f"the other home joins within the hour with --home-join {tokens.encode(token)}")

    @property
    def connected(self) -> bool:
        """Whoever is at its steps says nothing, but its connection stands."""
        return self._heard or any(each.someone_is_in for each in self._gatekeeper.listeners[:1])

    def _refresh(self) -> None:
        """Newly admitted, newly revoked."""
        admitted = {each.key for each in self._rings.open(self._name).nodes}
        for key in admitted - self._admitted:
            self._gatekeeper.allow(DOMAIN, key, key)
        for key in self._admitted - admitted:
            self._gatekeeper.forbid(DOMAIN, key)
        self._admitted = admitted

    def send(self, message: bytes, payload: bytes | memoryview = b"") -> bool:
        if self._route is None:
            return False
        try:
            self._socket.send_multipart([self._route, message, payload], _SEND)
        except zmq.Again:
            return False
        except zmq.ZMQError:  # the way to it is gone
            self._heard = False
            return False
        self._heard = True
        return True

    def receive(self, timeout_s: float) -> Mail:
        assert self._door is not None
        if not self._socket.poll(round(1000 * timeout_s)):
            self._door.serve()
        found: Mail = []
        for parts in mail(self._socket, MOST_IN_HAND):
            if len(parts) == 3 and self._is_the_other(str(parts[0].get("User-Id"))):
                self._route, self._heard = parts[0].bytes, True
                found += _read(parts[1:])
        return found

    def _is_the_other(self, key: str) -> bool:
        """The first that is heard is the other home, until it is gone: a run has two."""
        if key not in self._admitted:
            return False
        if key != self._key and self._key and self._heard:
            return False
        self._key = key
        return True

    def close(self) -> None:
        if self._door is not None:
            self._door.close()
        self._socket.close()
        self._gatekeeper.close()
        self._context.term()


class JoiningHome:
    """Home 1."""

    home = 1

    def __init__(self, token: Token, tell: Told, name: str | None = None) -> None:
        self.connected = False
        self._tell = tell
        self._join = agent_messages.encode(agent_messages.Join(token.secret, device_facts(name)))
        self._keys, self._token = identity(), token
        self._welcome = False
        self._knocked = -KNOCK_EVERY_S
        host, _, port = token.address.rpartition(":")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._door: zmq.Socket[bytes] | None = None
        try:
            connect_securely(self._socket, self._keys, token.key, DOMAIN)
            _usual(self._socket)
            self._socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing waits here for a home that is not there
            self._socket.connect(f"tcp://{host}:{int(port) + HUB_PORT_OFFSET}")
        except zmq.ZMQError as error:
            self.close()
            raise UsageError(f"cannot reach the other home at {token.address}: {error.strerror or error}") from error

    def send(self, message: bytes, payload: bytes | memoryview = b"") -> bool:
        self._look()
        if not self.connected:
            return False
        try:
            self._socket.send_multipart([message, payload], _SEND)
        except zmq.ZMQError:
            return False
        return True

    def receive(self, timeout_s: float) -> Mail:
        self._look()
        if not self.connected and not self._welcome:
            self._knock()
        self._socket.poll(round(1000 * timeout_s))
        return [each for parts in mail(self._socket, MOST_IN_HAND) if len(parts) == 2 for each in _read(parts)]

    def _look(self) -> None:
        while self._monitor.poll(0):
            self.connected = recv_monitor_message(self._monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED

    def _knock(self) -> None:
        """At the door, until somebody opens: the other home may not be there yet. Nothing is said before it has proved the key
        in the token."""
        now = time.monotonic()
        if self._door is None:
            self._door = self._context.socket(zmq.DEALER)
            connect_securely(self._door, self._keys, self._token.key, "join")
            self._door.setsockopt(zmq.MAXMSGSIZE, agent_messages.MAX_BYTES)
            self._door.setsockopt(zmq.IMMEDIATE, 1)
            self._door.linger = 0
            self._door.connect(f"tcp://{self._token.address}")
        if now - self._knocked >= KNOCK_EVERY_S:
            with contextlib.suppress(zmq.Again):
                self._door.send(self._join, _SEND)
                self._knocked = now
        if not self._door.poll(0):
            return
        at = agent_messages.Heard.STRANGER
        answer = agent_messages.decode(agent_messages.from_master, self._door.recv(), at)
        if isinstance(answer, agent_messages.Refused):
            raise UsageError(f"the other home at {self._token.address} refused: {untrusted.line(answer.reason)}")
        if isinstance(answer, agent_messages.Welcome):
            self._welcome = True
            self._tell(f"admitted by the other home at {self._token.address}")
            self._door.close()
            self._door = None

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()
        if self._door is not None:
            self._door.close(linger=0)
        self._context.term()


def _usual(socket: zmq.Socket[bytes]) -> None:
    socket.linger = 1000  # a last word may still be on its way
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.SNDHWM, MOST_IN_HAND)
    socket.setsockopt(zmq.RCVHWM, MOST_IN_HAND)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_MS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, BEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)


def _read(parts: list[zmq.Frame]) -> Mail:
    """What no home of this version says is passed over: who is there was admitted, and may be of another version."""
    try:
        return [(decode(parts[0].bytes), parts[1].buffer)]
    except ProtocolError:
        return []
