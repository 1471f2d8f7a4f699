"""Which devices share a stage: cuts, sizes of groups, order of devices and their parts of the tree of sums, searched together.

Pure. A shape says who is in which group, from the front to the tail: [[1, 2], [3]] is M-2-1-M. Of devices of few kinds every
shape there is gets its best cuts, exactly; else shapes are changed, a device, a group at a time, for as long as that helps,
and the gap to a lower bound is told. What is compared is the estimate

    a step = the way of one microbatch + the longest of (a member's microbatches - 1) * its time for one + adding up

and the best few are simulated, with cuts moved (partition.py). In a group the device with the largest share of the parts is
the fastest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import islice, pairwise, product

from ringtmp.plan.devices import Device, Paths
from ringtmp.plan.exact_cuts import Candidate, Segments, given_order, kinds_of, shortest_way
from ringtmp.plan.node_groups import by_group, exchange_s
from ringtmp.plan.partition import REFINE_ACTIONS, refine, simulated_cost
from ringtmp.plan.search_orders import Found, least_bottleneck, likely
from ringtmp.plan.sum_tree import SumTree

#: Shapes that are weighed one by one: 7 like workers make 127.
MOST_SHAPES = 256
#: Shapes looked at where there are too many to weigh.
SEARCHED_SHAPES = 160
#: Simulated, of those weighed; of these the best get their cuts moved.
FINALISTS, MOVED = 16, 4
#: Bottlenecks looked at beside the least, as multiples of it.
LOOSER = (1.25, 1.6)

Shape = tuple[tuple[int, ...], ...]


def group_choices(
    segments: Segments, devices: Sequence[Device], paths: Paths | None, named: Collection[str], keep_all: bool
) -> tuple[Found, float]:
    """Rings in which some stage is shared, and how far the best bottleneck may be from the least possible one. `named`: devices
    that no other of their kind may stand in for; `keep_all`: nobody is left out."""
    search = _Search(segments, devices, keep_all)
    shapes = list(islice(search.every(kinds_of(devices, named)), MOST_SHAPES + 1))
    exact = len(shapes) <= MOST_SHAPES
    known = [each for shape in shapes if (each := search.weigh(shape)) is not None] if exact else search.climb()
    known.sort(key=lambda each: search.estimate_s(each))
    rough = [
        (each, simulated_cost(segments, [devices[i] for i in each.order], each, paths))
        for each in likely(segments, known, FINALISTS)
    ]
    rough.sort(key=lambda each: each[1])
    found = [
        refine(segments, [devices[i] for i in each.order], each, paths, REFINE_ACTIONS) for each, _ in rough[:MOVED]
    ]
    gap = 0.0
    if not exact and found:
        best = min(found, key=lambda each: each[1])[0]
        gap = max(0.0, best.bottleneck / least_bottleneck(segments, devices, best.order) - 1)
    return found, gap


class _Search:
    def __init__(self, segments: Segments, devices: Sequence[Device], keep_all: bool) -> None:
        self._segments, self._devices, self._keep_all = segments, devices, keep_all
        self._tree = SumTree(segments.options.parts)
        self._count = segments.options.microbatches
        self._most = min(self._tree.parts, self._count)  # members of a group
        table = segments.table
        self._stages = table.count - table.least_front - table.least_tail
        self._weighed: dict[Shape, Candidate | None] = {}

    # -- every shape --------------------------------------------------------------------------------------------------

    def every(self, kinds: Sequence[Sequence[int]]) -> Iterator[Shape]:
        """Every shape with a group in it, but for devices of one kind that change places."""
        for used in product(*(range(len(each) * self._keep_all, len(each) + 1) for each in kinds)):
            for counts in self._split(used, self._stages):
                if any(sum(each) > 1 for each in counts):
                    yield self._named(counts, kinds)

    def _split(self, left: tuple[int, ...], stages: int) -> Iterator[tuple[tuple[int, ...], ...]]:
        """All ways to give so many of each kind to stages, one after the other."""
        if not any(left):
            yield ()
            return
        if not stages:
            return
        for group in product(*(range(each + 1) for each in left)):
            if 0 < sum(group) <= self._most:
                rest = tuple(a - b for a, b in zip(left, group, strict=True))
                for others in self._split(rest, stages - 1):
                    yield (group, *others)

    def _named(self, counts: Sequence[Sequence[int]], kinds: Sequence[Sequence[int]]) -> Shape:
        unused = [iter(members) for members in kinds]
        return tuple(
            tuple(next(unused[kind]) for kind, number in enumerate(each) for _ in range(number)) for each in counts
        )

    # -- what a shape is worth ----------------------------------------------------------------------------------------

    def weigh(self, shape: Shape) -> Candidate | None:
        """With its best cuts: those with the least bottleneck, or looser ones with a shorter way. None where none fit."""
        shape = tuple(map(self._ranked, shape))
        if shape not in self._weighed:
            order = (0, *(each for group in shape for each in group))
            members, groups = [self._devices[i] for i in order], tuple(map(len, shape))
            tight = given_order(self._segments, members, groups)
            looser = [
                shortest_way(self._segments, members, tight.bottleneck * factor, groups) for factor in LOOSER if tight
            ]
            found = [replace(each, order=order) for each in (tight, *looser) if each is not None]
            self._weighed[shape] = min(found, key=self.estimate_s, default=None)
        return self._weighed[shape]

    def _ranked(self, group: tuple[int, ...]) -> tuple[int, ...]:
        """The faster a member, the larger its share."""
        shares = [self._microbatches(rank, len(group)) for rank in range(len(group))]
        ranks = sorted(range(len(group)), key=lambda rank: shares[rank])
        by_pace = sorted(group, key=lambda i: (self._devices[i].pace, i))
        placed = dict(zip(ranks, by_pace, strict=True))
        return tuple(placed[rank] for rank in range(len(group)))

    def _microbatches(self, rank: int, members: int) -> int:
        return len(self._tree.microbatches(self._tree.share(rank, members), self._count))

    def estimate_s(self, each: Candidate) -> float:
        table, way_s, longest_s, adding_s = self._segments.table, 0.0, 0.0, 0.0
        stages = by_group(each.groups, [self._devices[i] for i in each.order])
        work = [table.stage(first, stop) for first, stop in each.bounds]
        ends_s = (work[0].forward_s + work[0].backward_s + work[-1].forward_s + work[-1].backward_s) / stages[0][0].pace
        way_s, longest_s = ends_s, (self._count - 1) * ends_s
        for members, stage, (first, stop) in zip(stages[1:], work[1:], each.bounds[1:], strict=False):
            took_s = [(stage.forward_s + stage.backward_s) / device.pace for device in members]
            crossing = [
                2 * (table.cut_bytes[first] + table.cut_bytes[stop])
                / min(device.link.up_bytes_per_s, device.link.down_bytes_per_s)
                for device in members
            ]  # fmt: skip
            counts = [self._microbatches(rank, len(members)) for rank in range(len(members))]
            way_s += max(took_s) + max(crossing) + 4 * max(device.link.latency_s for device in members)
            longest_s = max(
                longest_s,
                *(
                    (count - 1) * max(took, line / 2)
                    for count, took, line in zip(counts, took_s, crossing, strict=True)
                ),
            )
            adding_s = max(adding_s, exchange_s(members, table.gradients[stop] - table.gradients[first]))
        return way_s + longest_s + adding_s

    # -- a search -----------------------------------------------------------------------------------------------------

    def climb(self) -> list[Candidate]:
        """From rings of equally large groups of neighbours in pace, the best few of them changed for as long as that helps."""
        known: dict[Shape, tuple[float, Candidate]] = {}

        def look(shape: Shape) -> float:
            if shape not in known and (found := self.weigh(shape)) is not None:
                known[shape] = (self.estimate_s(found), found)
            return known[shape][0] if shape in known else float("inf")

        starts = sorted(dict.fromkeys(self._starts()), key=look)[:2]
        for shape in starts:
            best_s, improved = look(shape), True
            while improved and len(self._weighed) < SEARCHED_SHAPES:
                improved = False
                for other in islice(self._changed(shape), SEARCHED_SHAPES - len(self._weighed)):
                    if (took_s := look(other)) < best_s * (1 - 1e-9):
                        shape, best_s, improved = other, took_s, True
                        break
        return [each for _, each in known.values()]

    def _starts(self) -> Iterator[Shape]:
        by_pace = sorted(range(1, len(self._devices)), key=lambda i: (-self._devices[i].pace, i))
        used = len(by_pace)
        while used > 1:
            members, stages = by_pace[:used], 1
            while stages <= min(self._stages, used):
                size = -(-used // stages)
                if 1 < size <= self._most:
                    edges = [used * at // stages for at in range(stages + 1)]
                    yield tuple(tuple(members[a:b]) for a, b in pairwise(edges))
                stages += max(1, stages // 4)
            used = used * 3 // 4 if used > 2 and not self._keep_all else 0

    def _changed(self, shape: Shape) -> Iterator[Shape]:
        """One device to another group, two that change places, one left out, two groups into one, a group into two."""
        places = range(len(shape))
        slowest = [min(group, key=lambda i: self._devices[i].pace) for group in shape]
        for here in places:
            rest = tuple(each for each in shape[here] if each != slowest[here])
            for there in places:
                if there != here and len(shape[there]) < self._most:
                    yield _with(shape, {here: rest, there: (*shape[there], slowest[here])})
            if not self._keep_all:
                yield _with(shape, {here: rest})
        for here in places[:-1]:
            if len(shape[here]) + len(shape[here + 1]) <= self._most:
                yield _with(shape, {here: (*shape[here], *shape[here + 1]), here + 1: ()})
            yield _with(shape, {here: shape[here + 1], here + 1: shape[here]})
        for here in places:
            if len(shape[here]) > 1 and len(shape) < self._stages:
                half = len(shape[here]) // 2
                yield (*shape[:here], shape[here][:half], shape[here][half:], *shape[here + 1 :])


def _with(shape: Shape, changed: dict[int, tuple[int, ...]]) -> Shape:
    return tuple(group for at, each in enumerate(shape) if (group := changed.get(at, each)))
