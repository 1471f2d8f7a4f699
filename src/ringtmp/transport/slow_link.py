"""A slow line around any transport: latency and rate, where the system has no means to emulate them.

Nothing is held back at the sender. Each packet carries the time at which it would be out of the sender's line, and the
receiver does not look at it before that time plus its own share. So a node that computes meanwhile delays nothing, and
no thread is needed. Both ends need one clock (one machine) and both must be slow, if only by nothing.
"""

from __future__ import annotations

import heapq
import os
import struct
import time
from collections.abc import Callable, Sequence
from itertools import count

from ringtmp.errors import ProtocolError
from ringtmp.transport.base import Arrival, Channel, Frame, Transport, TransportWrapper

_STAMP = struct.Struct("<d")
LATENCY = "RINGTMP_LATENCY_MS"
RATE = "RINGTMP_LINK_MBPS"


class Slow(TransportWrapper):
    def __init__(
        self, inner: Transport, latency_s: float, bytes_per_s: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(inner)
        self._latency_s = latency_s
        self._s_per_byte = 1 / bytes_per_s if bytes_per_s else 0.0
        self._clock = clock
        self._out_free_at = 0.0
        self._in_free_at = 0.0
        self._held: list[tuple[float, int, Arrival]] = []
        self._numbers = count()

    def send(self, peer: int, channel: Channel, frames: Sequence[Frame]) -> None:
        begins = max(self._clock(), self._out_free_at)
        self._out_free_at = begins + sum(len(frame) for frame in frames) * self._s_per_byte
        self._inner.send(peer, channel, [_STAMP.pack(self._out_free_at + self._latency_s), *frames])

    def receive(self) -> list[Arrival]:
        for arrival in self._inner.receive():
            if len(arrival.frames[0]) != _STAMP.size:
                raise ProtocolError(f"node {arrival.peer} is not slow and this one is: emulate both or neither")
            (left_at,) = _STAMP.unpack(arrival.frames[0])
            frames = arrival.frames[1:]
            begins = max(left_at, self._in_free_at)
            self._in_free_at = begins + sum(len(frame) for frame in frames) * self._s_per_byte
            due = self._in_free_at + self._latency_s
            heapq.heappush(self._held, (due, next(self._numbers), Arrival(arrival.peer, arrival.channel, frames)))
        now = self._clock()
        ready = []
        while self._held and self._held[0][0] <= now:
            ready.append(heapq.heappop(self._held)[2])
        return ready

    def wait(self, timeout_s: float) -> bool:
        if self._held:
            timeout_s = min(timeout_s, max(0.0, self._held[0][0] - self._clock()))
        self._inner.wait(timeout_s)
        return True


def slowed(transport: Transport) -> Transport:
    """As the lab says in the environment; the transport itself where it says nothing."""
    latency, rate = os.environ.get(LATENCY), os.environ.get(RATE)
    if latency is None and rate is None:
        return transport
    return Slow(transport, float(latency or 0) / 1000, float(rate) * 1e6 / 8 if rate else None)
