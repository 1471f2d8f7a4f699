"""Rings and exchanges on paper, against grids drawn by hand and the bounds of the lecture."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costs import device, devices, layer, layers
from ringtmp.errors import UsageError
from ringtmp.plan.devices import Device, LayerCost, Link, Measured, Path, Quota, check_devices
from ringtmp.plan.layer_costs import CostTable
from ringtmp.plan.pipeline_schedules import SCHEDULES
from ringtmp.plan.route import Route, Visit, plain_ring
from ringtmp.plan.simulate_pipeline import RingOptions, simulate_ring
from ringtmp.plan.simulated_clocks import Lines, Processor
from ringtmp.plan.simulated_step import Simulated
from ringtmp.strategies.data_parallel.simulate_sum_over_workers import (
    by_halving,
    simulate_overlapped_sums,
    simulate_sums,
    up_and_down_tree,
)
from ringtmp.strategies.data_parallel.simulated_workers import Workload
from ringtmp.strategies.gadmm.simulate_turns import simulate_turns
from ringtmp.strategies.hybcomm.simulate import in_two_ways
from ringtmp.strategies.ps.simulate import ServerOptions, simulate_ps
from test_next_action import grid, run


def line_route(visits: int) -> Route:
    """Every visit on a node of its own: the textbook's pipeline, without a closed ring."""
    return Route(tuple(Visit(index, index, index, index + 1) for index in range(visits)))


def drawn(result: Simulated, visits: int, ticks: int) -> list[str]:
    rows = [["."] * ticks for _ in range(visits)]
    for span in result.spans:
        cell = "U" if span.kind == "update" else f"{span.kind[0].upper()}{span.microbatch}"
        for tick in range(round(span.start_s), round(span.end_s)):
            rows[span.visit][tick] = cell
    return [" ".join(f"{cell:<2}" for cell in row).rstrip() for row in rows]


# -- the processor under its quota --------------------------------------------------------------------------------------


def test_a_burst_runs_at_full_speed_until_its_quota_is_spent() -> None:
    processor = Processor(Quota(4.0, 10.0), 1.0)
    assert processor.finish(0.0, 3.0) == 3.0
    assert processor.finish(3.0, 1.0) == 4.0, "the quota is just enough"
    assert processor.finish(4.0, 1.0) == 11.0, "and now it waits for the next period"
    assert processor.finish(11.0, 3.0) == 14.0
    assert processor.finish(25.0, 9.0) == 41.0, "4 here, 4 in the next period, 1 in the one after: 29, 34, 41"
    assert processor.finish(58.0, 3.0) == 61.0, "two seconds before the period ends, the rest after it"


@settings(max_examples=100, deadline=None)
@given(work=st.lists(st.tuples(st.floats(0, 3), st.floats(0, 9)), min_size=1, max_size=20), share=st.floats(0.1, 1.0))
def test_no_period_gives_more_than_its_quota(work: list[tuple[float, float]], share: float) -> None:
    """Against a clock that ticks."""
    quota = Quota(share * 2.0, 2.0)
    processor = Processor(quota, 1.0)
    now = 0.0
    spent: dict[int, float] = {}
    for pause, amount in work:
        now += pause
        ended = processor.finish(now, amount)
        left, at = amount, now
        while left > 1e-12:
            period = math.floor(at / 2.0 + 1e-12)
            can = min(left, quota.run_s - spent.get(period, 0.0), (period + 1) * 2.0 - at)
            spent[period] = spent.get(period, 0.0) + max(can, 0.0)
            left -= max(can, 0.0)
            at = at + can if left <= 1e-12 else (period + 1) * 2.0
        assert ended == pytest.approx(at, abs=1e-6)
        now = ended


def test_short_work_escapes_a_quota_and_long_work_does_not() -> None:
    short = simulate_ring(*_one_node(0.004, Quota(0.0045, 0.01)), RingOptions(1))
    long = simulate_ring(*_one_node(4.0, Quota(0.0045, 0.01)), RingOptions(1))
    assert short.step_s == pytest.approx(0.004)
    assert long.step_s == pytest.approx(4.0 / 0.45, rel=0.01)


def _one_node(work_s: float, quota: Quota) -> tuple[CostTable, Route, list[Device]]:
    table = CostTable([layer(forward_s=work_s / 2, backward_s=work_s / 2)], 1)
    return table, plain_ring(1, [(0, 1)]), [Device("one", quota=quota)]


# -- lines ------------------------------------------------------------------------------------------------------------------


def test_a_message_takes_the_slower_line_and_both_latencies() -> None:
    lines = Lines([device("a", rate=10, latency_s=1), device("b", rate=5, latency_s=2), device("c", rate=10)])
    assert lines.arrive(lines.depart(0.0, 0, 1, 50), 0, 1, 50) == 13.0
    assert lines.depart(0.0, 0, 2, 50) == 5.0, "the first message leaves first"
    assert lines.arrive(5.0, 0, 2, 50) == 11.0
    assert lines.carried == {(0, 1): 50, (0, 2): 50}


def test_a_measured_path_replaces_the_latencies_and_caps_the_rate() -> None:
    lines = Lines([device("a", rate=10, latency_s=1), device("b", rate=10)], {("a", "b"): Path(5.0, 0.5)})
    assert lines.arrive(lines.depart(0.0, 0, 1, 50), 0, 1, 50) == 10.5


# -- the ring ---------------------------------------------------------------------------------------------------------------


def test_the_simulation_draws_the_grid_in_its_docstring() -> None:
    table = CostTable(layers(2, update_s=1.0), 1)
    result = simulate_ring(table, line_route(2), devices(2), RingOptions(3, window=2))
    assert drawn(result, 2, 9) == ["F0 F1 .  B0 F2 B1 .  B2 U", ".  F0 B0 F1 B1 F2 B2 U  ."]


@settings(max_examples=60, deadline=None)
@given(
    visits=st.integers(1, 6), microbatches=st.integers(1, 8), window=st.integers(1, 10), seed=st.integers(0, 999),
    schedule=st.sampled_from(["1f1b", "gpipe"]),
)  # fmt: skip
def test_it_does_what_ticking_nodes_do(visits: int, microbatches: int, window: int, seed: int, schedule: str) -> None:
    """Same rule, same grid as the toy ring of the rule's own tests, for any layout."""
    luck = random.Random(seed)
    holders = [luck.randrange(visits) for _ in range(visits)]
    window = microbatches if schedule == "gpipe" else window
    toys = run(visits, microbatches, window, SCHEDULES[schedule], holders, lambda: 0)
    route = Route(tuple(Visit(index, node, index, index + 1) for index, node in enumerate(holders)))
    table = CostTable(layers(visits, update_s=1.0), 1)
    result = simulate_ring(
        table,
        route,
        devices(visits),
        RingOptions(microbatches, window, schedule),  # type: ignore[arg-type]
    )
    wanted = [row.rstrip(" .") for row in grid(toys)]
    assert [row.rstrip(" .") for row in drawn(result, visits, 10 + 4 * visits * microbatches)] == wanted


@pytest.mark.parametrize("visits", [1, 2, 4, 7])
@pytest.mark.parametrize("microbatches", [1, 4, 16])
def test_the_bubble_of_1f1b_is_that_of_the_textbook(visits: int, microbatches: int) -> None:
    table = CostTable(layers(visits), 1)
    result = simulate_ring(table, line_route(visits), devices(visits), RingOptions(microbatches))
    assert result.step_s == pytest.approx(2 * (microbatches + visits - 1))
    for node in result.nodes:
        assert node.idle_fraction == pytest.approx((visits - 1) / (microbatches + visits - 1))
        assert sum(node.idle_causes.values()) == pytest.approx(node.idle_s)


@pytest.mark.parametrize(("rate", "limit"), [(100.0, "compute"), (0.5, "link")])
def test_a_long_step_takes_the_larger_of_communication_and_computation(rate: float, limit: str) -> None:
    """Equation (3): max(c, T), but for fill and drain."""
    count, route = 64, line_route(3)
    table = CostTable(layers(3, output=1.0), 1)
    result = simulate_ring(table, route, devices(3, rate=rate), RingOptions(count, window=count))
    compute, link = count * 2.0, count * 2 / rate  # the middle node sends activations on and gradients back
    assert max(compute, link) <= result.step_s <= max(compute, link) + 2 * 3 * (2.0 + 2 / rate)
    assert (compute > link) == (limit == "compute")


def test_the_ring_carries_every_cut_once_each_way() -> None:
    table = CostTable(layers(4, output=8.0), 1)
    result = simulate_ring(table, plain_ring(3, [(0, 1), (1, 2), (2, 3), (3, 4)]), devices(3), RingOptions(5))
    assert result.link_bytes == {(0, 1): 40, (1, 0): 40, (1, 2): 40, (2, 1): 40, (2, 0): 40, (0, 2): 40}
    assert result.bytes_total == 2 * 3 * 8 * 5


def test_serialising_is_charged_to_the_device_and_sending_is_not() -> None:
    table = CostTable(layers(2, output=10.0), 1)
    free = [Device(name, link=Link(1.0, 1.0)) for name in "ab"]
    costly = [Device(name, link=Link(1.0, 1.0, 0.0, 0.25, 0.025)) for name in "ab"]
    busy = simulate_ring(table, line_route(2), free, RingOptions(3)).nodes[0].busy_s
    assert busy == 3 * 2
    charged = simulate_ring(table, line_route(2), costly, RingOptions(3)).nodes[0].busy_s
    assert charged == pytest.approx(3 * (2 + 2 * 0.5))


def test_clipping_waits_for_norms_to_go_round() -> None:
    table = CostTable(layers(3), 1)
    there = devices(3, latency_s=0.5)
    plain = simulate_ring(table, line_route(3), there, RingOptions(1))
    clipped = simulate_ring(table, line_route(3), there, RingOptions(1, clip=True))
    assert plain.step_s == 6 + 4 * 1.0
    assert clipped.step_s == plain.step_s + 2 * 1.0, "the total goes clockwise through two links before the last update"
    assert "clipping" in clipped.nodes[2].idle_causes


def test_no_visit_holds_more_than_the_window_and_the_tail_holds_one() -> None:
    table = CostTable(layers(4, stored=100.0, output=10.0), 1)
    result = simulate_ring(table, line_route(4), devices(4), RingOptions(16))
    assert [node.held for node in result.nodes] == [(7,), (5,), (3,), (1,)], (
        "a visit and a transfer each, there and back"
    )
    assert result.nodes[3].memory_bytes <= 100 + 2 * 10
    assert simulate_ring(table, line_route(4), devices(4), RingOptions(16, window=2)).nodes[0].held == (2,)


def test_later_steps_are_like_the_first_when_nothing_carries_over() -> None:
    table = CostTable(layers(4, output=1.0, update_s=0.5), 1)
    route = plain_ring(3, [(0, 1), (1, 2), (2, 3), (3, 4)])
    one = simulate_ring(table, route, devices(3, rate=2.0), RingOptions(4))
    many = simulate_ring(table, route, devices(3, rate=2.0), RingOptions(4, steps=3))
    assert many.step_s == pytest.approx(one.step_s)
    assert many.link_bytes == one.link_bytes
    assert [node.busy_s for node in many.nodes] == pytest.approx([node.busy_s for node in one.nodes])


def test_energy_is_watts_times_time_and_unknown_where_a_device_does_not_say() -> None:
    table = CostTable(layers(2), 1)
    there = [Device("a", idle_w=1.0, busy_w=3.0), Device("b", idle_w=2.0, busy_w=5.0)]
    result = simulate_ring(table, line_route(2), there, RingOptions(1))
    assert result.joules == 2 * 3 + 2 * 1 + 2 * 5 + 2 * 2
    assert simulate_ring(table, line_route(2), [there[0], Device("b")], RingOptions(1)).joules is None


@pytest.mark.timeout(60)
@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.long)])
def test_a_thousand_devices_are_simulated_within_a_minute_and_alike_every_time(count: int) -> None:
    table = CostTable(layers(count + 1, output=1.0), 1)
    route = plain_ring(count, [(index, index + 1) for index in range(count + 1)])
    result = simulate_ring(table, route, devices(count, rate=10.0), RingOptions(64))
    assert result.step_s >= 64 * 4, "the master holds two layers"
    small = CostTable(layers(33, output=1.0), 1), plain_ring(32, [(i, i + 1) for i in range(33)])
    assert simulate_ring(*small, devices(32), RingOptions(8)) == simulate_ring(*small, devices(32), RingOptions(8))


# -- exchanges: T_w = 12 s, R_w = 3 s, U_w = 2 s ----------------------------------------------------------------------


def load(compute_s: float = 0.0) -> Workload:
    each = layer(forward_s=compute_s / 2, backward_s=compute_s / 2, weights=12, update_s=2.0)
    return Workload([each], 1, 1, add_bytes_per_s=4.0)


@pytest.mark.parametrize("count", [2, 3, 5, 8])
def test_ring_all_reduce_meets_its_bound(count: int) -> None:
    result = simulate_sums(load(), devices(count, rate=1.0))
    part = (count - 1) / count
    assert result.step_s == pytest.approx(2 * part * 12 + part * 3 + 2)
    assert list(result.link_bytes.values()) == pytest.approx([2 * 12 * part] * count)


@pytest.mark.parametrize("count", [2, 3, 4, 8, 13])
def test_tree_all_reduce_meets_its_bound(count: int) -> None:
    result = simulate_sums(load(), devices(count, rate=1.0), way=up_and_down_tree)
    rounds = math.ceil(math.log2(count))
    assert result.step_s <= 2 * rounds * 12 + rounds * 3 + 2 + 1e-9
    if count & (count - 1) == 0:
        assert result.step_s == pytest.approx(2 * rounds * 12 + rounds * 3 + 2)
    assert result.bytes_total == pytest.approx(2 * 12 * (count - 1))


def test_a_sum_under_way_is_waited_for_only_as_far_as_it_is_late() -> None:
    """Sums take 2 * 12 + 3 = 27 up and down; of the four steps between two, each half of 14 and 2 more, three hide that."""
    there, late = (
        simulate_overlapped_sums(load(14.0), devices(2, rate=1.0), way=up_and_down_tree, every=4, under_way=steps)
        for steps in (3, 1)
    )
    assert there.step_s == pytest.approx(9)
    assert late.step_s == pytest.approx(9 + (27 - 9) / 4)
    assert there.bytes_total == late.bytes_total == pytest.approx(2 * 12 / 4)


@pytest.mark.parametrize(
    ("factored", "sent", "seconds"),
    [((False, False), 96, 32), ((True, False), 48 + 48, 16 + 16), ((True, True), 144, 48)],
)
def test_factors_go_to_every_other_and_gradients_to_servers_and_back(
    factored: tuple[bool, bool], sent: int, seconds: int
) -> None:
    """Three workers with two of six samples each: of a layer 12 bytes of gradients, or 4 and 8 bytes of factors a sample."""
    measured = (Measured(2, 1.0, 2.0, 0.0, 0.0, weights_s=0.5),)
    two = [LayerCost(f"layer{values}", measured, 0, 12, 0, factor_values=values) for values in (1.0, 2.0)]
    result = simulate_sums(Workload(two, 6, 3), devices(3, rate=1.0), way=in_two_ways(factored))
    assert result.bytes_total == pytest.approx(sent)
    assert seconds + 6 <= result.step_s <= seconds + 6 + 2 * 0.5 * sum(factored) + 1e-6


@pytest.mark.parametrize("count", [2, 3, 6])
def test_heads_and_tails_take_turns(count: int) -> None:
    result = simulate_turns(load(14.0), devices(count, rate=1.0), None, passes=3)
    turn = 3 * (14 / count + 2) + 12
    assert 2 * turn - 1e-9 <= result.step_s <= 2 * (turn + 12 * (count > 2)) + 1e-9
    assert result.bytes_total == pytest.approx(2 * 12 * (count - 1))


@pytest.mark.parametrize("count", [2, 4, 8])
def test_halving_sends_what_a_ring_sends_in_fewer_hops(count: int) -> None:
    result = simulate_sums(load(), devices(count, rate=1.0), way=by_halving)
    part = (count - 1) / count
    assert result.bytes_total == pytest.approx(2 * 12 * (count - 1))
    assert [each.sent_bytes for each in result.nodes] == pytest.approx([2 * 12 * part] * count)
    assert 2 * part * 12 + part * 3 + 2 <= result.step_s + 1e-9
    assert result.step_s <= 1.5 * (2 * part * 12 + part * 3 + 2)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_one_server_and_one_key_is_the_naive_bound(count: int) -> None:
    result = simulate_ps(load(), devices(count + 1, rate=1.0), ServerOptions(1, keys=1))
    # All but the last sum hide behind transfers.
    assert 2 * count * 12 + 2 <= result.step_s <= 2 * count * 12 + (count - 1) * 3 + 2
    assert result.nodes[0].sent_bytes == result.nodes[0].received_bytes == 12 * count


@pytest.mark.parametrize("count", [4, 8])
def test_many_keys_bring_a_full_duplex_server_near_n_transfers(count: int) -> None:
    quick = Workload(load().layers, 1, 1, add_bytes_per_s=1e9)
    result = simulate_ps(quick, devices(count + 1, rate=1.0), ServerOptions(1, keys=48))
    assert count * 12 <= result.step_s <= count * 12 * 1.15 + 2


def test_more_servers_share_the_traffic() -> None:
    quick = Workload(load().layers, 1, 1, add_bytes_per_s=1e9)
    one = simulate_ps(quick, devices(9, rate=1.0), ServerOptions(1, keys=24))
    four = simulate_ps(quick, devices(12, rate=1.0), ServerOptions(4, keys=6))
    assert one.nodes[0].sent_bytes == 8 * 12
    assert four.nodes[0].sent_bytes == pytest.approx(8 * 12 / 4)
    assert 8 * 12 / 4 <= four.step_s < one.step_s / 3


def test_servers_that_work_carry_what_ring_all_reduce_carries() -> None:
    result = simulate_ps(load(), devices(4, rate=1.0), ServerOptions(0, keys=8))
    for node in result.nodes:
        assert node.sent_bytes == pytest.approx(2 * 12 * 3 / 4)
        assert not node.server
    assert result.step_s >= 2 * 12 * 3 / 4


def test_an_asynchronous_worker_needs_two_transfers_and_an_update() -> None:
    quick = load(10.0)
    alone = simulate_ps(quick, devices(2, rate=1.0), ServerOptions(1, "async", keys=1))
    assert alone.step_s == pytest.approx(10 + 2 * 12 + 2)
    crowd = simulate_ps(quick, devices(9, rate=1.0), ServerOptions(1, "async", keys=4))
    assert crowd.step_s == pytest.approx(8 * 12, rel=0.05), "the server's line is full"


def test_slack_holds_the_fast_back_and_no_slack_is_nearly_in_step() -> None:
    there = [device("server"), device("slow", speed=0.1), *devices(2)]
    fast = simulate_ps(load(10.0), there, ServerOptions(1, "async"))
    tied = simulate_ps(load(10.0), there, ServerOptions(1, "ssp", slack=0))
    loose = simulate_ps(load(10.0), there, ServerOptions(1, "ssp", slack=2))
    assert fast.step_s < tied.step_s
    assert fast.step_s <= loose.step_s <= tied.step_s
    assert tied.nodes[2].idle_causes["slowest worker"] > 0
    assert tied.step_s >= 10 / 3 / 0.1


def test_bsp_waits_for_the_slowest_and_dedicated_servers_are_told_apart() -> None:
    result = simulate_ps(load(30.0), [device("server"), device("slow", speed=0.5), device("fast")], ServerOptions(1))
    assert result.step_s >= 30 / 2 / 0.5
    assert result.nodes[0].server
    assert result.nodes[2].idle_s > result.nodes[1].idle_s
    workers = [node.idle_fraction for node in result.nodes[1:]]
    assert result.idle_fraction == pytest.approx(sum(workers) / 2)


# -- descriptions -----------------------------------------------------------------------------------------------------------


def test_costs_lie_on_a_line_between_measured_sizes() -> None:
    two = LayerCost("l", (Measured(2, 2.0, 4.0, 20, 8), Measured(4, 3.0, 6.0, 40, 16)), 4, 4, 8)
    assert two.at(3) == Measured(3, 2.5, 5.0, 30, 12)
    assert two.at(8) == Measured(8, 5.0, 10.0, 80, 32)
    assert two.at(1) == Measured(1, 1.5, 3.0, 10, 4)
    assert layer(forward_s=2.0, output=8.0).at(3).forward_s == 6.0


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ((), "at least one device"),
        ((device("a"), device("a")), "two devices are called 'a'"),
        ((device("a", speed=0.0),), "device a: speed is 0"),
        ((device("a", rate=-1.0),), "device a: link up is -1"),
        ((Device("a", memory_bytes=0),), "device a: memory is 0"),
        ((Device("a", link=Link(latency_s=math.nan)),), "device a: latency is nan"),
        ((Device("a", quota=Quota(2.0, 1.0)),), "device a: a quota of 2 of its time"),
    ],
)
def test_numbers_no_device_has_are_refused(wrong: tuple[Device, ...], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        check_devices(wrong)
