"""What all workers do together with a vector: add theirs up, or tell each other their parts.

Sums go around a ring (sum_over_workers.py): every worker ends with the same bits. Parts go straight to everyone else. All
workers begin the same exchanges in the same order, so a number names one; nobody can be more than one ahead of another.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ringtmp import untrusted
from ringtmp.errors import Misconduct, ProtocolError
from ringtmp.runtime.mailbox import Mail
from ringtmp.strategies.data_parallel.sum_over_workers import RingReduce, Sender
from ringtmp.wire.formats import PLAIN
from ringtmp.wire.messages import GradientPart, Message

#: In a GradientPart: what it belongs to.
ADDED, TOLD = 0, 1


class StepSender(Sender):
    """Counts what it sends towards the step only while there is one: what an evaluation sends belongs to none."""

    training = False

    def post(self, peer: int, part: GradientPart, tensors: Sequence[torch.Tensor]) -> None:
        if self.training:
            super().post(peer, part, tensors)
        else:
            self._endpoint.post(peer, part, tensors)


class Collectives:
    def __init__(self, sender: Sender, workers: Sequence[int]) -> None:
        self._sender = sender
        self._workers = workers
        self._ring = RingReduce(sender, workers, self._summed)
        self.number = 0  # of the exchange that is under way, or the next one
        self._size = -1  # of the vector of the exchange that is under way
        self._kind: int | None = None  # of the exchange that is under way; None: not begun here
        self._came: dict[tuple[int, int], tuple[int, int]] = {}  # by exchange and sender: its kind, how many parts
        self._early: list[Mail] = []  # parts of a sum that came before this worker's own vector
        self._told: dict[int, dict[int, torch.Tensor]] = {}  # by exchange: what came from whom
        self._total: torch.Tensor | None = None
        self._last: dict[tuple[int, int, int, bool, int], int] = {}

    def add_up(self, vector: torch.Tensor) -> None:
        self._begin(ADDED, vector)
        self._ring.start(self.number, ADDED, vector)
        early, self._early = self._early, []
        for mail in early:
            self.part(mail)

    def tell(self, vector: torch.Tensor) -> None:
        self._begin(TOLD, vector)
        self._told.setdefault(self.number, {})[self._sender.me] = vector
        part = GradientPart(self.number, TOLD, self._workers.index(self._sender.me), 0, True)
        for other in self._workers:
            if other != self._sender.me:
                self._sender.post(other, part, [vector])

    def _begin(self, kind: int, vector: torch.Tensor) -> None:
        self._kind, self._size = kind, len(vector)
        for (number, sender), (other, _) in self._came.items():
            if number == self.number and other != kind:
                raise Misconduct(f"sent a part of exchange {number}, which is of another kind", sender)

    def _end(self) -> None:
        self.number, self._size, self._kind = self.number + 1, -1, None
        self._came = {name: each for name, each in self._came.items() if name[0] >= self.number}

    def part(self, mail: Mail) -> None:
        message = mail.message
        assert isinstance(message, GradientPart)
        (vector,) = mail.present()
        if message.bucket == ADDED:
            if self._size < 0 or message.step != self.number:
                self._early.append(mail)
                return
            if len(vector) != (due := self._ring.due(mail.sender, message, self._size)):
                raise Misconduct(f"sent {len(vector)} values of a sum, not {due}", mail.sender)
            self._ring.part(mail)
            return
        self._told.setdefault(message.step, {})[mail.sender] = vector

    def take_total(self) -> torch.Tensor | None:
        """The sum, once."""
        total, self._total = self._total, None
        if total is not None:
            self._end()
        return total

    def take_parts(self) -> list[torch.Tensor] | None:
        """What each worker has told, once, in their order."""
        told = self._told.get(self.number, {})
        if len(told) < len(self._workers):
            return None
        del self._told[self.number]
        found = [told[worker] for worker in self._workers]
        for worker, each in zip(self._workers, found, strict=True):
            if len(each) != self._size:
                raise Misconduct(f"told {len(each)} values, not {self._size}", worker)
        self._end()
        return found

    def inspect(self, sender: int, message: Message) -> None:
        """Every part comes once, from whom it must, in the order of exchanges. How large it must be is known when this
        worker is there itself."""
        if not isinstance(message, GradientPart):
            return
        untrusted.whole(message.step, "the number of an exchange", self.number, self.number + 1)
        untrusted.whole(message.bucket, "the kind of an exchange", ADDED, TOLD)
        specs = message.tensors
        if (
            message.there
            or len(specs) != 1
            or specs[0] is None
            or specs[0].dtype != PLAIN.name
            or len(specs[0].shape) != 1
        ):
            raise ProtocolError(f"sent {specs} as a part of a vector")
        if message.bucket == TOLD and (message.chunk, message.hop) != (self._workers.index(sender), 0):
            raise ProtocolError(f"told part {message.chunk}, which is not its to tell")
        if message.bucket == ADDED:
            self._ring.due(sender, message, 0)  # whether it is this sender's to send
        name = (message.bucket, message.chunk, message.hop, message.summed, sender)
        if message.step <= self._last.get(name, -1):
            raise ProtocolError(f"sent part {message.chunk} of exchange {message.step} twice")
        self._last[name] = message.step
        self._in_order(sender, message)

    def _in_order(self, sender: int, message: GradientPart) -> None:
        """Whoever is in the next exchange has this worker's part of this one, and has sent all of its own."""
        number, kind = message.step, message.bucket
        before, count = self._came.get((number, sender), (kind, 0))
        if before != kind or (number == self.number and self._kind not in (None, kind)):
            raise ProtocolError(f"sent a part of exchange {number}, which is of another kind")
        if number > self.number and (self._kind is None or self._lacks(sender)):
            raise ProtocolError(f"sent a part of exchange {number} before all of exchange {self.number}")
        self._came[number, sender] = kind, count + 1

    def _lacks(self, sender: int) -> bool:
        """Whether something of the exchange that is under way has not come from there."""
        others = len(self._workers) - 1
        due = 1
        if self._kind == ADDED:  # every sum comes from the one before: while it is added up, and when it is whole
            due = 2 * others if sender == self._workers[self._workers.index(self._sender.me) - 1] else 0
        return self._came.get((self.number, sender), (self._kind, 0))[1] < due

    def _summed(self, number: int, bucket: int, vector: torch.Tensor) -> None:
        self._total = vector
