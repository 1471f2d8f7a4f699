"""A device's agent: joins with a token, says twice a second that it lives, starts a compute process for each run.

No torch here, about 30 MiB: a compute process that crashes or is killed for its memory costs neither the device's
identity nor its place in the ring.
"""

from __future__ import annotations

import contextlib
import secrets
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from ringtmp import untrusted
from ringtmp.errors import ProtocolError, RingError, UsageError
from ringtmp.launch import agent_messages as messages
from ringtmp.launch.compute_process import Bound, Orders
from ringtmp.launch.device_facts import address_towards
from ringtmp.launch.join_token import Token
from ringtmp.launch.private_folder import PrivateFolder, remove_leftovers
from ringtmp.launch.start_process import ask_to_leave_snapshots, end, is_stopped, last_words, spawn
from ringtmp.system.signals import on_signals
from ringtmp.transport.encryption import KeyPair, connect_securely

JOIN_LIMIT_S = 10.0
ASK_AGAIN_S = 2.0
#: To write its snapshots down a process has this long; the master waits longer for one that is being started.
LEAVING_LIMIT_S = 20.0


@contextlib.contextmanager
def at_the_door(token: Token, keys: KeyPair, events: int) -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """A connection to the master's door, and a monitor of these `events` of it. Nothing leaves before the handshake."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    door: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    monitor = door.get_monitor_socket(events)
    try:
        connect_securely(door, keys, token.key, "join")
        door.setsockopt(zmq.MAXMSGSIZE, messages.MAX_BYTES)
        door.connect(f"tcp://{token.address}")
        yield door, monitor
    finally:
        door.disable_monitor()
        monitor.close(linger=0)
        door.close(linger=0)
        context.term()


def join(token: Token, keys: KeyPair, facts: messages.Facts, limit_s: float = JOIN_LIMIT_S) -> str:
    """Knock at the master's door; returns the endpoint of its table. Says nothing before the master proved its key."""
    request = messages.encode(messages.Join(token.secret, facts))
    try:
        with at_the_door(token, keys, zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED) as (door, monitor):
            limit = time.monotonic() + limit_s
            door.send(request)
            while not door.poll(round(min(ASK_AGAIN_S, limit_s) * 1000)):
                if time.monotonic() >= limit:
                    raise _why_no_answer(token, monitor, limit_s)
                # A crowded door drops requests; one asked twice is answered twice and admitted once.
                with contextlib.suppress(zmq.Again):
                    door.send(request, zmq.NOBLOCK)
            answer = messages.decode(messages.from_master, door.recv(), messages.Heard.STRANGER)
    except zmq.ZMQError as error:
        raise UsageError(f"cannot reach the master at {token.address}: {error.strerror or error}") from error
    if isinstance(answer, messages.Refused):
        raise UsageError(f"the master at {token.address} refused: {untrusted.line(answer.reason)}")
    if not isinstance(answer, messages.Welcome):
        raise ProtocolError(f"the master at {token.address} answered with {type(answer).__name__}")
    return answer.hub


def _why_no_answer(token: Token, monitor: zmq.Socket[bytes], limit_s: float) -> RingError:
    seen = set()
    while monitor.poll(0):
        seen.add(recv_monitor_message(monitor)["event"])
    host, _, port = token.address.rpartition(":")
    if zmq.EVENT_CONNECTED not in seen:
        return UsageError(
            f"nobody answers at {host} port {port}: is the master still waiting, is this the address other devices can "
            "reach, and does its firewall let the port through? (ringtmp doctor --join TOKEN)"
        )
    if zmq.EVENT_HANDSHAKE_SUCCEEDED not in seen:
        return UsageError(
            f"{host} port {port} answers but does not have the master key in the token: is the token of another ring, "
            "or is something else listening there? Nothing was sent to it"
        )
    return UsageError(f"the master at {token.address} took the request and did not answer within {limit_s:.0f} s")


class Agent:
    """Serves the master at `hub` run after run, until told to stop."""

    def __init__(
        self,
        token: Token,
        hub: str,
        keys: KeyPair,
        facts: messages.Facts,
        listen: str | None,
        say: Callable[[str], None],
        memory_bytes: int = 0,
        device: str = "cpu",
    ) -> None:
        remove_leftovers()
        self._keys = keys
        self._say = say
        self._memory_bytes = memory_bytes
        self._device = device
        self._facts = facts
        self._incarnation = secrets.token_hex(8)
        host, _, port = token.address.rpartition(":")
        self._listen = listen or address_towards(host, int(port))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        connect_securely(self._socket, keys, token.key, "ring")
        self._socket.setsockopt(zmq.MAXMSGSIZE, 4 * messages.MAX_BYTES)
        self._socket.setsockopt(zmq.SNDHWM, 10)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 200)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        # While nobody listens there is nobody to queue for.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        # A refused handshake is final for ZeroMQ, which would wait in silence.
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        self._socket.connect(hub)
        self._child: subprocess.Popen[bytes] | None = None
        self._ring, self._generation = "", 0
        self._holds_of: set[str] = set()  # rings whose snapshots the compute process may have
        self._last_beat = 0.0
        self._stopped_at: float | None = None
        self._notice_s = messages.SILENCE_LIMIT_S
        self._starting = False  # the compute process has not said its first line
        self._log: Path | None = None
        self._folder: PrivateFolder | None = None  # of the compute process
        self._ended = 0  # runs served
        self._leaving = False
        self._news: deque[messages.Started | messages.Died | messages.Leaving] = deque(maxlen=8)  # not told yet

    def run(self, once: bool) -> None:
        """Until told to leave, or with `once` until one run has ended."""
        while not (self._leaving or (once and self._ended)):
            self._beat_if_due()
            if self._monitor.poll(0):
                raise UsageError(
                    "the master no longer knows this device: it was revoked, or the ring was recreated; ask for a fresh token"
                )
            poller = zmq.Poller()
            poller.register(self._socket, zmq.POLLIN)
            if self._starting and self._child is not None and self._child.stdout is not None:
                poller.register(self._child.stdout.fileno(), zmq.POLLIN)
            ready = dict(poller.poll(200))
            if self._socket in ready:
                self._take(messages.decode(messages.from_master, self._socket.recv(), messages.Heard.AGENT))
            elif ready:
                self._hear_child()
            self._watch_child()
        if self._leaving:
            self._say("leaving")

    @contextlib.contextmanager
    def leaves_on_signals(self) -> Iterator[None]:
        """Signals are a wish. Raised in the middle of ending a child, they would leave its files behind."""

        def leave(number: int, frame: object) -> None:
            self._leaving = True

        with on_signals(leave):
            yield

    def close(self) -> None:
        self._end_child()
        self._tell(messages.Leaving())
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=300)
        self._context.term()

    def _take(self, message: messages.FromMaster) -> None:
        if isinstance(message, messages.Prepare):
            left = self._left_by_child() if message.before and message.before in self._holds_of else None
            self._end_child()
            self._say(f"run begins: node {message.node}, generation {message.generation}")
            self._start(message, left)
        elif isinstance(message, messages.End):
            if message.generation == self._generation and self._child is not None:
                self._end_child()
                self._say("run ended; waiting for the next" if message.over else "out of the run; waiting for a place")
            self._ended += message.over
        elif isinstance(message, messages.Refused):
            raise UsageError(f"the master refused: {untrusted.line(message.reason)}")

    def _left_by_child(self) -> PrivateFolder | None:
        """The folder with the snapshots of a compute process whose master was killed, when that process has ended."""
        child, folder = self._child, self._folder
        if child is None or folder is None:
            return None
        ask_to_leave_snapshots(child)
        end(child, LEAVING_LIMIT_S, self._beat_if_due)
        self._child = self._folder = None
        return folder

    def _start(self, message: messages.Prepare, left: PrivateFolder | None) -> None:
        """`left`: where the process before this one has left its snapshots."""
        self._ring, self._generation, self._notice_s = message.ring, message.generation, message.notice_s
        # A process that takes another's place has its snapshots until there are newer ones that are whole.
        self._holds_of = {message.ring, message.before} if left is not None else {message.ring}
        endpoint = f"tcp://{self._listen}:*"
        self._folder = left or PrivateFolder()
        orders = Orders(
            message.ring, message.generation, message.node, (endpoint, endpoint, endpoint), message.master,
            message.threads, secure=True, memory_bytes=self._memory_bytes, snapshots=str(self._folder.path / "snapshots"),
            device=self._device,
        )  # fmt: skip
        self._log = self._folder.path / "log"
        self._child = spawn(orders, self._log)
        self._starting = True

    def _hear_child(self) -> None:
        """Its first line says where it listens. Signs of life go on meanwhile."""
        assert self._child is not None
        assert self._child.stdout is not None
        self._starting = False
        line = self._child.stdout.readline()
        if line:
            bound = msgspec.json.decode(line, type=Bound)
            self._tell(messages.Started(self._ring, self._generation, bound.address, self._child.pid))

    def _watch_child(self) -> None:
        child = self._child
        if child is None:
            return
        if child.poll() is None:
            self._watch_stopped(child)
            return
        if child.returncode != 0:
            self._say(f"the compute process ended with code {child.returncode}: {last_words(self._log)}")
        self._tell(messages.Died(self._ring, self._generation, child.returncode, last_words(self._log)))
        self._end_child()
        self._ended += child.returncode == 0  # one that was killed is started again, or told that the run is over

    def _watch_stopped(self, child: subprocess.Popen[bytes]) -> None:
        """One that was stopped cannot say so itself, and would hold up the ring."""
        if not is_stopped(child.pid):
            self._stopped_at = None
            return
        now = time.monotonic()
        self._stopped_at = self._stopped_at or now
        if now - self._stopped_at > self._notice_s:
            self._stopped_at = None
            child.kill()
            child.wait()

    def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        end(child, meanwhile=self._beat_if_due)
        self._log = None
        if self._folder is not None:
            self._folder.remove()
            self._folder = None

    def _tell(self, news: messages.Started | messages.Died | messages.Leaving) -> None:
        """While nobody listens, news waits for the next beat. A master knows whose news it is by the beat before it."""
        self._news.append(news)
        self._beat()

    def _beat_if_due(self) -> None:
        if time.monotonic() - self._last_beat >= messages.BEAT_S:
            self._beat()

    def _beat(self) -> None:
        self._last_beat = time.monotonic()
        listening = self._say_to_master(messages.Heartbeat(self._incarnation, self._facts))
        while listening and self._news and (listening := self._say_to_master(self._news[0])):
            self._news.popleft()

    def _say_to_master(self, message: messages.Heartbeat | messages.Started | messages.Died | messages.Leaving) -> bool:
        try:
            self._socket.send(messages.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True
