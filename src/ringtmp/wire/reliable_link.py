"""One end of a link between two nodes: every message arrives once and in order, or the link says why not.

ZeroMQ reconnects silently and loses what was in flight, so packets are numbered and kept until acknowledged. A
receiver that sees a gap asks for the missing packet (Nack) and the sender goes back to it. When the last packets
before a silence were lost nobody sees a gap, so a sender without news probes: a probe travels behind everything sent
before it, hence an answer that lacks some of it proves the loss. No timer ever decides that something was lost.

Every packet tells what has arrived from the other side. A patient link therefore keeps an acknowledgement for the next
packet it sends anyway (activations one way, gradients the other), and says it alone only when that takes long or when much
has come: a packet costs the same whatever it carries.

Pure: frames in, frames out; the clock comes in as an argument.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import torch

from ringtmp.errors import DoesNotFit, ProtocolError
from ringtmp.units import bytes_text
from ringtmp.wire.messages import PROTOCOL, Message, Specs
from ringtmp.wire.packets import (
    ACK,
    ANSWER,
    DATA,
    INLINE_BYTES,
    MORE,
    NACK,
    PROBE,
    Frame,
    Packet,
    decode_message,
    decode_packet,
    encode_message,
    encode_packet,
    pieces,
)  # fmt: skip
from ringtmp.wire.tensors import Landing, check, payload

PROBE_AFTER_S = 0.5
#: A patient link acknowledges by itself after so long, or so many bytes: a sender's memory is held until then.
ACK_AFTER_S = 0.05
ACK_AFTER_BYTES = 1024 * 1024
DEFAULT_LIMIT_BYTES = 4 * 1024**3


class Delivery(NamedTuple):
    message: Message
    tensors: list[torch.Tensor | None]
    first_at: float  # when its first packet came
    payload_bytes: int


@dataclass
class Counters:
    payload_sent: int = 0
    payload_received: int = 0
    overhead_sent: int = 0
    overhead_received: int = 0
    resent: int = 0
    duplicates: int = 0
    foreign: int = 0  # packets of another ring or generation, dropped


@dataclass(slots=True)
class _Outgoing:
    seq: int
    frames: list[Frame]
    on_delivered: tuple[float, int] | None = None  # (posted at, payload bytes), on a message's last packet


@dataclass(slots=True)
class _Arriving:
    message: Message
    first_at: float
    landings: list[Landing | None]
    queue: deque[Landing] = field(default_factory=deque)
    offset: int = 0
    payload_bytes: int = 0


class Link:
    def __init__(
        self,
        ring: str,
        generation: int,
        limit_bytes: int = DEFAULT_LIMIT_BYTES,
        inspect: Callable[[Message], None] = lambda message: None,
        patient: bool = False,
    ) -> None:
        """`inspect` sees every message before memory is taken for its tensors, and may raise ProtocolError."""
        self._inspect = inspect
        self._ring = ring
        self._generation = generation
        self._limit = limit_bytes
        self.counters = Counters()
        #: Packets to hand to the transport, in order. The owner empties it.
        self.outbox: deque[list[Frame]] = deque()
        #: (posted at, acknowledged at, payload bytes) of delivered messages. The owner empties it.
        self.delivered: list[tuple[float, float, int]] = []
        self._next_seq = 1
        self._unacked: deque[_Outgoing] = deque()
        self.in_flight_bytes = 0  # tensor bytes sent and not acknowledged
        self._expected = 1
        self._acked = 0  # what we last told the peer
        self._patient = patient
        self._owed_since = 0.0  # when the first packet came that is not acknowledged
        self._owed_bytes = 0
        self._nacked = 0  # the gap already complained of
        self._arriving: _Arriving | None = None
        self._probe_number = 0
        self._probe_valid_from = 1  # answers to older probes predate a resend and prove nothing
        self._probes: dict[int, int] = {}  # number -> last seq sent before it
        self._last_news: float | None = None
        self._settled_at = 0.0

    @property
    def waiting_since(self) -> float | None:
        """Since when nothing of what was sent has been acknowledged; None: nothing is to be."""
        return self._settled_at if self._unacked else None

    @property
    def idle(self) -> bool:
        """Everything sent has arrived."""
        return not self._unacked

    def send(self, message: Message, tensors: Sequence[torch.Tensor | None], now: float) -> None:
        """Queue a message. The tensors must not change until it is acknowledged."""
        specs, views = payload(tensors, INLINE_BYTES)
        if specs:
            message = msgspec.structs.replace(message, tensors=specs)
        total = sum(map(len, views))
        if total <= INLINE_BYTES:
            inline = bytes(views[0]) if len(views) == 1 else b"".join(views)
            header = self._packet(DATA, self._next_seq, self._expected - 1, encode_message(message), inline)
            self._queue([header], (now, total), len(header) - total)
        else:
            self._send_pieces(message, pieces(views), (now, total))
        self._acknowledged()
        self.counters.payload_sent += total
        self.in_flight_bytes += total
        if self._last_news is None:
            self._last_news = self._settled_at = now

    def _send_pieces(
        self, message: Message, groups: Sequence[Sequence[Frame]], on_delivered: tuple[float, int]
    ) -> None:
        for position, group in enumerate(groups):
            last = position == len(groups) - 1
            body = encode_message(message) if position == 0 else b""
            header = self._packet(DATA if position == 0 else MORE, self._next_seq, self._expected - 1, body)
            self._queue([header, *group], on_delivered if last else None, len(header))

    def _queue(self, frames: list[Frame], on_delivered: tuple[float, int] | None, overhead: int) -> None:
        self._unacked.append(_Outgoing(self._next_seq, frames, on_delivered))
        self._next_seq += 1
        self.outbox.append(frames)
        self.counters.overhead_sent += overhead

    def receive(self, frames: Sequence[Frame], now: float) -> Delivery | None:
        """Take one packet. Returns a message when this packet completes it."""
        if not frames:
            raise ProtocolError("a packet without frames")
        packet = decode_packet(frames[0])
        self.counters.overhead_received += len(frames[0]) - len(packet.inline)
        if packet.ring != self._ring or packet.generation != self._generation:
            self.counters.foreign += 1
            return None
        if packet.kind in (DATA, MORE):
            if packet.number:
                self._settle(packet.number, now)
            return self._take(packet, frames[1:], now)
        if packet.kind == PROBE:
            self._say(ANSWER, self._expected - 1, packet.number)
            self._acknowledged()
        elif packet.kind == ACK:
            self._settle(packet.seq, now)
        elif packet.kind == NACK:
            self._settle(packet.seq - 1, now)
            self._resend(packet.seq)
        elif packet.kind == ANSWER:
            sent_before = self._probes.get(packet.number, 0)
            self._settle(packet.seq, now)
            if packet.number >= self._probe_valid_from and packet.seq < sent_before:
                self._resend(packet.seq + 1)
        return None

    def tick(self, now: float) -> None:
        """Acknowledge what has arrived; probe if there has been no news of what was sent."""
        if self._expected - 1 > self._acked and (
            not self._patient or now - self._owed_since >= ACK_AFTER_S or self._owed_bytes >= ACK_AFTER_BYTES
        ):
            self.acknowledge()
        if self._unacked and self._last_news is not None and now - self._last_news >= PROBE_AFTER_S:
            self._probe_number += 1
            self._probes[self._probe_number] = self._next_seq - 1
            self._say(PROBE, self._next_seq - 1, self._probe_number)
            self._last_news = now

    def acknowledge(self) -> None:
        """Tell the peer now what has arrived, if it does not know."""
        if self._expected - 1 > self._acked:
            self._say(ACK, self._expected - 1)
            self._acknowledged()

    def _acknowledged(self) -> None:
        self._acked = self._expected - 1
        self._owed_bytes = 0

    def _take(self, packet: Packet, data: Sequence[Frame], now: float) -> Delivery | None:
        if packet.seq < self._expected:
            self.counters.duplicates += 1
            return None
        if packet.seq > self._expected:
            if self._nacked != self._expected:
                self._nacked = self._expected
                self._say(NACK, self._expected)
            return None
        if self._expected - 1 == self._acked:
            self._owed_since = now
        self._expected += 1
        self._owed_bytes += len(packet.inline) + sum(map(len, data))
        if packet.kind == DATA:
            if self._arriving is not None:
                raise ProtocolError("a message began before the one before it ended")
            if not data:
                return self._whole(packet, now)
            self._arriving = self._begin(packet, now)
        arriving = self._arriving
        if arriving is None:
            raise ProtocolError("the continuation of a message that never began")
        for piece in data:
            self._land(arriving, piece)
        if arriving.queue:
            return None
        self._arriving = None
        tensors = [landing.finish() if landing is not None else None for landing in arriving.landings]
        self.counters.payload_received += arriving.payload_bytes
        return Delivery(arriving.message, tensors, arriving.first_at, arriving.payload_bytes)

    def _whole(self, packet: Packet, now: float) -> Delivery:
        """A message in one frame."""
        message, landings = self._room_for(packet)
        start, inline = 0, packet.inline
        tensors: list[torch.Tensor | None] = []
        for landing in landings:
            if landing is not None:
                landing.fill(inline if landing.size == len(inline) else inline[start : start + landing.size])
                start += landing.size
            tensors.append(landing.finish() if landing is not None else None)
        if start != len(inline):
            raise ProtocolError("more tensor bytes than the message announced")
        self.counters.payload_received += start
        return Delivery(message, tensors, now, start)

    def _begin(self, packet: Packet, now: float) -> _Arriving:
        if packet.inline:
            raise ProtocolError("tensor bytes in a header and behind it")
        message, landings = self._room_for(packet)
        queue = deque(landing for landing in landings if landing is not None and landing.size)
        return _Arriving(message, now, landings, queue)

    def _room_for(self, packet: Packet) -> tuple[Message, list[Landing | None]]:
        message = decode_message(packet.body)
        self._inspect(message)
        specs: Specs = getattr(message, "tensors", ())
        total = 0
        for spec in specs:
            if spec is not None:
                total += check(spec, self._limit - total)
        try:
            return message, [Landing(spec) if spec is not None else None for spec in specs]
        except (RuntimeError, MemoryError) as error:  # torch's allocator raises the former
            raise DoesNotFit(f"no memory for {type(message).__name__} with {bytes_text(total)} of tensors") from error

    def _land(self, arriving: _Arriving, piece: Frame) -> None:
        if not arriving.queue or arriving.offset + len(piece) > arriving.queue[0].size or not len(piece):
            raise ProtocolError("more tensor bytes than the message announced")
        arriving.queue[0].place(arriving.offset, piece)
        arriving.offset += len(piece)
        arriving.payload_bytes += len(piece)
        if arriving.offset == arriving.queue[0].size:
            arriving.queue.popleft()
            arriving.offset = 0

    def _settle(self, seq: int, now: float) -> None:
        if seq >= self._next_seq:
            raise ProtocolError(f"packet {seq} acknowledged, only {self._next_seq - 1} were sent")
        while self._unacked and self._unacked[0].seq <= seq:
            done = self._unacked.popleft()
            self._last_news = self._settled_at = now
            if done.on_delivered is not None:
                self.delivered.append((done.on_delivered[0], now, done.on_delivered[1]))
                self.in_flight_bytes -= done.on_delivered[1]
        if not self._unacked:
            self._last_news = None
            self._probes.clear()

    def _resend(self, seq: int) -> None:
        if self._unacked and seq < self._unacked[0].seq:
            return  # an old complaint: what it missed has arrived since
        for out in self._unacked:
            self.outbox.append(out.frames)
            self.counters.resent += 1
        self._probe_valid_from = self._probe_number + 1

    def _say(self, kind: str, seq: int, number: int = 0) -> None:
        header = self._packet(kind, seq, number)
        self.counters.overhead_sent += len(header)
        self.outbox.append([header])

    def _packet(self, kind: str, seq: int, number: int = 0, body: bytes = b"", inline: bytes = b"") -> bytes:
        return encode_packet(Packet(PROTOCOL, self._ring, self._generation, kind, seq, number, body, inline=inline))
