"""The budget of docs/performance.md: what each part of a small message costs, line by line.

    python scripts/measure_message_cost.py [--size 1024] [--times 300]        a few seconds on one core

Every line is timed twice: in a loop, and after 4 MiB of other memory have been touched, as by the layers that a node computes
between two messages. Microseconds of one thread, medians.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import msgspec
import torch
import zmq

from ringtmp.runtime.mailbox import Endpoint
from ringtmp.transport.in_process import Hub
from ringtmp.wire import packets, tensors
from ringtmp.wire.messages import PROTOCOL, Activations
from ringtmp.wire.reliable_link import Link

OTHERS = torch.ones(2**20)


def message() -> Activations:
    return Activations(0, 0, 0, 3, 100, training=True, fresh=False, wants=(True,))


def lines(tensor: torch.Tensor) -> dict[str, tuple[Callable[..., Any], Callable[[], Any]]]:
    """What is timed -> the call, and what gives its argument (untimed)."""
    specs, views = tensors.payload([tensor], packets.INLINE_BYTES)
    spec = specs[0]
    assert spec is not None
    whole = msgspec.structs.replace(message(), tensors=specs)
    body, data = packets.encode_message(whole), bytes(views[0])
    packet = packets.Packet(PROTOCOL, "ring", 1, packets.DATA, 1, 0, body, data)
    frame = packets.encode_packet(packet)
    left, right = Link("ring", 1, patient=True), Link("ring", 1, patient=True)

    def sent() -> list[Any]:
        left.send(message(), [tensor], 1.0)
        return [bytes(each) for each in left.outbox.popleft()]

    def send(_: object) -> None:
        left.send(message(), [tensor], 1.0)
        left.outbox.pop()
        left._unacked.pop()
        left._next_seq -= 1

    sockets: list[zmq.Socket[bytes]] = [zmq.Context.instance().socket(zmq.DEALER) for _ in range(9)]
    poller = zmq.Poller()
    for each in sockets:
        each.linger = 0
        poller.register(each, zmq.POLLIN)
    mailbox = Endpoint(Hub().transport(0), "ring", 1)
    return {
        "send: description and bytes of the tensor": (
            lambda _: tensors.payload([tensor], packets.INLINE_BYTES), lambda: None
        ),
        "send: message and packet become one frame": (
            lambda _: packets.encode_packet(
                packets.Packet(PROTOCOL, "ring", 1, packets.DATA, 1, 0, packets.encode_message(whole), data)
            ), lambda: None
        ),
        "send: the link as a whole": (send, lambda: None),
        "receive: frame becomes packet and message": (
            lambda _: packets.decode_message(packets.decode_packet(frame).body), lambda: None
        ),
        "receive: memory for the tensor": (lambda _: tensors.Landing(spec), lambda: None),
        "receive: its bytes": (lambda landing: landing.fill(data), lambda: tensors.Landing(spec)),
        "receive: the link as a whole": (lambda frames: right.receive(frames, 1.0), sent),
        "mailbox with nothing in it": (lambda _: mailbox.collect(), lambda: None),
        "a poll over nine sockets": (lambda _: poller.poll(0), lambda: None),
        "asking a socket whether there is more": (lambda _: sockets[0].getsockopt(zmq.EVENTS), lambda: None),
    }  # fmt: skip


def took_us(call: Callable[..., Any], prepare: Callable[[], Any], times: int, others: bool) -> float:
    found = []
    for _ in range(times):
        given = prepare()
        if others:
            OTHERS.add_(1.0)
        began = time.perf_counter()
        call(given)
        found.append(time.perf_counter() - began)
    return 1e6 * median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=1024, help="bytes of the tensor")
    parser.add_argument("--times", type=int, default=300)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print("| what | in a loop | after other work |\n|---|---:|---:|")
    for name, (call, prepare) in lines(torch.zeros(given.size // 4)).items():
        hot, cold = (took_us(call, prepare, given.times, others) for others in (False, True))
        print(f"| {name} | {hot:.1f} | {cold:.1f} |", flush=True)


if __name__ == "__main__":
    main()
