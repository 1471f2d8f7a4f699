"""The order in which a step's gradients are added up, so that one process and many workers end in the same bits.

Pure. A batch's microbatches are G contiguous parts (`tensor_split`), G a power of two. Gradients are added in microbatch
order inside a part, and parts as a balanced tree whose level l pairs those that differ in bit l. Nodes of the tree are
numbered as in a heap:

    G = 4          1              (0 + 1) + (2 + 3)
               2       3          0 + 1, 2 + 3
             4   5   6   7        parts 0, 1, 2, 3

A part without microbatches (a batch with fewer than G) is absent: its sibling is passed on as it is, never added to zeros,
because 0.0 + -0.0 is 0.0. Whoever has all parts below a node of the tree can add them up alone, so any number of workers up
to G, each with a run of whole parts, adds in this order.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ringtmp.errors import UsageError

ROOT = 1


@dataclass(frozen=True, slots=True)
class SumTree:
    parts: int = 1  # G

    def leaf(self, part: int) -> int:
        """The node of the tree that is one part."""
        return self.parts + part

    def under(self, node: int) -> range:
        """The parts below a node of the tree."""
        width = self.parts >> (node.bit_length() - 1)
        first = node * width - self.parts
        return range(first, first + width)

    def part_of(self, microbatch: int, count: int) -> int:
        """The part of a microbatch, of `count` that a batch has."""
        small, larger = divmod(count, self.parts)
        border = larger * (small + 1)
        return microbatch // (small + 1) if microbatch < border else larger + (microbatch - border) // small

    def microbatches(self, parts: range, count: int) -> range:
        """The microbatches of a run of parts."""
        return range(self._start(parts.start, count), self._start(parts.stop, count))

    def share(self, rank: int, workers: int) -> range:
        """The parts of one of several workers."""
        return range(rank * self.parts // workers, (rank + 1) * self.parts // workers)

    def whole(self, parts: range) -> tuple[int, ...]:
        """The nodes of the tree that these parts, and no others, add up to: as few as there are."""
        found, first = [], parts.start
        while first < parts.stop:
            width = first & -first or self.parts
            while first + width > parts.stop:
                width //= 2
            found.append((self.parts + first) // width)
            first += width
        return tuple(found)

    def sums_at_once(self, count: int, deferred: int = 0) -> int:
        """Sums of a stage's gradients that exist at once at most, the one being added to among them. `deferred`: microbatches
        whose weight gradients may wait, and keep their parts open."""
        there = min(self.parts, count)
        smallest = max(1, count // self.parts)
        waiting = -(-deferred // smallest)
        return max(
            (newest - open_).bit_count() + open_ + 1
            for newest in range(there)
            for open_ in range(min(newest, waiting) + 1)
        )

    def _start(self, part: int, count: int) -> int:
        small, larger = divmod(count, self.parts)
        return part * small + min(part, larger)


def check_parts(parts: int, microbatches: int) -> None:
    """UsageError for a number of parts that cannot be."""
    if parts & (parts - 1):
        below = 1 << (parts.bit_length() - 1)
        raise UsageError(f"--sum-tree {parts} must be a power of two: use {below} or {2 * below}")
    if parts > microbatches:
        raise UsageError(
            f"--sum-tree {parts} needs at least {parts} microbatches, and a batch has {microbatches}: use --microbatches "
            f"{parts} or more, with a --batch-size that allows it, or --sum-tree {1 << (microbatches.bit_length() - 1)}"
        )


def check_workers(parts: int, workers: int, who: str) -> None:
    """UsageError where there are more workers than parts to share: some would have nothing to do. `who` they are."""
    if parts > 1 and workers > parts:
        raise UsageError(
            f"--sum-tree {parts} keeps the bits of one process for up to {parts} {who}, and there are {workers}: use "
            f"--sum-tree {1 << (workers - 1).bit_length()} or fewer nodes"
        )


@dataclass(frozen=True, slots=True)
class Adding:
    """Who adds up what, where each of several workers has a run of parts: a vector is cut into chunks, and at every node of
    the tree whose parts lie with several workers, each chunk is added up by one of them. With two workers, each adds up one
    half and sends the other; with four, quarters of pairs follow; and so on ("recursive halving"). In the end every chunk's
    sum goes from whoever made it to everyone.

    n workers with equally many parts: (n - 1) / n of the vector leave a worker while sums are made, and again at the end."""

    tree: SumTree
    shares: tuple[range, ...]  # of every worker, in order; none is empty. Parts behind the last are absent
    whole_at: int | None = None  # only this worker needs the sum, and it is added up in one piece

    @property
    def chunks(self) -> int:
        return 1 if self.whole_at is not None else 1 << (len(self.shares) - 1).bit_length()

    def bounds(self, chunk: int, size: int) -> tuple[int, int]:
        return size * chunk // self.chunks, size * (chunk + 1) // self.chunks

    def owner(self, node: int, chunk: int) -> int:
        """The worker that has the sum below a node of the tree, of one chunk."""
        below = self.tree.under(node)
        first, last = self._holder(below[0]), self._holder(below[-1])
        if first == last:
            return first
        if self.whole_at is not None:  # as near to it as its own parts are
            return self.whole_at if first <= self.whole_at <= last else self.owner(2 * node, chunk)
        shift = (
            self.chunks.bit_length() - 1 - node.bit_length()
        )  # the root goes by the highest bit of the chunk's number
        return self.owner(2 * node + (chunk >> shift & 1 if shift >= 0 else 0), chunk)

    def split(self) -> tuple[int, ...]:
        """The nodes of the tree whose parts lie with several workers, the deepest first."""
        nodes = range(self.tree.parts - 1, 0, -1)
        return tuple(each for each in nodes if len({self._holder(part) for part in self.tree.under(each)}) > 1)

    def hops(self) -> list[tuple[int, int, int, int]]:
        """(node, chunk, from, to) of every partial sum that is sent, the deepest first."""
        found = []
        for node in self.split():
            for child in (2 * node, 2 * node + 1):
                for chunk in range(self.chunks):
                    here, there = self.owner(child, chunk), self.owner(node, chunk)
                    if here != there:
                        found.append((child, chunk, here, there))
        return found

    def most_sent(self) -> float:
        """What the busiest worker sends, partial sums and totals, in vectors."""
        chunks = Counter(here for _, _, here, _ in self.hops())
        for chunk in range(self.chunks if self.whole_at is None else 0):
            chunks[self.owner(ROOT, chunk)] += len(self.shares) - 1
        return max(chunks.values(), default=0) / self.chunks

    def _holder(self, part: int) -> int:
        return next((worker for worker, share in enumerate(self.shares) if part in share), len(self.shares) - 1)


def equal_shares(tree: SumTree, workers: int) -> Adding:
    return Adding(tree, tuple(tree.share(rank, workers) for rank in range(workers)))


def one_part_each(workers: int) -> Adding:
    """Where no tree is asked for: every worker's share is a part, the last ones are absent."""
    tree = SumTree(1 << (workers - 1).bit_length())
    return Adding(tree, tuple(range(rank, rank + 1) for rank in range(workers)))
