"""Packets <-> frames. A packet is one header frame and up to 256 KiB of tensor bytes in further frames. Tensors that are small
lie in the header itself: a frame costs the same whatever it carries.

    Data   begins a message: its header, then the first tensor bytes
    More   continues it
    Ack    everything up to `seq` has arrived        Nack   `seq` is missing: send again from there
    Probe  has everything up to `seq` arrived?       Answer to a probe, with what has arrived

Anything that does not decode is a ProtocolError, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ringtmp import untrusted
from ringtmp.errors import ProtocolError
from ringtmp.wire.messages import PROTOCOL, Message

PIECE_BYTES = 256 * 1024
#: Messages with no more tensor bytes travel in one frame. Copying them costs less than a second frame.
INLINE_BYTES = 16 * 1024
#: A header never comes near this; a layer's graph travels inside one.
MAX_HEADER_BYTES = 20 * 1024 * 1024
Frame = bytes | memoryview


class Packet(msgspec.Struct, frozen=True, array_like=True):
    protocol: int
    ring: str
    generation: int
    kind: str  # one of KINDS
    seq: int
    number: int = 0  # of a probe and its answer; on data: everything up to it has arrived from the other side
    body: bytes = b""
    inline: bytes = b""  # all tensor bytes of a small message, one tensor after the other


DATA, MORE, ACK, NACK, PROBE, ANSWER = KINDS = ("d", "m", "a", "n", "p", "w")

_encoder = msgspec.msgpack.Encoder()
_packets = msgspec.msgpack.Decoder(Packet)
_messages: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode_packet(packet: Packet) -> bytes:
    return _encoder.encode(packet)


def decode_packet(frame: Frame) -> Packet:
    packet = untrusted.decode(_packets, frame, "a packet", MAX_HEADER_BYTES)
    if packet.protocol != PROTOCOL:
        raise ProtocolError(f"protocol {packet.protocol}, this node speaks {PROTOCOL}: use one version everywhere")
    if packet.kind not in KINDS or packet.seq < 0:
        raise ProtocolError(f"unknown packet kind {packet.kind!r} or bad number {packet.seq}")
    return packet


def encode_message(message: Message) -> bytes:
    return _encoder.encode(message)


def decode_message(data: bytes) -> Message:
    return untrusted.decode(_messages, data, "a message", MAX_HEADER_BYTES)


def pieces(views: Sequence[memoryview | bytes]) -> list[list[memoryview | bytes]]:
    """Tensor bytes grouped into packets of at most 256 KiB. A piece never reaches over the end of a tensor."""
    if sum(map(len, views)) <= PIECE_BYTES:
        return [[view for view in views if len(view)]]
    groups: list[list[memoryview | bytes]] = [[]]
    room = PIECE_BYTES
    for view in views:
        start = 0
        while start < len(view):
            if room == 0:
                groups.append([])
                room = PIECE_BYTES
            piece = view[start : start + room]
            groups[-1].append(piece)
            start += len(piece)
            room -= len(piece)
    return groups
