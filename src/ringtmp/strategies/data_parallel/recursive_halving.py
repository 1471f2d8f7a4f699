"""A sum over all workers by recursive halving: at distance 1, 2, 4, … each of a pair adds up one half of what it has.

R. Thakur, R. Rabenseifner, W. Gropp, Optimization of Collective Communication Operations in MPICH, 2005. Departure: every
worker sends its finished chunk to all others at once, instead of doubling what it has; the bytes are the same.

Additions follow the tree of sums (`plan/sum_tree.py`). With `--sum-tree` workers hold whole parts of it, and the sum has the
bits of one process; else each worker's share of the batch is a part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from ringtmp.errors import ProtocolError
from ringtmp.plan.sum_tree import ROOT, Adding
from ringtmp.runtime.add_along_tree import Partial, Send, Slots, TreeAddition
from ringtmp.runtime.mailbox import Mail
from ringtmp.strategies.data_parallel.sum_over_workers import Sender
from ringtmp.wire.messages import GradientPart

#: (round, bucket, vector, which of its tensors got a gradient)
SummedInParts = Callable[[int, int, torch.Tensor, tuple[bool, ...]], None]


class HalvingReduce:
    def __init__(
        self, sender: Sender, workers: Sequence[int], finished: SummedInParts, adding: Adding,
        *, sizes: Sequence[int], slots: Sequence[Slots],
    ) -> None:  # fmt: skip
        """`sizes` of every bucket's vector, and where in it its tensors lie."""
        self._sender = sender
        self._workers = workers
        self._rank = workers.index(sender.me)
        self._finished = finished
        self._adding = adding
        self._own = adding.tree.whole(adding.shares[self._rank])
        self._split = frozenset(adding.split())
        self._sizes = sizes
        self._slots = slots
        self._under_way: dict[tuple[int, int], TreeAddition] = {}
        self._early: dict[tuple[int, int], list[Mail]] = {}  # parts that came before our own gradient

    def start(self, step: int, bucket: int, own: torch.Tensor | Mapping[int, Partial]) -> None:
        """A vector of all this worker's gradients, or partial sums by node of the tree."""
        slots = self._slots[bucket]
        if isinstance(own, torch.Tensor):
            own = {self._own[0]: Partial(own, (True,) * len(slots))}
        addition = TreeAddition(self._adding, self._rank, own, slots, self._sizes[bucket])
        self._under_way[step, bucket] = addition
        self._send(step, bucket, addition.begin())
        for mail in self._early.pop((step, bucket), ()):
            self.part(mail)
        self._end_if_done(step, bucket)

    def part(self, mail: Mail) -> None:
        part = mail.message
        assert isinstance(part, GradientPart)
        addition = self._under_way.get((part.step, part.bucket))
        if addition is None:
            self._early.setdefault((part.step, part.bucket), []).append(mail)
            return
        there = part.there or (True,) * len(self._slots[part.bucket])
        first, stop = self._adding.bounds(part.chunk, self._sizes[part.bucket])
        values = self._sender.decode(mail.present(), stop - first) if any(there) else torch.empty(0)
        self._send(part.step, part.bucket, addition.take(part.hop, part.chunk, Partial(values, there)))
        self._end_if_done(part.step, part.bucket)

    def due(self, sender: int, part: GradientPart, size: int) -> int:
        rank, chunk, node = self._workers.index(sender), part.chunk, part.hop
        if not 0 <= chunk < self._adding.chunks or part.summed is not (node == ROOT):
            raise ProtocolError(f"sent chunk {chunk} of sum {node}, which there is not")
        known = node == ROOT or node >> 1 in self._split
        if not (known and rank != self._rank and self._adding.owner(node, chunk) == rank):
            raise ProtocolError(f"sent chunk {chunk} of sum {node}, which is not its to send")
        if node != ROOT and self._adding.owner(node >> 1, chunk) != self._rank:
            raise ProtocolError(f"sent chunk {chunk} of sum {node}, which is not added up here")
        if part.there and len(part.there) != len(self._slots[part.bucket]):
            raise ProtocolError(f"sent a part with {len(part.there)} tensors of {len(self._slots[part.bucket])}")
        first, stop = self._adding.bounds(chunk, size)
        return stop - first

    def _send(self, step: int, bucket: int, sends: Sequence[Send]) -> None:
        encoded: dict[tuple[int, int], list[torch.Tensor]] = {}
        for each in sends:
            there = () if all(each.sum.there) else each.sum.there
            part = GradientPart(step, bucket, each.chunk, each.node, each.node == ROOT, there=there)
            name = each.node, each.chunk
            if name not in encoded:
                encoded[name] = [] if each.sum.absent else self._sender.encode(part, each.sum.values)
                if each.node == ROOT and not self._sender.wire.exact:  # the total is what everyone else gets
                    total = Partial(self._sender.decode(encoded[name], len(each.sum.values)), each.sum.there)
                    self._under_way[step, bucket].correct(each.chunk, total)
            self._sender.post(self._workers[each.to], part, encoded[name])

    def _end_if_done(self, step: int, bucket: int) -> None:
        addition = self._under_way.get((step, bucket))
        if addition is not None and (total := addition.total) is not None:
            del self._under_way[step, bucket]
            self._finished(step, bucket, total.values, total.there)
