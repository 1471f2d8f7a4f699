"""Groups on paper: who is in which, who has a microbatch, in which order the front admits them, what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ringtmp.errors import UsageError
from ringtmp.plan.devices import Device, Link, Quota
from ringtmp.plan.node_groups import (
    BUCKET_BYTES,
    added_up_at,
    admission,
    check_groups,
    exchange_bytes,
    exchange_s,
    fitted,
    grouped,
    member_for,
    members_of,
    parse_groups,
    share_of,
)
from ringtmp.plan.route import MASTER, holder_of
from ringtmp.plan.sum_tree import SumTree

#: M-3-2-M over 6 nodes
ROUTE = grouped(members_of((3, 2), range(6)), [(0, 1), (1, 3), (3, 5), (5, 6)])


def test_the_master_has_both_ends_and_the_others_are_grouped_in_their_order() -> None:
    assert [visit.members for visit in ROUTE.visits] == [(0,), (1, 2, 3), (4, 5), (0,)]
    assert ROUTE.nodes() == (0, 1, 2, 3, 4, 5)
    assert ROUTE.grouped
    assert [visit.index for visit in ROUTE.on(5)] == [2]
    assert ROUTE.neighbours(2) == (0, 1, 3, 4, 5)  # those before and behind, and its own group
    assert ROUTE.neighbours(MASTER) == (1, 2, 3, 4, 5)


def test_of_a_group_the_first_keeps_snapshots_with_the_first_of_the_next() -> None:
    assert [holder_of(ROUTE, node) for node in range(6)] == [None, 4, None, None, 0, None]


def test_a_member_has_whole_parts_and_everything_is_had_once() -> None:
    tree = SumTree(8)
    assert [list(share_of(ROUTE.visits[1], node, tree)) for node in (1, 2, 3)] == [[0, 1], [2, 3, 4], [5, 6, 7]]
    for visit in ROUTE.visits:
        had = [node for part in range(8) for node in visit.members if part in share_of(visit, node, tree)]
        assert had == [member_for(visit, part, tree) for part in range(8)]


def test_the_front_admits_in_turn_for_the_members_of_the_largest_group() -> None:
    two = grouped(members_of((2, 1), range(4)), [(0, 1), (1, 2), (2, 3), (3, 4)])
    assert admission(two, SumTree(4), 8) == [0, 4, 1, 5, 2, 6, 3, 7]
    assert admission(ROUTE, SumTree(4), 6) == [0, 2, 4, 1, 3, 5]
    assert admission(ROUTE, SumTree(4), 2) == [0, 1]  # fewer microbatches than parts


def test_the_first_member_always_has_the_first_microbatch() -> None:
    for count in range(1, 12):
        assert all(member_for(visit, SumTree(4).part_of(0, count), SumTree(4)) == visit.node for visit in ROUTE.visits)


def test_groups_are_fitted_to_the_nodes_that_are_there() -> None:
    assert fitted((2, 2), 4) == (2, 2)
    assert fitted((2, 2), 3) == (2, 1)
    assert fitted((3, 1), 3) == (2, 1)
    assert fitted((1, 1), 1) == (1,)
    assert fitted((3, 2), 6) == (3, 3)


def test_adding_up_takes_the_slowest_link_every_round_and_the_messages() -> None:
    slow = Device("a", quota=Quota(0.002, 0.01), link=Link(10.0, 10.0, 0.1))
    fast = Device("b", speed=2.0, link=Link(30.0, 20.0))
    assert exchange_bytes([slow, fast], 100.0) == 100.0  # half there and half back
    assert exchange_s([slow, fast], 100.0) == pytest.approx(10.0 + 2 * 0.1)  # sums, and totals
    busy = replace(slow, link=replace(slow.link, message_cpu_s=0.01))
    # Two messages out and two in, at a fifth of a processor.
    assert exchange_s([busy, fast], 100.0) == pytest.approx(10.0 + 2 * 0.1 + 4 * 0.01 / 0.2)
    assert exchange_s([slow], 100.0) == 0.0


def test_sums_leave_layer_by_layer_behind_the_last_microbatch() -> None:
    """Four messages of a second each way; the last of four microbatch-seconds brings the last message's gradients."""
    size, rate = 4.0 * BUCKET_BYTES, BUCKET_BYTES / 2.0
    two = [Device(name, link=Link(rate, rate)) for name in "ab"]
    assert exchange_s(two, size) == pytest.approx(8.0)  # 4 s of one's own half, 4 s of totals
    assert added_up_at(two, size, [0.0, 0.0], [4.0, 4.0]) == pytest.approx(1.0 + 4.0 + 4.0)  # hidden: 3 of 4 s
    assert added_up_at(two, size, [0.0, 0.0], [40.0, 40.0]) == pytest.approx(40.0 + 1.0 + 4.0)
    assert added_up_at(two, size, [0.0, 9.0], [4.0, 9.0]) == pytest.approx(9.0 + 8.0)  # nothing to hide behind
    small = float(BUCKET_BYTES)  # all in one message
    assert added_up_at(two, small, [0.0, 0.0], [4.0, 4.0]) == pytest.approx(4.0 + exchange_s(two, small))
    assert added_up_at(two, 0.0, [0.0, 0.0], [4.0, 4.0]) == pytest.approx(4.0)


def test_groups_that_cannot_be_are_refused() -> None:
    assert parse_groups("3, 2,1") == (3, 2, 1)
    for text in ("", "2,,2", "0,2", "-1", "two"):
        with pytest.raises(UsageError, match="must be numbers of nodes with commas"):
            parse_groups(text)
    with pytest.raises(UsageError, match="needs 6 nodes with the master, and there are 5"):
        check_groups((3, 2), 5, 4)
    with pytest.raises(UsageError, match="use --sum-tree 4, or smaller groups"):
        check_groups((3, 2), 6, 2)
