"""Groups: nodes that hold the same segment and share a step's microbatches. Pure.

    M-2-2-M      visit 0   master          front
                 visit 1   nodes 1, 2      the same layers on both
                 visit 2   nodes 3, 4
                 visit 3   master          tail, loss

A member has whole parts of the tree of sums (`sum_tree.py`), so that a group can add up its gradients in the order of one
process; a microbatch goes from the member that has it in one group to the one that has it in the next. The master's front and
tail are always the master alone. The front admits microbatches in turn for the members of the largest group, so that none of
them waits until another has had all of its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain, zip_longest
from typing import TypeVar

from ringtmp.errors import UsageError
from ringtmp.plan.devices import Device
from ringtmp.plan.route import MASTER, Route, Visit
from ringtmp.plan.sum_tree import SumTree

#: Gradients travel together until they have this many bytes (strategies/ring/group_sums.py).
BUCKET_BYTES = 4 << 16


#: `--groups auto`: the plan chooses.
ANY_GROUPS = "auto"
#: `--group-sums`: members wait until gradients are added up.
EXACT_SUMS = "exact"
#: Steps that what other members make may be late at most.
MOST_LATE = 64


def parse_groups(text: str) -> tuple[int, ...]:
    """'2,2' -> (2, 2)"""
    sizes = text.split(",")
    if not all(re.fullmatch(r"\s*[1-9]\d{0,3}\s*", each) for each in sizes):
        raise UsageError(f"--groups {text!r} must be numbers of nodes with commas, such as 2,2, or {ANY_GROUPS}")
    return tuple(int(each) for each in sizes)


def parse_sums(text: str) -> int:
    """How many steps what other members of a group make may be late. 'exact' -> 0, 'async:2' -> 2"""
    if text == EXACT_SUMS:
        return 0
    found = re.fullmatch(r"async:([1-9]\d{0,2})", text)
    if found is None or int(found[1]) > MOST_LATE:
        raise UsageError(
            f"--group-sums {text!r} must be {EXACT_SUMS}, or async:STEPS with 1 to {MOST_LATE} steps that sums may be late, "
            "such as async:2"
        )
    return int(found[1])


def shared_parts(sum_tree: int, late: int, microbatches: int) -> int:
    """Parts of a step that members of groups share: those of the tree of sums, or where no bits are kept as many as there
    can be, for shares that are as equal as can be."""
    return sum_tree if not late else 1 << (microbatches.bit_length() - 1)


def check_late_groups(groups: Sequence[int], late: int, sum_tree: int, microbatches: int) -> None:
    """UsageError where members that do not wait for each other cannot be, or would not keep what was asked for."""
    text = f"--group-sums async:{late}"
    if sum_tree > 1:
        raise UsageError(
            f"{text} applies sums in the order in which they come, and --sum-tree {sum_tree} asks for the bits of one process: "
            f"leave one of them out"
        )
    if max(groups) > 1 << (microbatches.bit_length() - 1):
        raise UsageError(
            f"{text} shares {microbatches} microbatches over {max(groups)} nodes: use --microbatches "
            f"{1 << (max(groups) - 1).bit_length()} or more, or smaller groups"
        )


def check_groups(groups: Sequence[int], nodes: int, parts: int | None) -> None:
    """UsageError for groups that cannot be. `parts` of the tree of sums; None: members do not wait for sums."""
    text, needed = ",".join(map(str, groups)), 1 + sum(groups)
    if nodes != needed:
        raise UsageError(
            f"--groups {text} needs {needed} nodes with the master, and there are {nodes}: use --nodes {needed}"
        )
    if parts is not None and max(groups) > parts:
        least = 1 << (max(groups) - 1).bit_length()
        raise UsageError(
            f"--groups {text} shares a step's microbatches over {max(groups)} nodes, which keeps the bits of one process with "
            f"--sum-tree {least} or more, and it is {parts}: use --sum-tree {least}, or smaller groups"
        )


def fitted(groups: Sequence[int], workers: int) -> tuple[int, ...]:
    """The groups for as many nodes besides the master as there are: the largest give a node up, the smallest get one."""
    found = list(groups)
    while sum(found) > workers:
        at = max(range(len(found)), key=lambda place: (found[place], place))
        found[at] -= 1
        found = [each for each in found if each]
    while sum(found) < workers:
        found[min(range(len(found)), key=lambda place: found[place])] += 1
    return tuple(found)


def kept_in_place(before: Sequence[tuple[int, ...]], nodes: Sequence[int], most: int) -> list[tuple[int, ...]] | None:
    """The groups as they were, without those who are gone; who is new enters the group with the fewest members, so that no
    layer moves. `before` without the master; `nodes` those who are there, the master too; `most`: members a group can have.
    None: a group has nobody left, or there is no room for all."""
    found = [[node for node in group if node in nodes] for group in before]
    if not all(found):
        return None
    there = {MASTER, *(node for group in found for node in group)}
    for node in sorted(set(nodes) - there):
        smallest = min(found, key=len)
        if len(smallest) >= most:
            return None
        smallest.append(node)
    return [tuple(group) for group in found]


T = TypeVar("T")


def by_group(groups: Sequence[int], members: Sequence[T]) -> list[tuple[T, ...]]:
    """The master, and every group: `members`, the master first, in their order."""
    found: list[tuple[T, ...]] = [(members[0],)]
    first = 1
    for size in groups:
        found.append(tuple(members[first : first + size]))
        first += size
    return found


def members_of(groups: Sequence[int], nodes: Sequence[int]) -> list[tuple[int, ...]]:
    """Who is in which visit."""
    return [*by_group(groups, nodes), (MASTER,)]


def shape_text(groups: Sequence[int]) -> str:
    """M-2-2-M"""
    return "-".join(["M", *map(str, groups), "M"])


def grouped(members: Sequence[tuple[int, ...]], bounds: Sequence[tuple[int, int]]) -> Route:
    visits = zip(members, bounds, strict=True)
    return Route(
        tuple(
            Visit(at, who[0], *bound, others=who[1:]) for at, (who, bound) in enumerate(visits)
        )
    )  # fmt: skip


def exchange_bytes(members: Sequence[Device], gradient_bytes: float) -> float:
    """What each sends while its group adds up: its gradients once while sums are made and once at the end, but for its own
    share."""
    return 2 * gradient_bytes * (len(members) - 1) / len(members)


def exchange_s(members: Sequence[Device], gradient_bytes: float) -> float:
    """Adding up over a group, when all have done their microbatches: the slowest link, every round's latency, and what the
    messages cost the slowest of them."""
    if len(members) == 1:
        return 0.0
    rate = _slowest(members)
    rounds = (len(members) - 1).bit_length()
    latency_s = (rounds + 1) * sum(sorted(each.link.latency_s for each in members)[-2:])
    sent = exchange_bytes(members, gradient_bytes)
    messages = -(-gradient_bytes // BUCKET_BYTES) * (rounds + len(members) - 1)
    own_s = max(
        2 * (messages * each.link.message_cpu_s + sent * each.link.byte_cpu_s) * each.speed / each.pace
        for each in members
    )
    return sent / rate + latency_s + own_s


def added_up_at(
    members: Sequence[Device], gradient_bytes: float, began: Sequence[float], done: Sequence[float]
) -> float:
    """When a group has added up. Each member's own sums leave layer by layer behind its last microbatch, which goes backward
    from `began` to `done`; only the last message must wait for the end. The rest follows when everyone's are out."""
    rate, message = _slowest(members), min(gradient_bytes, BUCKET_BYTES)
    own_s, last_s = gradient_bytes / 2 / rate, message / 2 / rate
    first = message / gradient_bytes if gradient_bytes else 1.0
    out = max(max(end + last_s, begin + (end - begin) * first + own_s) for begin, end in zip(began, done, strict=True))
    return out + exchange_s(members, gradient_bytes) - own_s


def _slowest(members: Sequence[Device]) -> float:
    return min(min(each.link.up_bytes_per_s, each.link.down_bytes_per_s) for each in members)


def member_for(visit: Visit, part: int, tree: SumTree) -> int:
    """The node that has this part of a step at a visit."""
    members = visit.members
    return next(node for rank, node in enumerate(members) if part in tree.share(rank, len(members)))


def who_has(visit: Visit, microbatch: int, count: int, tree: SumTree) -> int:
    """The node that has a microbatch of `count` at a visit."""
    return visit.node if not visit.others else member_for(visit, tree.part_of(microbatch, count), tree)


def without_any(visit: Visit, count: int, tree: SumTree) -> list[int]:
    """Members that have nothing to do in a pass of so few microbatches."""
    return [node for node in visit.others if not tree.microbatches(share_of(visit, node, tree), count)]


def share_of(visit: Visit, node: int, tree: SumTree) -> range:
    """The parts that a node has at a visit."""
    return tree.share(visit.members.index(node), len(visit.members))


def admission(route: Route, tree: SumTree, count: int) -> list[int]:
    """The order in which the front admits `count` microbatches."""
    largest = max(len(visit.members) for visit in route.visits)
    queues = [tree.microbatches(tree.share(rank, largest), count) for rank in range(largest)]
    return [each for each in chain.from_iterable(zip_longest(*queues)) if each is not None]
