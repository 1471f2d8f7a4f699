"""The master's side of joining: a door for strangers with a token or a code, and a table for the devices that were admitted.

The door has a context, a domain and a gatekeeper of its own, takes small messages only, a few a second, and closes when
the ring is full. The table is open to admitted keys alone, and a device there is who its key says it is.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from ringtmp.errors import ProtocolError, UsageError
from ringtmp.launch import agent_messages as messages
from ringtmp.launch.announce import Announcement
from ringtmp.launch.device_facts import checked, checked_death, checked_start
from ringtmp.launch.key_store import Rings
from ringtmp.launch.pairing_code import MasterSide
from ringtmp.transport.encryption import Gatekeeper, serve_securely
from ringtmp.transport.zeromq import mail
from ringtmp.wire.protocol import PROTOCOL

JOINS_PER_S = 10
#: Messages that are read in one go, at the door and at the table: the rest waits, and training does not.
MOST_AT_ONCE = 100
DOOR_HANDSHAKE_MS = 2000
#: For devices, after the master could not listen.
TIME_TO_SPEAK_S = 4 * messages.BEAT_S
#: A port that somebody else has is tried again after this.
REOPEN_S = 5.0


@dataclass
class Device:
    """An admitted device that is here."""

    key: str
    incarnation: str
    facts: messages.Facts
    route: bytes
    last_heard: float
    started: messages.Started | None = None
    died: messages.Died | None = None
    left: bool = False
    broke: str = ""  # how it broke the protocol

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self.last_heard


class Hub:
    def __init__(
        self, ring: str, rings: Rings, host: str, port: int,
        *, package: str = "", tell: Callable[[str], None] = lambda text: None, pairing: MasterSide | None = None,
    ) -> None:  # fmt: skip
        """`package`: with its version, that a device must have to take part. `pairing`: where devices may find the ring by
        themselves and join with the code it shows."""
        self._pairing = pairing
        self._announcement: Announcement | None = None
        self.ring = ring
        self._package = package
        self._tell = tell
        self._lacking: set[str] = set()  # devices that were told of
        self.run = ""  # news of others is not for this master
        self._rings = rings
        self._host = host
        self._port = port
        self.devices: dict[str, Device] = {}  # by key, in order of arrival
        self._listened_at, self._woke_at = time.monotonic(), -math.inf
        file = rings.open(ring)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._gatekeeper = Gatekeeper(self._context)
        self._admitted: dict[str, str] = {}
        self._door: Door | None = None
        self._table: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        serve_securely(self._table, file.keys, "ring")
        self._table.setsockopt(zmq.MAXMSGSIZE, 4 * messages.MAX_BYTES)
        self._table.setsockopt(zmq.ROUTER_MANDATORY, 0)
        self._table.setsockopt(zmq.RCVHWM, MOST_AT_ONCE)
        self._table.linger = 500
        self.refresh()  # before anyone can ask to join: ZeroMQ never retries a refused handshake
        table_port = port + messages.HUB_PORT_OFFSET
        try:
            self._gatekeeper.listen(self._table, f"tcp://{host}:{table_port}")
            self.open_door()
        except zmq.ZMQError as error:
            self.close()
            raise UsageError(
                f"cannot listen on {host}, ports {port} and {table_port}: {error.strerror or error}; is another "
                f"master running? Choose other ports with --listen {host}:PORT"
            ) from error

    def silent_s(self, device: Device) -> float:
        """For how long it could have spoken and did not. A master that could not listen for long (the machine slept, its
        process was stopped) first gives others time for a sign of life."""
        return 0.0 if time.monotonic() - self._woke_at < TIME_TO_SPEAK_S else device.silent_s

    def poll(self, timeout_s: float = 0.0) -> None:
        """Take what has come in, at the door and at the table."""
        now = time.monotonic()
        if now - self._listened_at > messages.SILENCE_LIMIT_S:
            self._woke_at = now
        self._listened_at = now
        if timeout_s:
            poller = zmq.Poller()
            for each in (self._table, self._door.socket) if self._door is not None else (self._table,):
                poller.register(each, zmq.POLLIN)
            poller.poll(round(timeout_s * 1000))
        if self._door is not None:
            self._door.serve()
        for parts in mail(self._table, MOST_AT_ONCE):
            if len(parts) != 2:
                continue
            key = str(parts[1].get("User-Id"))
            if key not in self._admitted:
                continue
            try:
                self._take(
                    key, parts[0].bytes, messages.decode(messages.from_agent, parts[1].bytes, messages.Heard.TABLE)
                )
            except ProtocolError as error:
                self._broke(key, parts[0].bytes, str(error))

    def refresh(self) -> None:
        """The ring's file may have changed: newly admitted, newly revoked."""
        file = self._rings.open(self.ring)
        admitted = {each.key: each.name for each in file.nodes}
        for key in admitted.keys() - self._admitted.keys():
            self._gatekeeper.allow("ring", key, key)
        for key in self._admitted.keys() - admitted.keys():
            self._gatekeeper.forbid("ring", key)
            self.devices.pop(key, None)
        self._admitted = admitted

    def present(self, heard_within_s: float = messages.SILENCE_LIMIT_S) -> list[Device]:
        """Who may have a place. Where less silence is a loss, one that has just been lost by it is not here either."""
        limit_s = min(heard_within_s, messages.SILENCE_LIMIT_S)
        here = (each for each in self.devices.values() if not each.left and not each.broke)
        return [each for each in here if each.silent_s < limit_s and self._equipped(each)]

    def _equipped(self, device: Device) -> bool:
        missing = bool(self._package) and self._package not in device.facts.packages
        if missing and device.key not in self._lacking:
            self._lacking.add(device.key)
            has = f" (it has {', '.join(device.facts.packages)})" if device.facts.packages else ""
            self._tell(f"{device.facts.name} lacks {self._package}, which the strategy comes from{has}: it is left out")
        return not missing

    def admits(self, key: str) -> bool:
        return key in self._admitted

    def open_door(self) -> None:
        """Whoever has a token may join."""
        if self._door is None:
            self._door = Door(self.ring, self._rings, self._host, self._port, self.refresh, pairing=self._pairing)
            if self._pairing is not None:
                self._announcement = Announcement(self.ring, self._host, self._port, self._rings.open(self.ring).public)

    def close_door(self) -> None:
        """Nobody else may join."""
        if self._door is not None:
            self._door.close()
            self._door = None
        if self._announcement is not None:
            self._announcement.close()
            self._announcement = None

    def tell(self, device: Device, message: messages.Prepare | messages.End | messages.Refused) -> None:
        self._table.send_multipart([device.route, messages.encode(message)], zmq.NOBLOCK)

    def close(self) -> None:
        self.close_door()
        self._table.close()
        self._gatekeeper.close()
        self._context.term()

    def _broke(self, key: str, route: bytes, text: str) -> None:
        """A device that breaks the protocol is told so, and has no part in the run any more."""
        device = self.devices.get(key)
        if device is not None and not device.broke:
            device.broke = text
        self._refuse(route, f"this device broke the protocol: {text}")

    def _refuse(self, route: bytes, reason: str) -> None:
        self._table.send_multipart([route, messages.encode(messages.Refused(reason))], zmq.NOBLOCK)

    def _take(self, key: str, route: bytes, message: messages.FromAgent) -> None:
        now = time.monotonic()
        device = self.devices.get(key)
        if isinstance(message, messages.Heartbeat):
            if device is not None and device.incarnation != message.incarnation:
                if now - device.last_heard < 3 * messages.BEAT_S and not device.left:
                    self._refuse(route, _TWINS)
                    return
                device = None
            if other := _other_protocol(message.facts):
                self._refuse(route, other)
                return
            facts = checked(message.facts)
            if device is None:
                self.devices.pop(key, None)
                self.devices[key] = Device(key, message.incarnation, facts, route, now)
            else:
                device.route, device.last_heard = route, now
        elif device is not None and route == device.route:
            device.last_heard = now
            if isinstance(message, messages.Started | messages.Died) and message.ring != self.run:
                return
            if isinstance(message, messages.Started):
                device.started = checked_start(message)
            elif isinstance(message, messages.Died):
                device.died = checked_death(message)
            elif isinstance(message, messages.Leaving):
                device.left = True


_TWINS = (
    "another device is here with this very identity (a copied config directory?): give this one its own by removing "
    "identity.json from its config directory, then join again"
)


def _other_protocol(facts: messages.Facts) -> str:
    """Why a device of another version is refused; empty: it is of this one."""
    same = facts.protocol == PROTOCOL
    return (
        "" if same else f"this device speaks protocol {facts.protocol}, the master {PROTOCOL}: install the same version"
    )


class Door:
    """Where strangers ask to join. Answers whoever knows a valid secret, and keeps nobody else connected for long."""

    def __init__(
        self, ring: str, rings: Rings, host: str, port: int, admitted: Callable[[], None],
        *, pairing: MasterSide | None = None,
    ) -> None:  # fmt: skip
        self._pairing = pairing
        self._ring = ring
        self._rings = rings
        self._admitted = admitted
        self._hub = f"tcp://{host}:{port + messages.HUB_PORT_OFFSET}"
        self._recent: deque[float] = deque()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._gatekeeper = Gatekeeper(self._context)
        self._gatekeeper.open_to_anyone("join")
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        serve_securely(self.socket, rings.open(ring).keys, "join")
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, DOOR_HANDSHAKE_MS)
        self.socket.setsockopt(zmq.MAXMSGSIZE, messages.MAX_BYTES)
        self.socket.setsockopt(zmq.RCVHWM, 100)
        self.socket.setsockopt(zmq.SNDHWM, 100)
        self.socket.linger = 200
        try:
            self._gatekeeper.listen(self.socket, f"tcp://{host}:{port}")
        except zmq.ZMQError:
            self.close()
            raise

    def serve(self) -> None:
        """Answer join requests and join checks."""
        for parts in mail(self.socket, MOST_AT_ONCE):
            now = time.monotonic()
            while self._recent and now - self._recent[0] > 1:
                self._recent.popleft()
            if len(self._recent) >= JOINS_PER_S or len(parts) != 2:
                continue
            self._recent.append(now)
            answer = self._answer(parts[1])
            if isinstance(answer, messages.Welcome):
                # Before the answer: ZeroMQ never tries again where a handshake was refused.
                self._admitted()
            self.socket.send_multipart([parts[0].bytes, messages.encode(answer)], zmq.NOBLOCK)

    def close(self) -> None:
        self.socket.close()
        self._gatekeeper.close()
        self._context.term()

    def _answer(self, frame: zmq.Frame) -> messages.FromMaster:
        key = str(frame.get("User-Id"))
        try:
            message = messages.decode(messages.from_agent, frame.bytes, messages.Heard.DOOR)
        except ProtocolError:
            return messages.Refused("that was not a request to join")
        if isinstance(message, messages.PairBegin | messages.PairConfirm):
            if self._pairing is None:
                return messages.Refused("this master takes tokens only (--no-discovery)")
            return self._pairing.answer(message, key)
        if isinstance(message, messages.JoinCheck):
            reason = self._rings.check_secret(self._ring, message.secret, key)
            return messages.JoinCheckAnswer("", message.padding) if reason is None else messages.JoinCheckAnswer(reason)
        try:
            reason = self._judge(message, key)
        except OSError as error:
            reason = f"the master cannot save the list of admitted devices: {error.strerror}"
        return messages.Welcome(self._hub) if reason is None else messages.Refused(reason)

    def _judge(self, message: messages.FromAgent, key: str) -> str | None:
        if not isinstance(message, messages.Join):
            return "that was not a request to join"
        if other := _other_protocol(message.facts):
            return other
        try:
            checked(message.facts)
        except ProtocolError as error:
            return f"the device's description of itself is invalid: {error}"
        return self._rings.admit(self._ring, message.secret, key, message.facts.name)
