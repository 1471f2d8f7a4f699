"""Contract 5: tensors keep their layout, links deliver once and in order, strange bytes raise ProtocolError alone."""

from __future__ import annotations

import random
import resource
from collections import deque
from itertools import pairwise
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringtmp.errors import ProtocolError
from ringtmp.system.resources import set_threads
from ringtmp.wire.messages import PROTOCOL, Crossing, Gradients, Message
from ringtmp.wire.packets import INLINE_BYTES, PIECE_BYTES, Packet, decode_packet, encode_packet
from ringtmp.wire.reliable_link import ACK_AFTER_BYTES, ACK_AFTER_S, PROBE_AFTER_S, Delivery, Link
from ringtmp.wire.tensors import Landing, TensorSpec, check, describe


def round_trip(tensor: torch.Tensor) -> torch.Tensor:
    spec, view = describe(tensor)
    check(spec, 2**30)
    landing = Landing(spec)
    for start in range(0, len(view), 7):
        landing.place(start, bytes(view[start : start + 7]))
    return landing.finish()


def in_one_frame(tensor: torch.Tensor) -> torch.Tensor:
    """Between a hole and another tensor, as a small message travels."""
    sender, receiver = Link("ring", 1), Link("ring", 1)
    sender.send(Gradients(1, 0, 0, 0), [None, tensor, torch.arange(3)], 0.0)
    (frame,) = sender.outbox.popleft()
    delivery = receiver.receive([bytes(frame)], 0.0)
    assert delivery is not None
    hole, got, behind = delivery.tensors
    assert hole is None
    assert got is not None
    assert behind is not None
    assert behind.tolist() == [0, 1, 2]
    for counters, other in ((sender.counters, receiver.counters),):
        assert counters.payload_sent == other.payload_received == tensor.numel() * tensor.element_size() + 24
        assert counters.overhead_sent == other.overhead_received == len(frame) - counters.payload_sent
    return got


@pytest.mark.parametrize("way", [round_trip, in_one_frame])
@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4),
        torch.randn(()),
        torch.empty(0, 5),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(6, 4).t(),
        torch.randn(5, 6)[:, ::2],
        torch.randn(5, 6)[:, 1:],
        torch.randn(5, 1).expand(5, 4),
        torch.randn(1, 3, 1, 2).permute(2, 1, 0, 3),
        torch.randn(8).to(torch.bfloat16),
        torch.tensor([True, False]),
        torch.arange(5),
        torch.tensor([float("nan"), float("inf"), -0.0]),
        torch.randn(3, dtype=torch.complex64).conj().imag,  # its sign is not in its memory
    ],
)
def test_a_tensor_arrives_with_its_bits_strides_and_alignment(tensor: torch.Tensor, way: Any) -> None:
    got = way(tensor)
    assert got.dtype == tensor.dtype
    assert got.stride() == tensor.stride()
    assert (
        got.contiguous().view(torch.uint8).equal(tensor.contiguous().view(torch.uint8))
        if tensor.dim()
        else got.equal(tensor)
    )
    if tensor.numel():
        assert got.data_ptr() % 64 == tensor.data_ptr() % 64


@pytest.mark.parametrize(
    "spec",
    [
        TensorSpec("float32", (2**40,), (1,)),
        TensorSpec("float32", (2,), (2**50,)),
        TensorSpec("float32", (2**20, 2**20), (0, 0)),
        TensorSpec("float32", (-1,), (1,)),
        TensorSpec("float32", (2,), (-1,)),
        TensorSpec("float32", (2, 2), (1,)),
        TensorSpec("float99", (2,), (1,)),
        TensorSpec("float32", (2,), (1,), 16),
        TensorSpec("float32", (1,) * 17, (1,) * 17),
    ],
)
def test_descriptions_no_honest_peer_sends_are_refused_before_memory_is_taken(spec: TensorSpec) -> None:
    with pytest.raises(ProtocolError):
        check(spec, 2**24)


def exchange(sizes: list[int], drop: float, seed: int, patient: bool) -> tuple[list[Delivery], Link]:
    """Everything one link sends reaches the other, over a line that loses, doubles and disorders packets."""
    luck = random.Random(seed)
    left, right = Link("ring", 1, patient=patient), Link("ring", 1, patient=patient)
    got: list[Delivery] = []
    now = 0.0
    for number, size in enumerate(sizes):
        left.send(Gradients(1, 0, 0, number), [torch.full((size,), float(number)), None], now)
    for _ in range(5000):
        now += PROBE_AFTER_S
        for sender, receiver in ((left, right), (right, left)):
            packets = [[bytes(frame) for frame in sender.outbox.popleft()] for _ in range(len(sender.outbox))]
            if luck.random() < drop:
                luck.shuffle(packets)
            for packet in packets:
                for _ in range(luck.choices([0, 1, 2], [drop, 1 - 2 * drop, drop])[0]):
                    delivery = receiver.receive(packet, now)
                    if delivery is not None:
                        got.append(delivery)
            receiver.tick(now)
        if left.idle and len(got) == len(sizes):
            return got, left
    raise AssertionError(f"{len(got)} of {len(sizes)} messages arrived")


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 100, PIECE_BYTES // 4, PIECE_BYTES // 2 + 3]), min_size=1, max_size=8),
    drop=st.sampled_from([0.0, 0.1, 0.3]),
    seed=st.integers(0, 10**6),
    patient=st.booleans(),
)
def test_every_message_arrives_once_and_in_order(sizes: list[int], drop: float, seed: int, patient: bool) -> None:
    got, left = exchange(sizes, drop, seed, patient)
    assert [delivery.message.microbatch for delivery in got] == list(range(len(sizes)))  # type: ignore[union-attr]
    for number, (size, delivery) in enumerate(zip(sizes, got, strict=True)):
        tensor, hole = delivery.tensors
        assert hole is None
        assert tensor is not None
        assert tensor.equal(torch.full((size,), float(number)))
    if drop == 0:
        assert left.counters.resent == 0
        assert left.counters.payload_sent == 4 * sum(sizes)


def test_large_tensors_travel_in_pieces() -> None:
    link = Link("ring", 1)
    link.send(Gradients(1, 0, 0, 0), [torch.zeros(PIECE_BYTES)], 0.0)
    assert len(link.outbox) == 4
    assert all(sum(len(frame) for frame in packet[1:]) <= PIECE_BYTES for packet in link.outbox)


def test_other_generations_and_rings_are_dropped_and_counted() -> None:
    here = Link("ring", 2)
    for ring, generation in (("ring", 1), ("other", 2)):
        there = Link(ring, generation)
        there.send(Gradients(1, 0, 0, 0), [], 0.0)
        assert here.receive(there.outbox.popleft(), 0.0) is None
    assert here.counters.foreign == 2
    here.tick(0.0)
    assert not here.outbox, "a stranger gets no answer"


def test_another_protocol_is_refused_with_both_numbers() -> None:
    packet = encode_packet(Packet(PROTOCOL + 1, "ring", 1, "d", 1))
    with pytest.raises(ProtocolError, match=f"protocol {PROTOCOL + 1}, this node speaks {PROTOCOL}"):
        Link("ring", 1).receive([packet], 0.0)


def test_more_bytes_than_announced_are_refused() -> None:
    sender, receiver = Link("ring", 1), Link("ring", 1)
    sender.send(Gradients(1, 0, 0, 0), [torch.zeros(INLINE_BYTES)], 0.0)
    header, piece = sender.outbox.popleft()
    with pytest.raises(ProtocolError, match="more tensor bytes"):
        receiver.receive([header, bytes(piece) + b"!"], 0.0)


def test_small_messages_travel_in_one_frame_and_others_do_not() -> None:
    link = Link("ring", 1)
    for size in (0, 1, INLINE_BYTES, INLINE_BYTES + 1, PIECE_BYTES):
        link.send(Gradients(1, 0, 0, 0), [torch.zeros(size, dtype=torch.uint8)], 0.0)
    assert [len(frames) for frames in link.outbox] == [1, 1, 1, 2, 2]


def test_what_was_sent_small_may_change_at_once() -> None:
    sender, receiver, tensor = Link("ring", 1), Link("ring", 1), torch.ones(4)
    sender.send(Gradients(1, 0, 0, 0), [tensor], 0.0)
    tensor.zero_()
    delivery = receiver.receive(sender.outbox.popleft(), 0.0)
    assert delivery is not None
    assert delivery.tensors[0].tolist() == [1.0] * 4  # type: ignore[union-attr]


@pytest.mark.parametrize("inline", [b"", b"x" * 7, b"x" * 9, b"x" * 800])
def test_other_bytes_in_a_header_than_announced_are_refused(inline: bytes) -> None:
    sender = Link("ring", 1)
    sender.send(Gradients(1, 0, 0, 0), [torch.zeros(1), torch.zeros(1)], 0.0)
    packet = decode_packet(sender.outbox.popleft()[0])
    bent = encode_packet(msgspec.structs.replace(packet, inline=inline))
    with pytest.raises(ProtocolError, match="tensor bytes than the message announced"):
        Link("ring", 1).receive([bent], 0.0)
    with pytest.raises(ProtocolError, match=r"tensor bytes in a header and behind it|more tensor bytes"):
        Link("ring", 1).receive([bent, b"x" * 9], 0.0)


@settings(max_examples=400, deadline=None)
@given(
    frames=st.lists(st.binary(max_size=60), max_size=3),
    flips=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=4),
)
def test_strange_bytes_raise_protocol_errors_alone(frames: list[bytes], flips: list[tuple[int, int]]) -> None:
    """Pure noise, and an honest packet with bytes changed."""
    sender = Link("ring", 1)
    sender.send(Gradients(1, 0, 0, 0), [torch.zeros(3)], 0.0)
    honest = [bytearray(frame) for frame in sender.outbox.popleft()]
    for position, value in flips:
        honest[0][position % len(honest[0])] = value
    for packet in (frames, [bytes(frame) for frame in honest], [bytes(honest[0]), *frames]):
        try:
            Link("ring", 1, limit_bytes=2**20).receive(packet, 0.0)
        except ProtocolError:
            continue


def test_a_message_must_be_one_of_ours() -> None:
    body = msgspec.msgpack.encode(["no such kind", 1])
    packet = encode_packet(Packet(PROTOCOL, "ring", 1, "d", 1, 0, body))
    with pytest.raises(ProtocolError, match="not a message"):
        Link("ring", 1).receive([packet], 0.0)


def test_tensors_the_plan_does_not_know_are_refused_before_memory_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = (Crossing("float32", (8,), True), Crossing("int64", (), True))

    def inspect(message: Message) -> None:
        assert isinstance(message, Gradients)
        if not all(spec is None or each.allows(spec) for each, spec in zip(plan, message.tensors, strict=True)):
            raise ProtocolError("not in the plan")

    good = [torch.zeros(3, 8), torch.zeros(3, dtype=torch.long)]
    wrong = [
        [torch.zeros(3, 9), good[1]],
        [torch.zeros(3, 8, dtype=torch.float64), good[1]],
        [good[0], torch.zeros(3, 1, dtype=torch.long)],
    ]
    for tensors, fine in ((good, True), ([torch.zeros(5, 8), None], True), *((each, False) for each in wrong)):
        sender, receiver = Link("ring", 1), Link("ring", 1, inspect=inspect)
        sender.send(Gradients(1, 0, 0, 0), tensors, 0.0)
        if fine:
            assert receiver.receive(sender.outbox.popleft(), 0.0) is not None
            continue
        monkeypatch.setattr("ringtmp.wire.reliable_link.Landing", lambda spec: pytest.fail("memory was taken"))
        with pytest.raises(ProtocolError, match="not in the plan"):
            receiver.receive(sender.outbox.popleft(), 0.0)


def test_a_patient_link_lets_its_acknowledgement_ride_on_what_it_sends_anyway() -> None:
    left, right = Link("ring", 1, patient=True), Link("ring", 1, patient=True)

    def pass_on(sender: Link, receiver: Link, now: float) -> int:
        count = len(sender.outbox)
        for _ in range(count):
            receiver.receive([bytes(frame) for frame in sender.outbox.popleft()], now)
        receiver.tick(now)
        return count

    left.send(Gradients(1, 0, 0, 0), [torch.zeros(10)], 0.0)
    assert pass_on(left, right, 0.0) == 1
    assert not right.outbox, "it waits for something to ride on"
    assert not left.idle
    right.send(Gradients(1, 0, 1, 0), [torch.zeros(10)], 0.01)
    assert pass_on(right, left, 0.01) == 1
    assert left.idle
    left.tick(0.01 + ACK_AFTER_S)
    assert pass_on(left, right, 0.1) == 1, "nothing to ride on for so long: it goes alone"
    assert right.idle
    quarter = torch.zeros(ACK_AFTER_BYTES // 16)
    for number in range(3):
        left.send(Gradients(1, 0, 0, 1 + number), [quarter], 0.2)
        pass_on(left, right, 0.2)
        assert not right.outbox, "pieces of a pass do not cost a packet each in return"
    left.send(Gradients(1, 0, 0, 4), [quarter], 0.2)
    pass_on(left, right, 0.2)
    assert pass_on(right, left, 0.2) == 1, "so much holds the sender's memory: at once"
    assert left.idle


def test_tensors_that_arrive_lie_on_a_boundary_in_memory_that_was_used_before() -> None:
    """What a microbatch brought is freed with its graph, and the next one lands there: no page is taken anew."""
    set_threads(1)
    ours, theirs = Link("ring", 1), Link("ring", 1)
    held: deque[torch.Tensor] = deque(maxlen=4)  # a window
    sent = torch.randn(256, 1024)  # a megabyte: 256 pages
    faults: list[int] = []
    for number in range(128):
        if number % 32 == 0:
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
        ours.send(Gradients(0, 0, 0, number), [sent], 0.0)
        while ours.outbox:
            delivery = theirs.receive(ours.outbox.popleft(), 0.0)
        assert delivery is not None
        (got,) = delivery.tensors
        assert got is not None
        assert got.data_ptr() % 64 == 0
        held.append(got)
        theirs.tick(0.0)
        while theirs.outbox:
            ours.receive(theirs.outbox.popleft(), 0.0)
    # Whatever else the process does meanwhile takes pages too: the quietest of the rounds counts.
    taken = [after - before for before, after in pairwise(faults)]
    assert min(taken) < 32 * 256 / 10, f"{taken} pages for 32 MiB that arrived, round by round"
