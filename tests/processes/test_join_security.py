"""Contract 7 with real sockets on loopback: nobody but the admitted gets a message in."""

from __future__ import annotations

import contextlib
import errno
import re
import shlex
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq

from ringtmp.errors import UsageError
from ringtmp.launch import agent, agent_messages
from ringtmp.launch import join_token as tokens
from ringtmp.launch.agent_messages import Heartbeat, Join
from ringtmp.launch.authenticate_devices import MOST_AT_ONCE, Hub
from ringtmp.launch.device_facts import device_facts
from ringtmp.launch.join_token import Token
from ringtmp.launch.key_store import Rings, identity
from ringtmp.transport.base import Channel
from ringtmp.transport.encryption import KeyPair, connect_securely, new_key_pair, serve_securely
from ringtmp.transport.zeromq import ZeroMQTransport

HOST = "127.0.0.1"
ANY = (f"tcp://{HOST}:*",) * 3


def free_port() -> int:
    """Two in a row."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind((HOST, 0))
            port = first.getsockname()[1]
            try:
                second.bind((HOST, port + 1))
            except OSError:
                continue
            return int(port)


def test_a_ring_that_another_process_changes_is_read_again_and_one_that_nobody_changes_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    master, elsewhere = Rings(tmp_path), Rings(tmp_path)
    master.open("home", create=True)
    for number in range(20):
        elsewhere.set_address("home", f"{HOST}:{number}")
        assert master.open("home").address == f"{HOST}:{number}"
        elsewhere.admit("home", elsewhere.new_secret("home", 1), new_key_pair().public, f"n{number}")
        assert len(master.open("home").nodes) == number + 1
        elsewhere.release("home", f"n{number}")
        assert len(master.open("home").released) == number + 1
    monkeypatch.setattr("ringtmp.launch.key_store._read", lambda *_: pytest.fail("read again"))
    assert master.open("home") is master.open("home")
    (tmp_path / "rings" / "home.json").unlink()
    with pytest.raises(UsageError, match="no ring"):
        master.open("home")


class Master:
    """A hub that is served in the background, as a waiting master does."""

    def __init__(self, folder: Path) -> None:
        self.rings = Rings(folder)
        self.rings.open("home", create=True)
        self.port = free_port()
        self.hub = Hub("home", self.rings, HOST, self.port)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._stop.is_set():
            self.hub.poll(0.01)
            self.hub.refresh()

    def token(self, uses: int = 1) -> Token:
        file = self.rings.open("home")
        return Token("home", f"{HOST}:{self.port}", file.public, self.rings.new_secret("home", uses))

    def admitted(self) -> list[str]:
        return [node.name for node in self.rings.open("home").nodes]

    def wait_for(self, key: str, seconds: float) -> bool:
        limit = time.monotonic() + seconds
        while time.monotonic() < limit:
            if key in self.hub.devices:
                return True
            time.sleep(0.02)
        return False

    def rest(self) -> None:
        """Nobody serves the hub any more."""
        self._stop.set()
        self._thread.join()

    def close(self) -> None:
        self.rest()
        self.hub.close()


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Master]:
    made = Master(tmp_path / "master")
    yield made
    made.close()


def join(token: Token, keys: KeyPair | None = None, name: str = "board", limit_s: float = 20) -> str:
    return agent.join(token, keys or new_key_pair(), device_facts(name), limit_s)


def test_a_living_token_admits_once_per_use_and_again_the_same_device(master: Master) -> None:
    token, keys = master.token(uses=1), new_key_pair()
    old = msgspec.structs.replace(token, secret=b"long expired, ok")
    assert join(token, keys) == f"tcp://{HOST}:{master.port + 1}"
    assert join(token, keys), "a device that comes back does not use the token up"
    assert join(old, keys), "nor does it need a living one"
    assert master.admitted() == ["board"]
    with pytest.raises(UsageError, match="token is used up"):
        join(token, name="second")
    assert master.admitted() == ["board"]


def test_a_wrong_secret_is_refused(master: Master) -> None:
    token = msgspec.structs.replace(master.token(), secret=b"x" * 16)
    with pytest.raises(UsageError, match="secret is wrong"):
        join(token)
    assert master.admitted() == []


def test_an_expired_token_is_refused_whatever_the_devices_clock_says(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = master.token()
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3700)
    with pytest.raises(UsageError, match="has expired"):
        join(token)
    assert master.admitted() == []


def test_a_joiner_says_nothing_to_a_master_with_another_key(tmp_path: Path) -> None:
    """The impostor has the address, and even accepts every client key."""
    port = free_port()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as impostor:
        from ringtmp.transport.encryption import Gatekeeper

        gatekeeper = Gatekeeper(context)
        gatekeeper.open_to_anyone("join")
        serve_securely(impostor, new_key_pair(), "join")
        impostor.bind(f"tcp://{HOST}:{port}")
        token = Token("home", f"{HOST}:{port}", new_key_pair().public, b"s" * 16)
        with pytest.raises(UsageError, match="does not have the master key in the token.*Nothing was sent"):
            join(token, limit_s=1.5)
        assert not impostor.poll(200)
        impostor.close(linger=0)
        gatekeeper.close()


def test_nobody_at_the_address_is_said_with_address_and_port() -> None:
    port = free_port()
    with pytest.raises(UsageError, match=f"nobody answers at {HOST} port {port}"):
        join(Token("home", f"{HOST}:{port}", new_key_pair().public, b"s" * 16), limit_s=1)


def table_socket(master: Master, keys: KeyPair, server_key: str | None = None) -> tuple[zmq.Context, zmq.Socket]:
    context: zmq.Context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    connect_securely(dealer, keys, server_key or master.rings.open("home").public, "ring")
    dealer.linger = 0
    dealer.connect(f"tcp://{HOST}:{master.port + 1}")
    return context, dealer


def greet(master: Master, keys: KeyPair, seconds: float) -> bool:
    """Whether a greeting with this key reaches the table."""
    context, dealer = table_socket(master, keys)
    try:
        # A refused handshake may be over by now; ZeroMQ then has nobody to queue for, and a plain send would wait for ever.
        with contextlib.suppress(zmq.Again):
            dealer.send(agent_messages.encode(Heartbeat("i" + keys.public[:4], device_facts("board"))), zmq.NOBLOCK)
        return master.wait_for(keys.public, seconds)
    finally:
        dealer.close()
        context.term()


def test_only_admitted_keys_are_heard_at_the_table(master: Master) -> None:
    stranger, member = new_key_pair(), new_key_pair()
    assert not greet(master, stranger, 1.0)
    join(master.token(), member)
    assert greet(master, member, 5.0)


def test_a_device_that_says_a_lot_is_heard_a_part_at_a_time(master: Master, monkeypatch: pytest.MonkeyPatch) -> None:
    """A poll ends, however much comes; what is left comes with the next, at once."""
    keys, heard, take = new_key_pair(), [0], Hub._take
    join(master.token(), keys)

    def counted(self: Hub, key: str, route: bytes, message: agent_messages.FromAgent) -> None:
        heard[-1] += 1
        take(self, key, route, message)

    monkeypatch.setattr(Hub, "_take", counted)
    master.rest()
    context, dealer = table_socket(master, keys)
    try:
        word = agent_messages.encode(Heartbeat("twin", device_facts("board")))
        for _ in range(4 * MOST_AT_ONCE + 1):
            dealer.send(word)
        limit = time.monotonic() + 20
        while sum(heard) <= 4 * MOST_AT_ONCE:
            assert time.monotonic() < limit
            heard.append(0)
            master.hub.poll(5.0)
        assert max(heard) <= MOST_AT_ONCE
        assert keys.public in master.hub.devices
    finally:
        dealer.close()
        context.term()


def test_a_revoked_device_is_out_and_cannot_come_back(master: Master) -> None:
    keys = new_key_pair()
    join(master.token(), keys)
    assert greet(master, keys, 5.0)
    master.rings.revoke("home", "board")
    limit = time.monotonic() + 5
    while keys.public in master.hub.devices:
        assert time.monotonic() < limit
        time.sleep(0.02)
    assert not greet(master, keys, 1.0)
    with pytest.raises(UsageError, match="was revoked"):
        join(master.token(), keys)


def test_a_name_that_two_keys_have_takes_neither_away(master: Master) -> None:
    """A device with a wiped disk comes back under its name with a new key."""
    old, new = new_key_pair(), new_key_pair()
    for keys in (old, new):
        join(master.token(), keys, "attic")
    both = " or ".join(re.escape(f"-- {shlex.quote(each.public)}") for each in (old, new))
    for change in (master.rings.revoke, master.rings.release):
        with pytest.raises(UsageError, match=f"2 devices named 'attic'.*{both}"):
            change("home", "attic")
    assert master.rings.revoke("home", old.public).key == old.public
    assert master.rings.release("home", "attic").key == new.public


def test_a_device_that_comes_back_is_let_in_though_nothing_can_be_written(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    known = new_key_pair()
    join(master.token(), known)
    token = master.token()
    monkeypatch.setattr("ringtmp.launch.key_store._write", full)
    join(token, known)
    with pytest.raises(UsageError, match="cannot save the list of admitted devices: No space left"):
        join(token, new_key_pair(), "other")


def test_two_devices_with_one_identity_are_told_apart(master: Master) -> None:
    keys = new_key_pair()
    join(master.token(), keys)
    assert greet(master, keys, 5.0)
    context, dealer = table_socket(master, keys)
    try:
        dealer.send(agent_messages.encode(Heartbeat("another", device_facts("copy"))))
        assert dealer.poll(5000)
        answer = agent_messages.decode(agent_messages.from_master, dealer.recv(), agent_messages.Heard.STRANGER)
        assert isinstance(answer, agent_messages.Refused)
        assert "give this one its own by removing identity.json" in answer.reason
    finally:
        dealer.close()
        context.term()


def pair_of_transports() -> tuple[ZeroMQTransport, ZeroMQTransport, KeyPair]:
    """Nodes 0 and 2 know each other; node 0 listens. Also node 2's keys."""
    keys = new_key_pair()
    listening = ZeroMQTransport(0, ANY, new_key_pair())
    other = ZeroMQTransport(2, ANY, keys)
    listening.connect(2, other.address)
    other.connect(0, listening.address)
    return listening, other, keys


def arrivals(transport: ZeroMQTransport, seconds: float) -> list[tuple[int, bytes]]:
    got: list[tuple[int, bytes]] = []
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        transport.wait(0.05)
        got += [(each.peer, bytes(each.frames[0])) for each in transport.receive()]
        if got:
            break
    return got


def test_a_node_is_who_its_key_says_whatever_it_claims() -> None:
    listening, other, keys = pair_of_transports()
    try:
        with zmq.Context() as context:
            liar = context.socket(zmq.DEALER)
            liar.setsockopt(zmq.ROUTING_ID, b"n3")
            connect_securely(liar, keys, listening.address.key, "links")
            liar.linger = 0
            liar.connect(listening.address.endpoints[Channel.CONTROL])
            liar.send(b"I am node 3")
            assert arrivals(listening, 5) == [(2, b"I am node 3")]
            liar.close()
    finally:
        listening.close()
        other.close()


def test_a_key_nobody_named_gets_no_packet_onto_a_link() -> None:
    listening, other, _ = pair_of_transports()
    try:
        stranger = ZeroMQTransport(3, ANY, new_key_pair())
        stranger.connect(0, listening.address)
        stranger.send(0, Channel.TENSOR, [b"let me in"])
        assert arrivals(listening, 1) == []
        stranger.close()
        other.send(0, Channel.TENSOR, [b"me"])
        assert arrivals(listening, 5) == [(2, b"me")]
    finally:
        listening.close()
        other.close()


def test_without_its_gatekeeper_the_door_is_closed_not_open() -> None:
    listening = ZeroMQTransport(0, ANY, new_key_pair())
    other = ZeroMQTransport(2, ANY, new_key_pair())
    listening.connect(2, other.address)
    assert listening._gatekeeper is not None
    listening._gatekeeper.close()  # the handler dies before anyone has connected
    listening._gatekeeper = None
    try:
        other.connect(0, listening.address)
        other.send(0, Channel.TENSOR, [b"admitted, but nobody can say so"])
        assert arrivals(listening, 1.5) == []
    finally:
        other.close()
        listening.close()


@pytest.mark.parametrize("where", ["door", "table", "link"])
def test_plain_bytes_and_plain_zeromq_are_not_listened_to(master: Master, where: str) -> None:
    listening = ZeroMQTransport(0, ANY, new_key_pair())
    link_port = int(listening.address.endpoints[0].rpartition(":")[2])
    port = {"door": master.port, "table": master.port + 1, "link": link_port}[where]
    noise = [b"GET / HTTP/1.1\r\n\r\n", b"\xff\0\0\0\0\0\0\0\1\x7f" + b"\0" * 60, b"\0" * 500]
    sockets = []
    for each in noise:
        plain = socket.create_connection((HOST, port))
        plain.sendall(each)
        sockets.append(plain)
    with zmq.Context() as context:
        null = context.socket(zmq.DEALER)
        null.linger = 0
        null.connect(f"tcp://{HOST}:{port}")
        with contextlib.suppress(zmq.Again):  # it may have been hung up on by now, and has nobody to queue for
            null.send(agent_messages.encode(Join(b"x" * 16, device_facts("plain"))), zmq.NOBLOCK)
        assert not null.poll(700)
        null.close()
    assert arrivals(listening, 0.2) == []
    assert master.admitted() == []
    assert not master.hub.devices
    for each in sockets:
        each.close()
    listening.close()
    assert join(master.token()), "and the door still works"


def test_a_recorded_join_cannot_be_played_again(master: Master) -> None:
    """Record every byte a joiner sends, then send the same bytes once more."""
    recorded: list[bytes] = []
    server = socket.create_server((HOST, 0))

    def relay() -> None:
        near, _ = server.accept()
        far = socket.create_connection((HOST, master.port))

        def carry(source: socket.socket, sink: socket.socket, keep: bool) -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(65536):
                    if keep:
                        recorded.append(data)
                    sink.sendall(data)

        back = threading.Thread(target=carry, args=(far, near, False), daemon=True)
        back.start()
        carry(near, far, True)
        far.close()

    thread = threading.Thread(target=relay, daemon=True)
    thread.start()
    token = master.token(uses=5)
    through = msgspec.structs.replace(token, address=f"{HOST}:{server.getsockname()[1]}")
    assert join(through, name="first")
    uses = [each.uses_left for each in master.rings.open("home").tokens]
    raw = b"".join(recorded)
    assert token.secret not in raw, "the secret never shows on the wire"
    with socket.create_connection((HOST, master.port)) as replay:
        replay.settimeout(1)
        replay.sendall(raw)
        answer = b""
        with contextlib.suppress(OSError):
            while data := replay.recv(65536):
                answer += data
    assert [each.uses_left for each in master.rings.open("home").tokens] == uses
    assert b"WELCOME" not in answer.upper()[200:]
    server.close()


def test_hundreds_of_idle_strangers_do_not_keep_a_device_out(master: Master) -> None:
    crowd = []
    for _ in range(500):
        with contextlib.suppress(OSError):
            each = socket.socket()
            each.settimeout(0.2)
            each.connect((HOST, master.port))
            crowd.append(each)
    drip = crowd[0]
    started = time.monotonic()
    for byte in b"\xff\0\0\0":
        with contextlib.suppress(OSError):
            drip.send(bytes([byte]))
    assert join(master.token(), limit_s=20)
    assert time.monotonic() - started < 20
    for each in crowd:
        each.close()


def test_requests_come_a_few_a_second_at_most(master: Master) -> None:
    token = msgspec.structs.replace(master.token(), secret=b"guess" + b"x" * 11)
    with zmq.Context() as context:
        guesser = context.socket(zmq.DEALER)
        guesser.linger = 0
        connect_securely(guesser, new_key_pair(), token.key, "join")
        guesser.connect(f"tcp://{token.address}")
        request = agent_messages.encode(Join(token.secret, device_facts("guesser")))
        for _ in range(200):
            guesser.send(request)
        answers = 0
        limit = time.monotonic() + 1.5
        while time.monotonic() < limit:
            if guesser.poll(50):
                guesser.recv()
                answers += 1
        guesser.close()
    assert 1 <= answers <= 30


def test_secrets_and_keys_are_readable_by_the_user_alone_and_tokens_are_not_kept(
    master: Master, tmp_path: Path
) -> None:
    token = master.token()
    identity(tmp_path / "me")
    files = list(tmp_path.rglob("*.json"))
    assert len(files) == 2
    for path in files:
        assert path.stat().st_mode & 0o077 == 0
        assert token.secret not in path.read_bytes()
        assert tokens.encode(token) not in path.read_text()
    assert "secret hidden" in repr(token)


@pytest.mark.parametrize("text", ["", "rt1.", "rt2.abc", "rt1.!!!", "hello", "rt1.AAAA"])
def test_malformed_tokens_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="token"):
        tokens.decode(text)


def test_a_token_survives_a_round_trip_and_no_cut(master: Master) -> None:
    token = master.token()
    text = tokens.encode(token)
    assert tokens.decode(f"  {text}\n") == token
    for cut in range(5, len(text) - 1, 7):
        with pytest.raises(UsageError):
            tokens.decode(text[:cut])


def test_listening_stays_on_the_named_address(master: Master) -> None:
    mine = psutil.Process().net_connections(kind="tcp")
    assert {each.laddr.ip for each in mine if each.status == psutil.CONN_LISTEN} == {HOST}


def test_a_taken_port_is_named_with_what_to_do(master: Master) -> None:
    with pytest.raises(UsageError, match=f"ports {master.port} and {master.port + 1}.*--listen {HOST}:PORT"):
        Hub("home", master.rings, HOST, master.port)
