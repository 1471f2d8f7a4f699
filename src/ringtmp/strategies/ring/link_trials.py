"""How fast a line is, and how long a message takes on it: tried from one end, each way by itself.

The shortest of a few round trips of an empty message is twice the latency. A small message says how much a middle one may
carry, the middle one how much a large one; two of them differ by what the rate alone explains: latency, the start of a
connection and what a shaped line lets through at once are in both. A slow line gets less to carry, and no large message, so
that all together take a second or so.

A leader tries its own lines one after another. Then those between the other nodes, as many pairs at a time as there are:
no node is in two of them at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise

import torch

from ringtmp.errors import ProtocolError
from ringtmp.runtime.base_leader import HELLO_LIMIT_S
from ringtmp.runtime.mailbox import Endpoint, Mail
from ringtmp.wire.messages import Echo, Echoed, Tried, Try

#: A leader's own lines together; and all lines, with those between others.
LINES_S = 1.5
ALL_LINES_S = 1.9
#: So long a pair may take at most, and by itself, in a second try: it may be that the two cannot reach each other.
PAIR_S = 1.0
ALONE_S = 3.0
#: Second tries are rare, and have time of their own.
AGAIN_S = 6.0
#: Everyone with everyone takes this many rounds with eight nodes; of more nodes, not all pairs are tried.
MOST_ROUNDS = 7
PINGS = 5
#: What the two nodes do with an empty message that nothing else holds up.
PING_CPU_S = 500e-6
SMALL_BYTES = 32 * 1024
#: What the next message carries beyond the one before it: about this long, and within these sizes.
MIDDLE_S, MIDDLE_BYTES = 0.02, (64 * 1024, 128 * 1024)
LARGE_S, LARGE_BYTES = 0.04, (64 * 1024, 2 * 2**20)
MOST_BYTES = SMALL_BYTES + MIDDLE_BYTES[1] + LARGE_BYTES[1]
#: What looks slower than this share of what was found before, and took longer by about as much as a lost packet is waited for,
#: is asked again.
DOUBTFUL, TRIES = 0.3, 3
WAITED_S = (0.15, 0.6)
#: A line too fast to tell from the noise is as fast as anything a plan could want.
NOISE_S = 1e-4

Pair = tuple[int, int]
#: So many bytes there, so many back; how long it took, or what follows.
Asking = Generator[tuple[int, int], float, "Line"]
#: Questions of this process, so that a late answer is not taken for another's.
_numbers = count()


@dataclass(frozen=True)
class Line:
    """From whoever tried it to another node and back; latencies of both ends are in it."""

    down_bytes_per_s: float
    up_bytes_per_s: float
    latency_s: float  # one way


def echo(endpoint: Endpoint, mail: Mail, message: Echo) -> None:
    """On a node: answer, with as many bytes as are asked for."""
    if not 0 <= message.back <= MOST_BYTES:
        raise ProtocolError(f"asks for {message.back} bytes to try a line with")
    endpoint.post(mail.sender, Echoed(message.number), _bytes(message.back))


def asking() -> Asking:
    """What to ask one after the other, and what follows from how long the answers take."""
    around_s = yield 0, 0
    for _ in range(PINGS - 1):
        around_s = min(around_s, (yield 0, 0))
    down = yield from _rate(around_s, lambda size: (size, 0))
    up = yield from _rate(around_s, lambda size: (0, size))
    # What the nodes do with a message is counted as their work.
    return Line(down, up, max(around_s / 2 - PING_CPU_S, 0.0))


def _rate(around_s: float, carry: Callable[[int], tuple[int, int]]) -> Generator[tuple[int, int], float, float]:
    first_s = yield carry(SMALL_BYTES)
    small_s = min(first_s, (yield carry(SMALL_BYTES)))
    rate = SMALL_BYTES / max(small_s - around_s, NOISE_S)
    middle = _within(MIDDLE_BYTES, rate * MIDDLE_S)
    rate, middle_s = yield from _beyond(carry, SMALL_BYTES, small_s, middle, rate)
    if middle_s - small_s < LARGE_S:
        large = _within(LARGE_BYTES, rate * LARGE_S)
        rate, _ = yield from _beyond(carry, SMALL_BYTES + middle, middle_s, large, rate)
    return rate


def _beyond(
    carry: Callable[[int], tuple[int, int]], known: int, known_s: float, more: int, expected: float
) -> Generator[tuple[int, int], float, tuple[float, float]]:
    """The rate, from what `more` bytes take beyond those whose time is known; and the time of all of them."""
    took_s = yield carry(known + more)
    for _ in range(TRIES - 1):
        more_s = max(took_s - known_s, NOISE_S)
        if more / more_s > DOUBTFUL * expected or not WAITED_S[0] < more_s < WAITED_S[1]:
            break
        took_s = min(took_s, (yield carry(known + more)))
    return more / max(took_s - known_s, NOISE_S), took_s


def _within(sizes: tuple[int, int], wanted: float) -> int:
    return int(min(max(wanted, sizes[0]), sizes[1]))


class Attempt:
    """One line being tried from this end. `line` once it is known; after `limit_s` nothing more is asked."""

    def __init__(self, endpoint: Endpoint, peer: int, limit_s: float = math.inf) -> None:
        self.peer = peer
        self.line: Line | None = None
        self._until_s = endpoint.clock() + limit_s
        self._endpoint = endpoint
        self._asking = asking()
        self._ask(next(self._asking))

    def heard(self, mail: Mail, answer: Echoed) -> None:
        if mail.sender != self.peer or answer.number != self._number or mail.arrived_at > self._until_s:
            return  # of an attempt that was given up, or too late
        try:
            self._ask(self._asking.send(mail.arrived_at - self._asked_at))
        except StopIteration as end:
            self.line = end.value

    def _ask(self, sizes: tuple[int, int]) -> None:
        there, back = sizes
        self._number, self._asked_at = next(_numbers), self._endpoint.clock()
        self._endpoint.post(self.peer, Echo(self._number, back), _bytes(there))


class Lines:
    """For a leader. `until_node` is its way to wait for one node: (who, condition, what for, limit)."""

    def __init__(self, endpoint: Endpoint, until_node: Callable[[int, Callable[[], bool], str, float], None]) -> None:
        self._endpoint = endpoint
        self._until_node = until_node
        self._attempt: Attempt | None = None
        self._told: dict[Pair, Line] = {}

    def heard(self, mail: Mail) -> bool:
        """True: it was about a line."""
        message = mail.message
        if isinstance(message, Tried):
            told = message.there_bytes_per_s, message.back_bytes_per_s, message.latency_s
            if not (all(map(math.isfinite, told)) and min(told[:2]) > 0 and told[2] >= 0):
                raise ProtocolError(f"found a line to node {message.peer} of {told}")
            self._told[mail.sender, message.peer] = Line(*told)
        elif not isinstance(message, Echoed):
            return False
        elif self._attempt is not None:
            self._attempt.heard(mail, message)
        return True

    def tried(self, others: Sequence[int]) -> dict[int, Line]:
        """The leader's own, as many as there is time for."""
        limit = self._endpoint.clock() + LINES_S
        found = {}
        for node in others:
            if self._endpoint.clock() > limit:
                break
            attempt = self._attempt = Attempt(self._endpoint, node)
            self._until_node(node, lambda attempt=attempt: attempt.line is not None, "to echo", HELLO_LIMIT_S)  # type: ignore[misc]
            assert attempt.line is not None
            found[node] = attempt.line
        return found

    def between(
        self, rounds: Sequence[Collection[Pair]], until_s: float, limit_s: float, pump: Callable[[], object]
    ) -> dict[Pair, Line | None]:
        """Those between other nodes, as many as there is time for; None: nothing was heard within the limit."""
        found: dict[Pair, Line | None] = {}
        for pairs in rounds:
            begun = self._endpoint.clock()
            if begun > until_s:
                break
            self._told.clear()
            for first, second in pairs:
                self._endpoint.post(first, Try(second, limit_s))
            while not self._told.keys() >= set(pairs) and self._endpoint.clock() < begun + limit_s:
                pump()
            found.update({pair: self._told.get(pair) for pair in pairs})
        return found


def rounds_of(nodes: Sequence[int]) -> list[list[Pair]]:
    """Everyone with everyone once, nobody twice in a round; no more than MOST_ROUNDS rounds. One stays in its seat, the
    others move up, and those who sit across from each other are a pair."""
    seats: list[int | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    half, found = len(seats) // 2, []
    for _ in range(min(len(seats) - 1, MOST_ROUNDS)):
        across = zip(seats[:half], reversed(seats[half:]), strict=True)
        found.append([(a, b) for a, b in across if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return [pairs for pairs in found if pairs]


def neighbours_of(nodes: Sequence[int]) -> list[list[Pair]]:
    """Rounds of those who stand next to each other, where the order is given."""
    pairs = list(pairwise(nodes))
    return [each for each in (pairs[::2], pairs[1::2]) if each]


def disjoint(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """In as few rounds as come about by taking each as soon as both are free."""
    found: list[list[Pair]] = []
    for pair in pairs:
        free = (each for each in found if all(set(pair).isdisjoint(other) for other in each))
        room = next(free, None)
        if room is None:
            found.append(room := [])
        room.append(pair)
    return found


def _bytes(size: int) -> list[torch.Tensor | None]:
    return [torch.zeros(size, dtype=torch.uint8)] if size else []
