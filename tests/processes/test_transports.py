"""One contract for every transport."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import distributed

from ringtmp.errors import UsageError
from ringtmp.runtime.mailbox import Endpoint
from ringtmp.transport import zeromq
from ringtmp.transport.base import Arrival, Channel, Transport
from ringtmp.transport.encryption import new_key_pair
from ringtmp.transport.faults import Faults, Shaped
from ringtmp.transport.in_process import Hub
from ringtmp.transport.slow_link import Slow
from ringtmp.transport.torch_distributed import TorchTransport
from ringtmp.transport.zeromq import ZeroMQTransport, ipc_address
from ringtmp.wire.address import NOWHERE
from ringtmp.wire.messages import Gradients


@pytest.fixture
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="rt") as path:
        yield path


@pytest.fixture(params=["memory", "zeromq", "torch", "shaped", "slow"])
def pair(request: pytest.FixtureRequest, folder: str) -> Iterator[tuple[Transport, Transport]]:
    """Nodes 1 and 2; the higher number connects."""
    if request.param == "zeromq":
        one: Transport = ZeroMQTransport(1, ipc_address(folder, 1).endpoints)
        two: Transport = ZeroMQTransport(2, ipc_address(folder, 2).endpoints)
        one.connect(2, ipc_address(folder, 2))
        two.connect(1, ipc_address(folder, 1))
    elif request.param == "torch":
        _, one, two = ranks(3)
        one.connect(2, NOWHERE)
        two.connect(1, NOWHERE)
    else:
        hub = Hub()
        one, two = hub.transport(1), hub.transport(2)
        if request.param == "slow":
            one, two = Slow(one, 0.002, 1e9), Slow(two, 0.002, 1e9)
        if request.param == "shaped":
            one, two = Shaped(one, Faults(), 0), Shaped(two, Faults(), 0)
    yield one, two
    closing = threading.Thread(target=one.close)  # both ends say so, and neither goes before the other has
    closing.start()
    two.close()
    closing.join()


def ranks(world: int) -> list[TorchTransport]:
    """As many processes would make them: none is done before all have begun."""
    store = distributed.HashStore()
    with ThreadPoolExecutor(world) as pool:
        groups = pool.map(
            lambda rank: distributed.ProcessGroupGloo(store, rank, world, timedelta(seconds=60)), range(world)
        )
        return [TorchTransport(group) for group in groups]


def arrivals(transport: Transport, count: int) -> list[Arrival]:
    got: list[Arrival] = []
    limit = time.monotonic() + 10
    while len(got) < count:
        assert time.monotonic() < limit, f"{len(got)} of {count} packets came"
        transport.wait(0.05)
        got += transport.receive()
    return got


def meet(one: Transport, two: Transport) -> None:
    """The connecting side speaks first; until then the listening side does not know it."""
    for channel in Channel:
        two.send(1, channel, [b"hello"])
    arrivals(one, len(Channel))


def test_packets_arrive_in_order_with_sender_channel_and_frames(pair: tuple[Transport, Transport]) -> None:
    one, two = pair
    meet(one, two)
    for number in range(50):
        two.send(1, Channel.TENSOR, [b"%d" % number, b"", b"x" * number])
    got = arrivals(one, 50)
    assert [(each.peer, each.channel) for each in got] == [(2, Channel.TENSOR)] * 50
    assert [[bytes(frame) for frame in each.frames] for each in got] == [[b"%d" % n, b"", b"x" * n] for n in range(50)]


def test_both_directions_and_all_channels_work(pair: tuple[Transport, Transport]) -> None:
    one, two = pair
    meet(one, two)
    for channel in Channel:
        one.send(2, channel, [bytes([channel])])
    assert sorted((each.peer, each.channel, bytes(each.frames[0])) for each in arrivals(two, 3)) == [
        (1, channel, bytes([channel])) for channel in Channel
    ]


def test_a_large_frame_is_whole_and_may_be_a_view(pair: tuple[Transport, Transport]) -> None:
    one, two = pair
    meet(one, two)
    big = os.urandom(1 << 20)
    two.send(1, Channel.BULK, [memoryview(big)])
    assert bytes(arrivals(one, 1)[0].frames[0]) == big


@pytest.mark.parametrize(("count", "size"), [(3 * zeromq.MOST_PACKETS + 5, 4), (3, zeromq.MOST_BYTES // 2 + 1)])
def test_one_who_sends_a_lot_is_read_a_part_at_a_time_and_nothing_is_lost(folder: str, count: int, size: int) -> None:
    """What is left over ends the next wait at once, though nothing new comes."""
    one, two = (ZeroMQTransport(node, ipc_address(folder, node).endpoints) for node in (1, 2))
    try:
        two.connect(1, ipc_address(folder, 1))
        for number in range(count):
            two.send(1, Channel.CONTROL, [number.to_bytes(4, "big") + bytes(size - 4)])
        got: list[int] = []
        while len(got) < count:
            assert one.wait(10), f"{len(got)} of {count} packets came"
            some = one.receive()
            assert len(some) <= zeromq.MOST_PACKETS
            assert sum(len(each.frames[0]) for each in some) <= zeromq.MOST_BYTES + size
            got += [int.from_bytes(each.frames[0][:4], "big") for each in some]
        assert got == list(range(count))
    finally:
        one.close()
        two.close()


def test_a_peer_that_never_stops_sending_does_not_hold_the_receiver(folder: str) -> None:
    one, two = (ZeroMQTransport(node, ipc_address(folder, node).endpoints) for node in (1, 2))
    stop = threading.Event()

    def flood() -> None:
        while not stop.is_set():
            for _ in range(100):
                two.send(1, Channel.CONTROL, [b"junk"])

    two.connect(1, ipc_address(folder, 1))
    flooding = threading.Thread(target=flood)
    flooding.start()
    try:
        for _ in range(5):
            assert one.wait(10)
            assert len(one.receive()) <= zeromq.MOST_PACKETS
    finally:
        stop.set()
        flooding.join()
        two.hang_up(1)  # what it still has is not waited for
        one.close()
        two.close()


def test_sending_to_nobody_does_not_block_or_raise(pair: tuple[Transport, Transport]) -> None:
    one, _ = pair
    for _ in range(100):
        one.send(7, Channel.CONTROL, [b"anyone?"])
    assert one.receive() == []


def test_a_line_that_is_down_takes_nothing_and_raises_nothing(folder: str) -> None:
    """A connection whose handshake failed leaves a socket without a line for a moment; a node must not die of it."""
    transport = ZeroMQTransport(2, ipc_address(folder, 2).endpoints)
    try:
        transport.connect(1, ipc_address(folder, 1))
        for (_, channel), dealer in transport._dealers.items():
            dealer.disconnect(ipc_address(folder, 1).endpoints[channel])
            transport.send(1, channel, [b"header", b"x" * 100_000])
    finally:
        transport.close()


def test_whoever_is_no_peer_of_the_next_generation_is_hung_up_on(folder: str) -> None:
    """What is said to one who is gone for good would wait for it in memory."""
    transport = ZeroMQTransport(3, ipc_address(folder, 3).endpoints)
    endpoint = Endpoint(transport, "ring", 1)
    try:
        endpoint.connect(0, ipc_address(folder, 0))  # the master
        endpoint.connect_all({1: ipc_address(folder, 1), 2: ipc_address(folder, 2)})
        endpoint.connect_all({2: ipc_address(folder, 2)})
        assert {peer for peer, _ in transport._dealers} == {0, 2}
        assert len(transport._sources) == len(Channel) * 3, "its own sockets, and two peers"
    finally:
        transport.close()


@pytest.mark.long
def test_who_connects_before_the_other_side_knows_its_key_gets_through_in_the_end() -> None:
    """Everyone is told of its peers at the same time, and some hear of it later than others."""
    one, two = (ZeroMQTransport(node, ("tcp://127.0.0.1:*",) * 3, new_key_pair()) for node in (1, 2))
    try:
        two.connect(1, one.address)
        limit = time.monotonic() + 10
        assert one._gatekeeper is not None
        while one._gatekeeper.refused < 3:  # every channel has been turned away once
            assert time.monotonic() < limit
            two.wait(0.01)
        one.connect(2, two.address)
        arrived: list[Arrival] = []
        while not arrived:
            assert time.monotonic() < limit, "never let in"
            two.send(1, Channel.TENSOR, [b"hello"])
            one.wait(0.1)
            arrived = one.receive()
        assert bytes(arrived[0].frames[0]) == b"hello"
    finally:
        one.close()
        two.close()


def test_waiting_ends_without_mail_after_its_time(pair: tuple[Transport, Transport]) -> None:
    one, _ = pair
    started = time.monotonic()
    one.wait(0.05)
    assert one.receive() == []
    assert time.monotonic() - started < 2


def test_a_socket_path_too_long_for_the_system_is_refused() -> None:
    with pytest.raises(UsageError, match="set TMPDIR to a shorter folder"):
        ipc_address("/tmp/" + "x" * 120, 1)


def test_a_slow_line_delays_by_latency_and_size_and_a_busy_receiver_by_nothing() -> None:
    """By a clock that stands still until told: 1 ms and 2 ms of latency, 1000 bytes a second at the sender."""
    now = [0.0]
    hub = Hub()
    one = Slow(hub.transport(1), 0.001, 1000, lambda: now[0])
    two = Slow(hub.transport(2), 0.002, None, lambda: now[0])
    one.send(2, Channel.TENSOR, [b"x" * 100])
    one.send(2, Channel.CONTROL, [b"y" * 100])
    for at, arrived in ((0.1, 0), (0.1029, 0), (0.1031, 1), (0.2029, 0), (0.2031, 1)):
        now[0] = at
        assert len(two.receive()) == arrived, at
    one.send(2, Channel.TENSOR, [b"z"])
    now[0] = 5.0  # busy computing all the while: the packet has long been there
    assert len(two.receive()) == 1


class Cable:
    """A Unix-socket line between two nodes that a test can pull out and plug in again."""

    def __init__(self, listen: Path, target: Path) -> None:
        self._target = str(target)
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(listen))
        self._server.listen(16)
        self._lock = threading.Lock()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self.made = 0
        self._closing = False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            far = socket.socket(socket.AF_UNIX)
            try:
                far.connect(self._target)
            except OSError:
                near.close()
                continue
            with self._lock:
                self._pairs.append((near, far))
                self.made += 1
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    @staticmethod
    def _carry(source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                sink.sendall(data)
        except OSError:
            pass
        finally:
            for each in (source, sink):
                each.close()

    def pull(self) -> None:
        """Break every connection; what was under way is lost."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for each in pair:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._server.close()
        self.pull()


def test_a_connection_broken_again_and_again_loses_nothing(folder: str) -> None:
    """Node 2 reaches node 1 through a cable that is pulled in the middle of large messages."""
    base = Path(folder)
    one = Endpoint(ZeroMQTransport(1, ipc_address(folder, 1).endpoints), "ring", 1)
    two = Endpoint(ZeroMQTransport(2, ipc_address(folder, 2).endpoints), "ring", 1)
    cables = [Cable(base / f"9{end}", base / f"1{end}") for end in ("-c", "-t", "-b")]
    two.connect(1, ipc_address(folder, 9))
    sent, got, back = 0, [], []
    limit = time.monotonic() + 60
    pulls = 0
    try:
        while len(got) < sent or len(back) < 120 or two.traffic.counters().resent == 0 or sent < 120:
            assert time.monotonic() < limit, f"{len(got)} of {sent} messages came, and {len(back)} of 120 back"
            if (
                sent < 120 or two.traffic.counters().resent == 0
            ):  # until something was under way when the cable was pulled
                two.post(1, Gradients(1, 0, 0, sent), [torch.full((200_000,), float(sent))])
                if got:
                    one.post(2, Gradients(1, 0, 0, len(got)), [torch.zeros(3)])
                sent += 1
                if sent % 17 == 0:
                    pulls += 1
                    for cable in cables:
                        cable.pull()
            got += one.collect()
            back += two.collect()
            if sent >= 120 and len(back) < 120 and one.flushed():
                one.post(2, Gradients(1, 0, 0, 0), [torch.zeros(3)])
            one.wait(0.005)
    finally:
        one.close()
        two.close()
        for cable in cables:
            cable.close()
    assert [mail.message.microbatch for mail in got] == list(range(sent))  # type: ignore[union-attr]
    assert all(mail.tensors[0].eq(float(number)).all() for number, mail in enumerate(got))  # type: ignore[union-attr]
    assert pulls >= 5
    assert max(cable.made for cable in cables) > 1


def test_sockets_that_a_cleaner_removed_are_found_again_and_who_is_connected_notices_nothing(folder: str) -> None:
    names = [ipc_address(folder, node) for node in range(4)]
    one, two, three = (ZeroMQTransport(node, names[node].endpoints) for node in (1, 2, 3))
    try:
        two.connect(1, names[1])
        meet(one, two)
        for name in os.listdir(folder):
            os.unlink(os.path.join(folder, name))
        one.listen_again()
        three.connect(1, names[1])
        two.send(1, Channel.TENSOR, [b"still here"])
        three.send(1, Channel.TENSOR, [b"new here"])
        assert {each.peer for each in arrivals(one, 2)} == {2, 3}
        one.send(3, Channel.TENSOR, [b"welcome"])
        assert arrivals(three, 1)[0].peer == 1
        shutil.rmtree(folder)
        one.listen_again()  # nothing can be done; whoever made the folder makes it again first
        two.send(1, Channel.CONTROL, [b"still here"])
        assert arrivals(one, 1)[0].peer == 2
    finally:
        for each in (one, two, three):
            each.close()
    os.makedirs(folder, exist_ok=True)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("end", ["listen", "connect"])
def test_any_error_while_binding_or_connecting_ends_in_that_error_and_not_in_a_wait(folder: str, end: str) -> None:
    """A context waits for ever for a socket that nobody closes: seen with a name that is no text."""
    odd = ipc_address(folder + "/\udcc3", 1)
    if end == "listen":
        with pytest.raises(UsageError, match="cannot listen on"):
            ZeroMQTransport(1, (*ipc_address(folder, 1).endpoints[:2], odd.endpoints[2]))
    else:
        one = ZeroMQTransport(2, ipc_address(folder, 2).endpoints)
        with pytest.raises(UnicodeEncodeError):
            one.connect(1, odd)
        one.close()


def test_a_rank_that_says_it_closes_is_not_gone_and_one_whose_connection_breaks_is() -> None:
    zero, one, two = ranks(3)
    for each, peers in ((zero, (1, 2)), (one, (0,)), (two, (0,))):
        for peer in peers:
            each.connect(peer, NOWHERE)
    closing = threading.Thread(target=one.close)
    closing.start()
    two.send(0, Channel.CONTROL, [b"still here"])
    assert bytes(arrivals(zero, 1)[0].frames[0]) == b"still here"
    assert zero.gone() == []
    two._lanes[0]._group.send([torch.tensor([7, -1])], 0, 0).wait()  # no channel, no length: as good as broken
    limit = time.monotonic() + 10
    while zero.gone() != [2]:
        assert time.monotonic() < limit
        time.sleep(0.01)
    zero.close()
    closing.join()
