"""How fast a line is, and how long a message takes on it: tried by a leader, one line after another, each way by itself.

The shortest of a few round trips of an empty message is twice the latency. A small and a larger message differ by what the
rate alone explains: latency, the start of a connection and what a shaped line lets through at once are in both. A slow
line gets less to carry, so that all together take a second or so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ringtmp.errors import ProtocolError
from ringtmp.ring.endpoint import Endpoint, Mail
from ringtmp.ring.lead import HELLO_LIMIT_S
from ringtmp.wire.message import Echo

#: All lines together.
LINES_S = 1.5
PINGS = 5
#: What the two nodes do with an empty message that nothing else holds up.
PING_CPU_S = 500e-6
SMALL_BYTES = 32 * 1024
#: The larger message takes about this long, and is within these sizes.
LARGE_S = 0.04
DOUBTFUL = 0.3
LARGE_BYTES = (64 * 1024, 2 * 2**20)


@dataclass(frozen=True)
class Line:
    """From the master to a device and back; latencies of both ends are in it."""

    down_bytes_per_s: float
    up_bytes_per_s: float
    latency_s: float  # one way


def echo(endpoint: Endpoint, mail: Mail, message: Echo) -> None:
    """On a node: answer, with as many bytes as are asked for."""
    if not 0 <= message.back <= SMALL_BYTES + LARGE_BYTES[1]:
        raise ProtocolError(f"node {mail.sender} asks for {message.back} bytes to try a line with")
    endpoint.post(mail.sender, Echo(0), _bytes(message.back))


def large_bytes(small_s: float) -> int:
    """How much to send after a small message took so long, beyond the round trip."""
    least, most = LARGE_BYTES
    return int(min(max(SMALL_BYTES / max(small_s, 1e-6) * LARGE_S, least), most))


class Lines:
    """`until_node` is the leader's way to wait for one node: (who, condition, what for, limit)."""

    def __init__(self, endpoint: Endpoint, until_node: Callable[[int, Callable[[], bool], str, float], None]) -> None:
        self._endpoint = endpoint
        self._until_node = until_node
        self._heard = 0

    def heard(self) -> None:
        """An echo has come back."""
        self._heard += 1

    def tried(self, others: Sequence[int]) -> dict[int, Line]:
        """As many as there is time for."""
        limit = self._endpoint.clock() + LINES_S
        found = {}
        for node in others:
            if self._endpoint.clock() > limit:
                break
            around_s = min(self._around_s(node, 0, 0) for _ in range(PINGS))
            down = self._rate(around_s, lambda count, node=node: self._around_s(node, count, 0))  # type: ignore[misc]
            up = self._rate(around_s, lambda count, node=node: self._around_s(node, 0, count))  # type: ignore[misc]
            # What the nodes do with a message is counted as their work.
            found[node] = Line(down, up, max(around_s / 2 - PING_CPU_S, 0.0))
        return found

    def _rate(self, around_s: float, take_s: Callable[[int], float]) -> float:
        small_s = min(take_s(SMALL_BYTES) for _ in range(2))
        large = large_bytes(small_s - around_s)
        large_s = take_s(SMALL_BYTES + large)
        tries = 1
        # One lost packet is waited for a fifth of a second: a line that looks much slower than a small message found it.
        while large / large_s < DOUBTFUL * SMALL_BYTES / max(small_s - around_s, 1e-4) and tries < 3:
            large_s, tries = min(large_s, take_s(SMALL_BYTES + large)), tries + 1
        # A line too fast to tell from the noise is as fast as anything a plan could want.
        return large / max(large_s - small_s, 1e-4)

    def _around_s(self, node: int, there: int, back: int) -> float:
        """Seconds until so many bytes have gone there, and the answer with so many has come back."""
        before, began = self._heard, self._endpoint.clock()
        self._endpoint.post(node, Echo(back), _bytes(there))
        self._until_node(node, lambda: self._heard > before, "to echo", HELLO_LIMIT_S)
        return self._endpoint.clock() - began


def _bytes(count: int) -> list[torch.Tensor | None]:
    return [torch.zeros(count, dtype=torch.uint8)] if count else []
