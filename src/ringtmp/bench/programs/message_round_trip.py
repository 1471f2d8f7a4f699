"""Two processes send each other a small tensor: node to node over encrypted TCP, by bare ZeroMQ with the same encryption,
and by Gloo in the clear, in turns.

A ping and its answer over two is one way, and half the waiting for a processor is in it, as it is in a ring. Both sides do
what a compute process does: take mail, and wait for it where there is none. Bare ZeroMQ is a pair of sockets, one frame, a
blocking call: no Python but the two calls. The same two processes speak all three, round by round, so that a slow moment of
the machine hits all alike.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from statistics import median
from typing import Self

import msgspec
import torch
import torch.distributed as dist
import zmq

from ringtmp.bench.measuring.measurement_files import Result
from ringtmp.launch.worker_loop import WAIT_S
from ringtmp.runtime.mailbox import Endpoint
from ringtmp.transport.encryption import Gatekeeper, connect_securely, new_key_pair, serve_securely
from ringtmp.transport.zeromq import ZeroMQTransport
from ringtmp.wire.address import Address
from ringtmp.wire.messages import Activations, Gradients, Message

WAIT_LIMIT_S = 60.0
_ANYWHERE = ("tcp://127.0.0.1:*",) * 3


class Exchange(msgspec.Struct, frozen=True):
    size_bytes: int
    count: int  # pings of a round
    rounds: int
    meet: str = ""  # where Gloo's ranks find each other
    master: Address | None = None
    bare: tuple[str, str] = ("", "")  # where the bare socket listens, and its key


def main() -> None:
    """With an exchange as argument: measure, with a process of our own at the other end. Without: be that process."""
    if len(sys.argv) > 1:
        result = measure(msgspec.json.decode(sys.argv[1], type=Exchange))
        sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
    else:
        _answer(msgspec.json.decode(sys.stdin.buffer.readline(), type=Exchange))


def measure(exchange: Exchange) -> Result:
    """Seconds one way, the median of every round; the first round of each is its warm-up."""
    keys = new_key_pair()
    transport = ZeroMQTransport(0, _ANYWHERE, keys)
    endpoint = _neighbour(Endpoint(transport, "messages", 1))
    with tempfile.TemporaryDirectory(prefix="rtbench-") as folder, Bare() as bare:
        exchange = msgspec.structs.replace(
            exchange, meet=f"{folder}/meet", master=transport.address, bare=(bare.listen(), bare.keys.public)
        )
        command = [sys.executable, "-P", "-m", "ringtmp.bench.programs.message_round_trip"]
        other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            assert other.stdin is not None
            assert other.stdout is not None
            other.stdin.write(msgspec.json.encode(exchange) + b"\n")
            other.stdin.flush()
            endpoint.connect(1, msgspec.json.decode(other.stdout.readline(), type=Address))
            _join_gloo(0, exchange.meet)
            ours, raw, gloo = [], [], []
            for _ in range(exchange.rounds + 1):
                ours.append(median(_ping(endpoint, exchange)))
                raw.append(median(_ping_bare(bare, exchange)))
                gloo.append(median(_ping_gloo(exchange)))
            dist.destroy_process_group()
            other.stdin.close()
            other.wait(WAIT_LIMIT_S)
        finally:
            other.kill()
            other.wait()
            endpoint.close()
    facts = {"gloo_s": gloo[1:], "bare_s": raw[1:], "size_bytes": exchange.size_bytes, "count": exchange.count}
    return Result(tuple(ours[1:]), facts)


class Bare:
    """A ZeroMQ socket with CURVE and nothing around it."""

    def __init__(self) -> None:
        self.keys = new_key_pair()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._gatekeeper = Gatekeeper(self._context)
        self._gatekeeper.open_to_anyone("bare")  # a process of our own, on this machine
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.RCVTIMEO, int(1000 * WAIT_LIMIT_S))

    def listen(self) -> str:
        serve_securely(self.socket, self.keys, "bare")
        self.socket.bind("tcp://127.0.0.1:*")
        return self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def connect(self, endpoint: str, key: str) -> None:
        connect_securely(self.socket, self.keys, key, "bare")
        self.socket.connect(endpoint)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.socket.close(linger=0)
        self._gatekeeper.close()
        self._context.term()


def _neighbour(endpoint: Endpoint) -> Endpoint:
    """Under a plan in which the other is whatever it takes to send what is sent here."""
    endpoint.enter_plan(lambda who, node, message: True, lambda sender, message: None)
    return endpoint


def _ping(endpoint: Endpoint, exchange: Exchange) -> list[float]:
    tensor = torch.zeros(exchange.size_bytes // 4)
    found = []
    for number in range(exchange.count):
        began = time.perf_counter()
        endpoint.post(
            1, Activations(0, 0, 0, number, exchange.count, training=True, fresh=False, wants=(True,)), [tensor]
        )
        _awaited(endpoint)
        found.append((time.perf_counter() - began) / 2)
    return found


def _ping_bare(bare: Bare, exchange: Exchange) -> list[float]:
    data, found = bytes(exchange.size_bytes), []
    for _ in range(exchange.count):
        began = time.perf_counter()
        bare.socket.send(data)
        bare.socket.recv()
        found.append((time.perf_counter() - began) / 2)
    return found


def _ping_gloo(exchange: Exchange) -> list[float]:
    tensor, back = torch.zeros(exchange.size_bytes // 4), torch.zeros(exchange.size_bytes // 4)
    found = []
    for _ in range(exchange.count):
        began = time.perf_counter()
        dist.send(tensor, 1)
        dist.recv(back, 1)
        found.append((time.perf_counter() - began) / 2)
    return found


def _answer(exchange: Exchange) -> None:
    assert exchange.master is not None
    transport = ZeroMQTransport(1, _ANYWHERE, new_key_pair())
    endpoint = _neighbour(Endpoint(transport, "messages", 1))
    endpoint.connect(0, exchange.master)
    sys.stdout.buffer.write(msgspec.json.encode(transport.address) + b"\n")
    sys.stdout.buffer.flush()
    _join_gloo(1, exchange.meet)
    tensor, came = torch.zeros(exchange.size_bytes // 4), torch.zeros(exchange.size_bytes // 4)
    with Bare() as bare:
        bare.connect(*exchange.bare)
        for _ in range(exchange.rounds + 1):
            for number in range(exchange.count):
                _awaited(endpoint)
                endpoint.post(0, Gradients(0, 0, 0, number), [tensor])
            for _ in range(exchange.count):
                bare.socket.send(bare.socket.recv())
            for _ in range(exchange.count):
                dist.recv(came, 0)
                dist.send(tensor, 0)
    dist.destroy_process_group()
    endpoint.close()


def _awaited(endpoint: Endpoint) -> Message:
    limit = endpoint.clock() + WAIT_LIMIT_S
    while endpoint.clock() < limit:
        for mail in endpoint.collect():
            return mail.message
        endpoint.wait(WAIT_S)
    raise TimeoutError(f"no message within {WAIT_LIMIT_S:g} s")


def _join_gloo(rank: int, meet: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    limit = timedelta(seconds=WAIT_LIMIT_S)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=2, timeout=limit)


if __name__ == "__main__":
    main()
