"""Everything that decodes foreign bytes, under a hundred thousand damaged messages (a million in `make long`)."""

from __future__ import annotations

import random
import time
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from ringtmp.errors import DoesNotFit, ProtocolError
from ringtmp.launch import agent_messages
from ringtmp.launch.agent_messages import Heartbeat, Join, Prepare
from ringtmp.launch.device_facts import device_facts
from ringtmp.model import portable_layer
from ringtmp.model.export import Exporter
from ringtmp.model.run_graph import Program
from ringtmp.wire.address import Address
from ringtmp.wire.messages import Activations, Gradients, Hello, Inspected, Norms, Place
from ringtmp.wire.reliable_link import Link


def honest() -> tuple[list[list[bytes]], list[bytes], list[bytes]]:
    """Packets, layers and agent speech as they really are."""
    link = Link("ring", 1)
    layer, _ = Exporter().export("x", nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)), torch.randn(3, 1, 8, 8))
    encoded = portable_layer.encode(layer)
    for message, tensors in (
        (Activations(1, 0, 1, 0, 2, True, False, (True,)), [torch.randn(4, 4).t()]),
        (Gradients(1, 0, 0, 0), [None, torch.randn(3)]),
        (Norms(1, 0), [torch.randn(2)]),
        (Hello(1, "2.13", "AVX2"), []),
        (Inspected((1, 2)), []),
        (Place(0, encoded, (("weight", "step"),)), [torch.randn(2)]),
    ):
        link.send(message, tensors, 0.0)  # type: ignore[arg-type]
    packets = [[bytes(frame) for frame in packet] for packet in link.outbox]
    address = Address(("tcp://127.0.0.1:1",) * 3, "k" * 40)
    talk = [
        agent_messages.encode(each)
        for each in (
            Join(b"s" * 16, device_facts("a")),
            Heartbeat("i", device_facts("a")),
            Prepare("r", 1, 1, address, 1),
        )
    ]
    return packets, [encoded], talk


def damaged(luck: random.Random, data: bytes) -> bytes:
    """A few bytes changed, cut, doubled, or pure noise."""
    raw = bytearray(data)
    kind = luck.random()
    if kind < 0.05:
        return luck.randbytes(luck.randrange(200))
    for _ in range(luck.choice((1, 1, 1, 2, 3, 8))):
        if not raw:
            break
        at = luck.randrange(len(raw))
        if kind < 0.7:
            raw[at] = luck.choice((0, 0x7F, 0x80, 0xFF, 0xC1, 0xDD, 0xDF, 0xC6, luck.randrange(256)))
        elif kind < 0.85:
            del raw[at : at + luck.randrange(1, 6)]
        else:
            raw[at:at] = raw[max(0, at - 4) : at]
    return bytes(raw)


def campaign(count: int, seed: int) -> int:
    """Feeds `count` damaged messages to every decoder; returns how many were refused."""
    luck = random.Random(seed)
    packets, layers, talk = honest()
    refused = 0
    for number in range(count):
        try:
            which = number % 10
            if which < 6:
                packet = [damaged(luck, frame) if luck.random() < 0.7 else frame for frame in luck.choice(packets)]
                link = Link("ring", 1, limit_bytes=2**20)
                link._expected = luck.choice((1, 1, 2, 3, 4, 5, 6))
                link.receive(packet, 0.0)
                link.tick(0.0)
            elif which < 8:
                layer = portable_layer.decode(damaged(luck, layers[0]))
                Program(layer.train, "meta")
                Program(layer.evaluate, "meta")
            else:
                decoder: Any = luck.choice((agent_messages.from_agent, agent_messages.from_master))
                agent_messages.decode(
                    decoder, damaged(luck, luck.choice(talk)), luck.choice(list(agent_messages.Heard))
                )
        except (ProtocolError, DoesNotFit):
            refused += 1
    return refused


def run(count: int, seed: int) -> None:
    campaign(2000, seed)  # whatever is loaded on first use
    process = psutil.Process()
    before = process.memory_info().rss
    started = time.monotonic()
    refused = campaign(count, seed + 1)
    grown = process.memory_info().rss - before
    print(
        f"{count} messages in {time.monotonic() - started:.0f} s, {refused} refused, memory grew by {grown / 2**20:.1f} MiB"
    )
    assert refused > count // 4, "the damage does no damage"
    assert grown < 64 * 2**20


def test_thirty_thousand_damaged_messages_raise_nothing_but_protocol_errors() -> None:
    run(30_000, 1)


@pytest.mark.long
def test_a_million_damaged_messages_raise_nothing_but_protocol_errors() -> None:
    run(1_000_000, 2)
