"""A group adds up its gradients: every member ends with the sum over all of them, in the order of the tree of sums.

Layer by layer, behind the last of a member's own microbatches while that goes backward: the deepest layers have all their
gradients first, and leave while shallower ones are computed. What others have sent by then waits. Chunks, and who adds up
which, are as in all-reduce by halving (`plan/sum_tree.py`), so that each member sends about twice its gradients once, whatever
the size of the group. Where members share the optimizer state (`shared_state.py`), a bucket's sum is made at its owner alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import cast

import torch

from ringtmp.errors import ProtocolError
from ringtmp.plan.node_groups import share_of
from ringtmp.plan.route import Visit
from ringtmp.plan.sum_tree import ROOT, Adding, SumTree, equal_shares
from ringtmp.runtime.add_along_tree import Partial, Send, TreeAddition, flat_sum
from ringtmp.runtime.mailbox import Mail
from ringtmp.runtime.stage import Stage
from ringtmp.strategies.ring.gradient_buckets import Bucket, buckets, owners
from ringtmp.wire.messages import GroupSum, Specs


class GroupSums:
    """Of one visit, on one member of its group."""

    def __init__(
        self,
        visit: Visit,
        me: int,
        tree: SumTree,
        stage: Stage,
        post: Callable[[int, GroupSum, list[torch.Tensor]], None],
        shares_state: bool = False,
    ) -> None:
        self._visit = visit
        self._rank = visit.members.index(me)
        self._stage = stage
        self._post = post
        self._adding = equal_shares(tree, len(visit.members))
        self._own = tree.whole(share_of(visit, me, tree))
        self._shares_state = shares_state
        self._owners: tuple[int, ...] = ()
        self._additions: dict[int, TreeAddition] = {}  # by bucket: those begun
        self._open: list[set[int]] = []  # by bucket: parameters whose gradients are not all there
        self._buckets: list[Bucket] | None = None
        self._turn = 0  # the pass whose sums are under way; 0: none
        self._step = 0
        self._finished = False  # every gradient of this member's is there
        self._early: list[Mail] = []  # of what is not begun here

    def begin(self, turn: int, step: int) -> None:
        """This member's last microbatch of the pass is about to go backward, or it has none."""
        self._turn, self._step, self._finished = turn, step, False
        self._open = [set(range(each.first, each.stop)) for each in self.known_buckets()]

    def final(self, position: int) -> None:
        """A parameter has all its gradients of this member."""
        number = next(at for at, each in enumerate(self.known_buckets()) if position < each.stop)
        self._open[number].discard(position)
        if not self._open[number] and number not in self._additions:
            self._add(number)

    def finish(self) -> bool:
        """Every gradient of the pass that this member has is there. True: so is the sum over all members."""
        for number in range(len(self.known_buckets())):
            if number not in self._additions:
                self._add(number)
        self._stage.sums_of(self._step).end()
        self._finished = True
        return self._ended()

    def _add(self, number: int) -> None:
        bucket = self.known_buckets()[number]
        sums = self._stage.sums_of(self._step).take_some(self._own, bucket.first, bucket.stop)
        mine = {
            node: flat_sum(found, bucket.slots, bucket.size, bucket.dtype)
            for node, found in zip(self._own, sums, strict=True)
            if found is not None
        }
        addition = TreeAddition(self._adding_of(number), self._rank, mine, bucket.slots, bucket.size, bucket.dtype)
        self._additions[number] = addition
        self._send(number, addition.begin())
        early = [mail for mail in self._early if self._begun(mail)]
        self._early = [mail for mail in self._early if mail not in early]
        for mail in early:
            self._take(mail)

    def take(self, mail: Mail) -> bool:
        """Something another member sent. True: the sum over all members is there now."""
        if not self._begun(mail):
            self._early.append(mail)
            return False
        self._take(mail)
        return self._ended()

    def _begun(self, mail: Mail) -> bool:
        message = cast(GroupSum, mail.message)
        return message.turn == self._turn and message.bucket in self._additions

    def _take(self, mail: Mail) -> None:
        message = mail.message
        assert isinstance(message, GroupSum)
        there = message.there or (True,) * len(self.known_buckets()[message.bucket].slots)
        given = mail.present()
        found = Partial(given[0] if given else torch.empty(0), there)
        self._send(message.bucket, self._additions[message.bucket].take(message.node, message.chunk, found))

    def _ended(self) -> bool:
        known = self.known_buckets()
        if not self._finished or not all(each.done for each in self._additions.values()):
            return False
        totals = [self._additions[number].total for number in range(len(known))]
        for bucket, total in zip(known, totals, strict=True):
            if total is None:
                continue  # another member's to update
            self._stage.sums_of(self._step).give(bucket.first, [
                total.values[start:stop] if there else None
                for (start, stop), there in zip(bucket.slots, total.there, strict=True)
            ])  # fmt: skip
        self._additions, self._turn = {}, 0
        return True

    def _send(self, bucket: int, sends: Sequence[Send]) -> None:
        for each in sends:
            there = () if all(each.sum.there) else each.sum.there
            message = GroupSum(self._turn, self._visit.index, bucket, each.node, each.chunk, there)
            self._post(self._visit.members[each.to], message, [] if each.sum.absent else [each.sum.values])

    def known_buckets(self) -> list[Bucket]:
        if self._buckets is None:
            self._buckets = buckets(self._stage.parameters[0])
            self._owners = owners(self._buckets, len(self._visit.members))
        return self._buckets

    def owner(self, bucket: int) -> int:
        """Where the optimizer state is shared: who (by rank) has a bucket's."""
        self.known_buckets()
        return self._owners[bucket]

    def _adding_of(self, bucket: int) -> Adding:
        return replace(self._adding, whole_at=self.owner(bucket)) if self._shares_state else self._adding

    def owed_by(self, sender: int) -> Iterator[str]:
        """What another member sends here of every pass."""
        rank = self._visit.members.index(sender)
        for number in range(len(self.known_buckets())):
            adding = self._adding_of(number)
            yield from (named(number, node, chunk) for node, chunk, *way in adding.hops() if way == [rank, self._rank])
            for chunk in range(adding.chunks if adding.whole_at is None else 0):
                if adding.owner(ROOT, chunk) == rank:
                    yield named(number, ROOT, chunk)

    def check(self, message: GroupSum) -> str:
        """What it is of those owed. ProtocolError: of no bucket, or not as large as it must be."""
        known = self.known_buckets()
        if not 0 <= message.bucket < len(known):
            raise ProtocolError(f"sent bucket {message.bucket}, which there is not")
        adding, bucket = self._adding_of(message.bucket), known[message.bucket]
        if not 0 <= message.chunk < adding.chunks:
            raise ProtocolError(f"sent chunk {message.chunk} of bucket {message.bucket}, which there is not")
        if message.there and len(message.there) != len(bucket.slots):
            raise ProtocolError(f"sent {len(message.there)} tensors of {len(bucket.slots)}")
        first, stop = adding.bounds(message.chunk, bucket.size)
        check_values(message.tensors, not message.there or any(message.there), stop - first, bucket.dtype)
        return named(message.bucket, message.node, message.chunk)


def named(bucket: int, node: int, chunk: int) -> str:
    return f"chunk {chunk} of sum {node} of bucket {bucket}"


def check_values(specs: Specs, wanted: bool, size: int, dtype: torch.dtype) -> None:
    found = [None if each is None else (each.dtype, each.shape) for each in specs]
    if found != ([(str(dtype).removeprefix("torch."), (size,))] if wanted else []):
        raise ProtocolError(f"sent {specs} for {size} values")
