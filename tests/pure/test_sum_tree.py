"""The tree of sums on paper: parts, who adds up what, what exists at once, what is refused."""

from __future__ import annotations

import itertools

import pytest
import torch

from ringtmp.errors import UsageError
from ringtmp.plan.sum_tree import (
    ROOT,
    Adding,
    SumTree,
    check_parts,
    check_workers,
    equal_shares,
    one_part_each,
)  # fmt: skip
from ringtmp.runtime.add_along_tree import TreeAddition, flat_sum
from ringtmp.runtime.gradient_sums import GradientSums

SIZES = [1, 2, 4, 8, 16]


@pytest.mark.parametrize("parts", SIZES)
def test_parts_are_those_of_tensor_split(parts: int) -> None:
    tree = SumTree(parts)
    for count in range(1, 40):
        expected = [each.tolist() for each in torch.arange(count).tensor_split(parts)]
        assert [list(tree.microbatches(range(part, part + 1), count)) for part in range(parts)] == expected
        assert all(tree.part_of(each, count) == part for part, found in enumerate(expected) for each in found)


def test_nodes_of_the_tree_are_numbered_as_in_a_heap() -> None:
    tree = SumTree(4)
    assert [list(tree.under(node)) for node in range(1, 8)] == [[0, 1, 2, 3], [0, 1], [2, 3], [0], [1], [2], [3]]
    assert tree.whole(range(4)) == (ROOT,)
    assert SumTree(8).whole(range(1, 7)) == (9, 5, 6, 14)


@pytest.mark.parametrize("parts", SIZES)
def test_a_run_of_parts_is_covered_once_by_as_few_nodes_as_there_are(parts: int) -> None:
    tree = SumTree(parts)
    for first, stop in itertools.combinations(range(parts + 1), 2):
        nodes = tree.whole(range(first, stop))
        assert [part for node in nodes for part in tree.under(node)] == list(range(first, stop))
        assert not any(a >> 1 == b >> 1 for a, b in itertools.pairwise(nodes))


def test_two_workers_add_up_a_half_each_and_four_pairs_of_quarters() -> None:
    two = equal_shares(SumTree(4), 2)
    assert two.split() == (1,)
    assert [two.owner(ROOT, chunk) for chunk in range(2)] == [0, 1]
    four = equal_shares(SumTree(4), 4)
    assert four.split() == (3, 2, 1)
    assert [four.owner(2, chunk) for chunk in range(4)] == [0, 1, 0, 1]  # distance 1
    assert [four.owner(3, chunk) for chunk in range(4)] == [2, 3, 2, 3]
    assert [four.owner(ROOT, chunk) for chunk in range(4)] == [0, 1, 2, 3]  # distance 2


@pytest.mark.parametrize("workers", range(1, 9))
def test_whoever_adds_up_has_one_of_the_two_sums(workers: int) -> None:
    """Of every node and chunk the owner owns a child's, so that one message brings the other; and a vector is cut evenly."""
    for adding in (equal_shares(SumTree(8), workers), one_part_each(workers)):
        for node, chunk in itertools.product(adding.split(), range(adding.chunks)):
            assert adding.owner(node, chunk) in (adding.owner(2 * node, chunk), adding.owner(2 * node + 1, chunk))
        bounds = [adding.bounds(chunk, 1003) for chunk in range(adding.chunks)]
        assert [a for a, _ in bounds] + [1003] == [0, *(b for _, b in bounds)]


def test_every_worker_sends_as_much_as_around_a_ring() -> None:
    for workers in (2, 4, 8):
        adding = equal_shares(SumTree(8), workers)
        sent = dict.fromkeys(range(workers), 0)
        for node, chunk in itertools.product(adding.split(), range(adding.chunks)):
            for child in (2 * node, 2 * node + 1):
                if adding.owner(child, chunk) != adding.owner(node, chunk):
                    sent[adding.owner(child, chunk)] += 1
        assert set(sent.values()) == {workers - 1}  # chunks of n


def test_uneven_shares_have_an_owner_for_every_node() -> None:
    adding = Adding(SumTree(4), (range(3), range(3, 4)))
    assert adding.split() == (3, 1)
    assert [adding.owner(3, chunk) for chunk in range(2)] == [0, 0]
    assert [adding.owner(ROOT, chunk) for chunk in range(2)] == [0, 0]


def _gradients(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(5, generator=generator) * 10.0**each for each in range(count)]


def test_sums_go_up_the_tree_and_what_is_absent_passes_its_sibling_on() -> None:
    for parts, there in ((2, 2), (4, 4), (4, 3), (8, 5), (8, 1)):
        parameter = torch.zeros(5, requires_grad=True)
        sums = GradientSums(SumTree(parts), [parameter])
        given = _gradients(there)
        level: list[torch.Tensor | None] = [*given, *[None] * (parts - there)]
        while len(level) > 1:
            level = [
                a if b is None else a + b if a is not None else None for a, b in zip(*[iter(level)] * 2, strict=True)
            ]
        for part, gradient in enumerate(given):
            sums.turn_to(part)
            parameter.grad = gradient.clone()
            sums.close(())
        sums.total()
        assert parameter.grad is not None
        assert level[0] is not None
        assert parameter.grad.equal(level[0]), (parts, there)


def test_a_minus_zero_is_not_lost_where_nothing_is_added() -> None:
    parameter, other = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    sums = GradientSums(SumTree(4), [parameter, other])
    sums.turn_to(0)
    parameter.grad = torch.tensor([-0.0])
    sums.turn_to(1)
    sums.total()
    assert parameter.grad is not None
    assert torch.signbit(parameter.grad).item()
    assert other.grad is None


def test_weight_gradients_left_for_later_go_to_their_own_part() -> None:
    parameter = torch.zeros(1, requires_grad=True)
    sums = GradientSums(SumTree(2), [parameter])

    def add(part: int, value: float) -> None:
        sums.turn_to(part)
        parameter.grad = torch.tensor([value]) if parameter.grad is None else parameter.grad.add_(value)

    add(0, 1e8)
    add(1, 1.0)
    sums.close(waiting={0})
    add(0, -1e8)  # late
    sums.close(waiting=())
    add(1, 1.0)
    sums.total()
    assert parameter.grad is not None
    assert parameter.grad.item() == 2.0  # (1e8 - 1e8) + (1 + 1); in another order float32 loses the ones


def test_what_exists_at_once() -> None:
    assert [SumTree(parts).sums_at_once(32) for parts in SIZES] == [1, 2, 3, 4, 5]
    assert SumTree(8).sums_at_once(3) == 2  # absent parts take no room
    assert SumTree(4).sums_at_once(8, deferred=3) == 4  # three parts open, and one sum of those before
    assert SumTree(1).sums_at_once(8, deferred=3) == 1


def test_a_number_of_parts_that_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match="--sum-tree 6 must be a power of two: use 4 or 8"):
        check_parts(6, 8)
    with pytest.raises(UsageError, match="needs at least 16 microbatches, and a batch has 12.*or --sum-tree 8"):
        check_parts(16, 12)
    check_parts(16, 16)
    with pytest.raises(UsageError, match="up to 2 workers, and there are 3: use --sum-tree 4 or fewer nodes"):
        check_workers(2, 3, "workers")
    check_workers(1, 3, "workers")


def _sum_of(vectors: list[torch.Tensor | None]) -> torch.Tensor | None:
    while len(vectors) > 1:
        vectors = [b if a is None else a if b is None else a + b for a, b in zip(*[iter(vectors)] * 2, strict=True)]
    return vectors[0]


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("there", [8, 5, 2])
def test_workers_end_with_the_sum_of_one_process(workers: int, there: int) -> None:
    """The last parts are absent; a tensor gets no gradient in the first part; another gets none anywhere."""
    generator = torch.Generator().manual_seed(there)
    slots, size = [(0, 5), (16, 20), (32, 33)], 48
    given = [[torch.randn(b - a, generator=generator) * 10.0**part for a, b in slots] for part in range(there)]
    expected = [
        _sum_of(
            [None if (part, at) == (0, 0) or at == 2 else given[part][at] for part in range(there)]
            + [None] * (8 - there)
        )
        for at in range(3)
    ]
    adding, ends = equal_shares(SumTree(8), workers), {}
    for rank in range(workers):
        mine = {}
        for node in adding.tree.whole(adding.shares[rank]):
            parts = [part for part in adding.tree.under(node) if part < there]
            below = [
                _sum_of([
                    None if part >= there or (part, at) == (0, 0) or at == 2 else given[part][at]
                    for part in adding.tree.under(node)
                ])
                for at in range(3)
            ]  # fmt: skip
            if parts:
                mine[node] = flat_sum(below, slots, size)
        ends[rank] = TreeAddition(adding, rank, mine, slots, size)
    flying = [(rank, send) for rank, each in ends.items() for send in each.begin()]
    while flying:
        _, send = flying.pop(int(torch.randint(len(flying), (), generator=generator)))
        flying += [(send.to, each) for each in ends[send.to].take(send.node, send.chunk, send.sum)]
    for each in ends.values():
        assert each.total is not None
        assert each.total.there == (True, True, False)
        for at, (a, b) in enumerate(slots[:2]):
            assert each.total.values[a:b].equal(expected[at]), (workers, at)
