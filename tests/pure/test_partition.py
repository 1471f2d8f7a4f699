"""Who holds what, against brute force; and what does not fit, to the byte."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import combinations, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costs import device, devices, layer, layers
from ringtmp.errors import DoesNotFit, UsageError
from ringtmp.plan.devices import Device, LayerCost, Link, Quota
from ringtmp.plan.exact_cuts import Segments, every_multiset, given_order, shortest_way
from ringtmp.plan.layer_costs import CostTable
from ringtmp.plan.memory_forecast import forecast, held, held_in, require_fit
from ringtmp.plan.partition import REFINE_ACTIONS, refine
from ringtmp.plan.planner import PlanOptions, plan
from ringtmp.plan.route import Route, plain_ring
from ringtmp.plan.simulate_pipeline import RingOptions, simulate_ring
from ringtmp.plan.simulated_step import Simulated

Bounds = list[tuple[int, int]]


@st.composite
def models(draw: st.DrawFn, least: int = 3, most: int = 8) -> list[LayerCost]:
    count = draw(st.integers(least, most))
    number = st.integers(1, 20).map(float)
    return [
        layer(f"l{i}", draw(number), draw(number), draw(number), draw(number), draw(st.integers(0, 30)))
        for i in range(count)
    ]


@st.composite
def rings(draw: st.DrawFn, least: int = 2, most: int = 4) -> list[Device]:
    count = draw(st.integers(least, most))
    speeds = st.sampled_from([0.25, 1.0, 4.0])
    rates = st.sampled_from([0.5, 4.0, math.inf])
    room = st.sampled_from([150.0, 400.0, math.inf])
    return [
        Device(f"d{i}", draw(speeds), memory_bytes=draw(room), link=Link(*[draw(rates)] * 2, 0.0, 0.125, 0.0625))
        for i in range(count)
    ]


def every_cut(count: int, nodes: int) -> list[Bounds]:
    return [list(zip([0, *cuts], [*cuts, count], strict=True)) for cuts in combinations(range(1, count), nodes)]


def slowest(table: CostTable, there: list[Device], bounds: Bounds, options: RingOptions) -> float:
    """Compute, send and receive by the book; infinite where a device has too little memory."""
    counts = [held(visit, len(bounds), options) for visit in range(len(bounds))]
    memory = forecast(table, plain_ring(len(there), bounds), there, counts, 0.0)
    if any(each.missing_bytes > 0 for each in memory):
        return math.inf
    worst = 0.0
    for node, each in enumerate(there):
        parts = [bounds[node]] if node else [bounds[0], bounds[-1]]
        work = crossing = 0.0
        for first, stop in parts:
            stage = table.stage(first, stop)
            work += stage.forward_s + stage.backward_s
            crossing += table.cut_bytes[first] + (table.cut_bytes[stop] if stop < table.count else 0.0)
        own = 4 * each.link.message_cpu_s + 2 * crossing * each.link.byte_cpu_s
        worst = max(worst, work / each.pace + own, crossing / each.link.up_bytes_per_s)
    return worst


@settings(max_examples=100, deadline=None)
@given(model=models(), there=rings(), microbatches=st.integers(1, 4))
def test_the_bottleneck_of_a_given_order_is_that_of_brute_force(
    model: list[LayerCost], there: list[Device], microbatches: int
) -> None:
    table, options = CostTable(model, 1), RingOptions(microbatches)
    best = min((slowest(table, there, cuts, options) for cuts in every_cut(len(model), len(there))), default=math.inf)
    found = given_order(Segments(table, options, 0.0), there)
    if math.isinf(best):
        assert found is None
        return
    assert found is not None
    assert found.bottleneck == pytest.approx(best)
    assert slowest(table, there, list(found.bounds), options) == pytest.approx(best)


@settings(max_examples=40, deadline=None)
@given(model=models(5, 7), there=rings(3, 4))
def test_order_and_choice_of_devices_are_those_of_brute_force(model: list[LayerCost], there: list[Device]) -> None:
    table, options = CostTable(model, 1), RingOptions(3)
    best = math.inf
    for count in range(1, len(there)):
        for workers in permutations(there[1:], count):
            ring = [there[0], *workers]
            best = min(best, *(slowest(table, ring, cuts, options) for cuts in every_cut(len(model), count + 1)))
    found = every_multiset(Segments(table, options, 0.0), there)
    assert (found[0].bottleneck if found else math.inf) == pytest.approx(best)
    for each in found:
        assert slowest(table, [there[i] for i in each.order], list(each.bounds), options) <= each.bottleneck + 1e-9


@settings(max_examples=25, deadline=None)
@given(model=models(4, 7), there=rings(2, 3), microbatches=st.integers(1, 4))
def test_few_cuts_are_all_simulated_and_the_best_is_taken(
    model: list[LayerCost], there: list[Device], microbatches: int
) -> None:
    there = [replace(each, memory_bytes=math.inf) for each in there]
    table, options = CostTable(model, 1), RingOptions(microbatches)
    segments = Segments(table, options, 0.0)
    start = given_order(segments, there)
    assert start is not None
    _, step_s = refine(segments, there, start, None, REFINE_ACTIONS)
    route = [plain_ring(len(there), cuts) for cuts in every_cut(len(model), len(there))]
    assert step_s == pytest.approx(min(simulate_ring(table, each, there, options).step_s for each in route))


def test_moving_cuts_never_makes_a_step_longer() -> None:
    model = [layer(f"l{i}", 1 + i % 3, 2 + i % 5, output=1.0 + i % 2) for i in range(30)]
    there = [device(f"d{i}", speed, 2.0) for i, speed in enumerate([1.0, 0.5, 2.0, 1.0, 0.7, 1.5])]
    table, options = CostTable(model, 1), RingOptions(8)
    segments = Segments(table, options, 0.0)
    start = given_order(segments, there)
    assert start is not None
    first_s = simulate_ring(table, plain_ring(6, list(start.bounds)), there, options).step_s
    _, step_s = refine(segments, there, start, None, REFINE_ACTIONS)
    assert step_s < first_s


def test_few_microbatches_let_fast_devices_hold_more_than_the_bottleneck_would() -> None:
    table = CostTable(layers(12), 1)
    there = [device("master"), device("fast", 8.0), device("slow", 0.5)]
    segments = Segments(table, RingOptions(1), 0.0)
    tight, loose = shortest_way(segments, there, 5.0), shortest_way(segments, there, 100.0)
    assert tight is not None
    assert loose is not None
    assert loose.bounds == ((0, 1), (1, 10), (10, 11), (11, 12)), "nobody else holds more than one layer"


def test_two_hundred_layers_on_thirty_two_devices_are_cut() -> None:
    model = [layer(f"l{i}", 1 + i % 3, 2 + i % 5, output=1.0 + i % 2) for i in range(200)]
    there = [device(f"d{i}", 0.5 + i % 7, 10.0) for i in range(32)]
    segments = Segments(CostTable(model, 1), RingOptions(8), 0.0)
    start = given_order(segments, there)
    assert start is not None
    found, step_s = refine(segments, there, start, None, REFINE_ACTIONS)
    assert [edge for bound in found.bounds for edge in range(*bound)] == list(range(200))
    assert step_s >= 8 * found.bottleneck * 0.99


# -- memory -------------------------------------------------------------------------------------------------------------------


def test_a_forecast_is_the_sum_of_its_parts() -> None:
    table = CostTable(layers(4, stored=100.0, output=10.0, weights=7), 1)
    there = devices(2)
    counts = [held(visit, 3, RingOptions(4)) for visit in range(3)]
    assert counts == [4, 3, 1], "there and back to the tail: a visit and a transfer each; no more than there are"
    first, second = forecast(table, plain_ring(2, [(0, 1), (1, 3), (3, 4)]), there, counts, 1000.0)
    # The master: a front that holds all four microbatches and a tail that holds one, of one layer each.
    assert first.weight_bytes == first.gradient_bytes == 14
    assert first.stored_bytes == 4 * 100 + 1 * 100
    assert first.boundary_bytes == 5 * 10 + 2 * 10
    kept = (14 + 500 + 70 + 100) / 2  # of what comes and goes, where there is plenty
    assert first.working_bytes == 100 + kept
    assert first.total_bytes == 1000 + 14 + 14 + 500 + 70 + 100 + kept
    small = [replace(each, memory_bytes=2000.0) for each in there]
    assert forecast(table, plain_ring(2, [(0, 1), (1, 3), (3, 4)]), small, counts, 1000.0)[0].working_bytes == 100
    assert second.stored_bytes == 3 * 200
    assert second.missing_bytes == 0


def snapshots(protect: str, memory_bytes: float = math.inf) -> list[float]:
    """Three nodes with 2 + 1, 3 and 1 layers of 12 bytes that a snapshot holds."""
    each = replace(layer(weights=4), optimizer_bytes=8)
    there = [replace(one, memory_bytes=memory_bytes) for one in devices(3)]
    route = plain_ring(3, [(0, 2), (2, 5), (5, 6), (6, 7)])
    found = forecast(CostTable([each] * 7, 1), route, there, [1] * 4, 0.0, protect)
    without = forecast(CostTable([each] * 7, 1), route, there, [1] * 4, 0.0)
    for with_them, one in zip(found, without, strict=True):
        assert with_them.total_bytes == one.total_bytes + with_them.snapshot_bytes
    return [one.snapshot_bytes for one in found]


def test_snapshots_count_twice_for_a_node_and_for_the_neighbour_it_holds_them_of() -> None:
    assert snapshots("memory") == [2 * 12 * (3 + 1), 2 * 12 * 3, 2 * 12 * (1 + 3)]
    assert snapshots("disk") == [24, 12, 24], "a layer of each while it is written or sent"
    assert snapshots("off") == snapshots("checkpoint") == [0, 0, 0]


def test_what_is_kept_automatically_is_what_there_is_room_for() -> None:
    assert snapshots("auto") == snapshots("memory")
    need = 3 * 16.0  # of node 1, without snapshots
    assert snapshots("auto", need + 2 * 12 * 3)[1] == 2 * 12 * 3
    assert snapshots("auto", need + 2 * 12 * 3 - 1)[1] == 12
    assert snapshots("auto", need + 11)[1] == 0


def test_a_plan_leaves_room_for_the_snapshots_it_is_told_of() -> None:
    model = [replace(layer(f"l{i}", weights=100), optimizer_bytes=200) for i in range(6)]
    there = [replace(each, memory_bytes=2000.0) for each in devices(3)]
    assert plan(model, there, PlanOptions(1, 1, process_bytes=0.0)).memory[0].snapshot_bytes == 0
    assert plan(model, there, PlanOptions(1, 1, process_bytes=0.0, protect="disk")).memory[1].snapshot_bytes > 0
    with pytest.raises(DoesNotFit, match="--protect checkpoint"):
        plan(model, there, PlanOptions(1, 1, process_bytes=0.0, protect="memory"))


def test_snapshots_on_disk_cost_at_most_a_twentieth_of_the_largest_model() -> None:
    parameters = 2**21  # a layer of 32 MiB with its gradients and Adam's state
    each = replace(layer(weights=4 * parameters), optimizer_bytes=8 * parameters)
    there = [replace(one, memory_bytes=1000.0 * 2**20) for one in devices(4)]

    def fits(count: int, protect: str) -> bool:
        try:
            return bool(plan([each] * count, there, PlanOptions(4, 4, protect=protect)).bounds)
        except DoesNotFit:
            return False

    most = 4 * ((1000 - 230) // 32)
    assert fits(most, "off")
    assert not fits(most + 1, "off")
    assert fits(math.ceil(0.95 * most), "disk")
    assert not fits(most // 2, "memory")


def _held(simulated: Simulated, route: Route, more: int) -> list[int]:
    """By visit, and some more."""
    found = {visit.index: 0 for visit in route.visits}
    for node, each in enumerate(simulated.nodes):
        for visit, most in zip(route.on(node), each.held, strict=True):
            found[visit.index] = most + more
    return list(found.values())


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("window", [None, 2, 16])
def test_a_full_window_is_the_most_any_visit_holds(schedule: str, window: int | None) -> None:
    options = RingOptions(8, None if schedule == "gpipe" else window, schedule)  # type: ignore[arg-type]
    table = CostTable(layers(5, output=3.0), 1)
    route = plain_ring(4, [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)])
    for rate in (0.1, 1.0, 5.0, math.inf):
        result = simulate_ring(table, route, devices(4, rate=rate), options)
        most = [held(visit, 5, options, safe=True) for visit in range(5)]
        counts = held_in(result, route, options, devices(4))
        assert all(count <= limit for count, limit in zip(counts, most, strict=True))
        assert counts[-1] == (8 if schedule == "gpipe" else 1)
        crowded = [replace(each, takes_turns=True) for each in devices(4)]
        more = held_in(result, route, options, crowded)
        assert list(more) == [min(count, limit) for count, limit in zip(_held(result, route, 2), most, strict=True)]
        assert list(counts) == [min(count, limit) for count, limit in zip(_held(result, route, 1), most, strict=True)]


def test_a_smaller_window_is_chosen_where_the_usual_one_does_not_fit() -> None:
    model = layers(8, stored=100.0)
    roomy = [replace(each, memory_bytes=1e9) for each in devices(3)]
    tight = [replace(each, memory_bytes=700.0) for each in devices(3)]
    assert plan(model, roomy, PlanOptions(8, 8, process_bytes=0.0)).window == 7
    made = plan(model, tight, PlanOptions(8, 8, process_bytes=0.0))
    assert made.window < 7
    assert all(each.total_bytes <= 700 for each in made.memory)
    assert made.simulated.nodes[0].held[0] <= made.window
    with pytest.raises(DoesNotFit, match="too few.*a smaller --window"):
        plan(model, tight, PlanOptions(8, 8, window=7, process_bytes=0.0))


def test_what_does_not_fit_is_refused_with_the_missing_bytes_by_device() -> None:
    model = layers(6, weights=1000)
    there = [replace(each, memory_bytes=3000.0) for each in devices(3)]
    with pytest.raises(DoesNotFit) as refusal:
        plan(model, there, PlanOptions(4, 4, process_bytes=500.0))
    # Two of them hold two layers of 2000 bytes each, with their gradients, beside the process.
    assert "device0 needs 4.4 KiB and has 2.9 KiB free, 1500 bytes (1.5 KiB) too few" in str(refusal.value)
    assert refusal.value.exit_code == 3
    fits = [replace(each, memory_bytes=4500.0) for each in there]
    assert len(plan(model, fits, PlanOptions(4, 4, process_bytes=500.0)).devices) == 3


def test_a_layer_too_large_for_everyone_is_named_with_its_bytes() -> None:
    model = [*layers(3, weights=10), layer("giant", weights=5000), *layers(3, weights=10)]
    there = [replace(each, memory_bytes=3000.0) for each in devices(3)]
    with pytest.raises(
        DoesNotFit, match=r"layer 3 \(giant\) alone needs 9.8 KiB \(10000 bytes\).*device0, has 2.9 KiB"
    ):
        plan(model, there, PlanOptions(4, 4, process_bytes=0.0))


def test_memory_decides_where_speed_would_not() -> None:
    model = layers(8, weights=1000)
    there = [replace(device("master"), memory_bytes=1e6), replace(device("small", 10.0), memory_bytes=4000.0)]
    made = plan(model, there, PlanOptions(4, 4, process_bytes=0.0, keep_all=True))
    assert made.bounds[1][1] - made.bounds[1][0] == 2, "a fast device with room for two layers holds two"
    require_fit(made.memory, 4)


# -- the whole plan -----------------------------------------------------------------------------------------------------------


def test_a_device_that_would_slow_the_ring_is_left_out_and_named() -> None:
    there = [device("a"), device("b"), device("c"), device("snail", 0.02)]
    made = plan(layers(9), there, PlanOptions(8, 8))
    assert [each.name for each in made.devices] == ["a", "b", "c"]
    assert [each.device for each in made.left_out] == ["snail"]
    assert "with all 4 a step would take" in made.left_out[0].reason
    assert made.summary()[3] == (
        f"your ring of 4 trains on 3 devices; left out: snail: {made.left_out[0].reason}. Use --all-devices to keep them all"
    )
    kept = plan(layers(9), there, PlanOptions(8, 8, keep_all=True))
    assert len(kept.devices) == 4
    assert kept.step_s > 2 * made.step_s


def test_a_weak_device_must_be_worth_more_than_a_forecast_may_err() -> None:
    made = plan(layers(18), [device("a"), device("weak", 0.08)], PlanOptions(8, 8))
    assert [each.device for each in made.left_out] == ["weak"]
    assert "far slower than the others, and with all 2 a step would be less than 10% shorter" in made.left_out[0].reason
    assert plan(layers(18), [device("a"), device("weak", 0.08)], PlanOptions(8, 8, keep_all=True)).step_s < made.step_s
    together = plan(layers(18), [device("a"), *(device(f"weak{i}", 0.2) for i in range(4))], PlanOptions(32, 32))
    assert len(together.devices) > 1, "several bring enough"


def test_a_plan_is_never_slower_than_the_master_alone() -> None:
    there = [device("a"), *(device(f"far{i}", 1.0, 0.01) for i in range(3))]
    made = plan(layers(8, output=100.0), there, PlanOptions(4, 4))
    assert [each.name for each in made.devices] == ["a"]
    assert made.step_s == 8 * 2 * 4
    assert made.route.last == 0


def test_unequal_devices_get_unequal_shares() -> None:
    """10:10:10:1 and 10:1:1:1 with blocks of equal cost: the planned ring against the equal split."""
    model = layers(18)
    for speeds, least in (([10.0, 10.0, 10.0, 1.0], 4.0), ([10.0, 1.0, 1.0, 1.0], 2.2)):
        there = [device(f"d{i}", speed) for i, speed in enumerate(speeds)]
        equal = plan(model, there, PlanOptions(8, 8, cuts=((0, 2), (2, 6), (6, 11), (11, 16), (16, 18))))
        assert equal.step_s / plan(model, there, PlanOptions(8, 8)).step_s > least


def test_more_devices_than_layers_leaves_some_out_and_says_why() -> None:
    made = plan(layers(4), devices(6), PlanOptions(8, 8))
    assert len(made.devices) <= 3
    assert len(made.left_out) >= 3
    with pytest.raises(UsageError, match="6 nodes need at least 7 layers.*the model has 4: use 3 or fewer"):
        plan(layers(4), devices(6), PlanOptions(8, 8, keep_all=True))


def test_cuts_by_hand_are_taken_as_they_are_or_refused() -> None:
    cuts = ((0, 3), (3, 4), (4, 6))
    made = plan(layers(6), devices(2), PlanOptions(4, 4, cuts=cuts))
    assert made.bounds == cuts
    assert made.layers_text(0) == "0-2, 4-5"
    assert plan(layers(6), devices(2), PlanOptions(4, 4, cuts=((0, 3), (3, 6), (6, 6)))).layers_text(0) == "0-2, loss"
    for wrong in (((0, 3), (4, 5), (5, 6)), ((0, 3), (3, 6)), ((0, 3), (3, 4), (4, 5)), ((0, 3), (3, 3), (3, 6))):
        with pytest.raises(UsageError, match="cuts"):
            plan(layers(6), devices(2), PlanOptions(4, 4, cuts=wrong))


def test_one_of_many_that_can_hold_nothing_does_not_keep_the_others_from_training() -> None:
    """Free memory differs from device to device, so real ones are all of their own kind."""
    options = PlanOptions(4, 4, process_bytes=10.0)
    there = [Device(f"d{i}", 1 + i / 100, memory_bytes=1000.0 + i) for i in range(12)]
    there[5] = replace(there[5], memory_bytes=50.0)
    made = plan(layers(24, weights=40), there, options)
    assert len(made.devices) > 1
    assert "d5" in [each.device for each in made.left_out]
    small = [replace(each, memory_bytes=50.0) for each in there[1:]]
    only = plan(layers(24, weights=40), [replace(there[0], memory_bytes=1e9), *small], options)
    assert [each.name for each in only.devices] == ["d0"]


def test_too_little_memory_is_said_of_more_devices_than_layers_too() -> None:
    small = [Device(f"d{i}", memory_bytes=1000.0) for i in range(9)]
    with pytest.raises(DoesNotFit, match="too few"):
        plan(layers(4, weights=450), small, PlanOptions(4, 4, process_bytes=10.0))


def test_a_route_of_several_laps_is_moved_until_it_fits() -> None:
    """Work in proportion to paces puts too much on the fast one, whose memory is small."""
    there = [
        Device("m", 1.0, memory_bytes=1e6),
        Device("fast", 4.0, memory_bytes=600.0),
        Device("slow", memory_bytes=1e6),
    ]
    made = plan(layers(24, weights=40), there, PlanOptions(4, 4, process_bytes=10.0, laps=2))
    assert all(each.missing_bytes <= 0 for each in made.memory)
    assert sum(len(visit.layers) for visit in made.route.on(1)) < 8


@pytest.mark.long
def test_many_different_devices_are_searched_and_the_gap_is_told() -> None:
    there = [device(f"d{i}", 1.0 + 0.1 * i) for i in range(10)]
    made = plan(layers(24), there, PlanOptions(16, 16))
    assert 0 <= made.gap < 1
    assert plan(layers(24), there[:6], PlanOptions(16, 16)).gap == 0
    even = plan(layers(24), devices(10), PlanOptions(16, 16))
    assert even.gap == 0, "equal devices are few choices, however many there are"


def test_raw_inputs_and_labels_stay_with_the_master() -> None:
    model = [layer("flatten", 0.1, parameters=False), *layers(6), layer("softmax", 0.1, parameters=False)]
    made = plan(model, devices(3), PlanOptions(4, 4, keep_all=True))
    assert made.bounds[0][1] >= 2
    assert made.bounds[-1][0] <= 6


def test_a_plan_tells_itself_in_three_lines() -> None:
    there = [replace(each, memory_bytes=2.0**30, quota=Quota(0.005, 0.01)) for each in devices(3)]
    lines = plan(layers(8, forward_s=0.01, backward_s=0.02), there, PlanOptions(32, 8)).summary()
    assert len(lines) == 3
    assert lines[0].startswith("plan: 3 devices, 8 microbatches, 1f1b, about ")
    assert lines[1].startswith("layers by number: device0 0")
    assert "is tightest" in lines[2]
    quick = plan(layers(8, forward_s=1e-6, backward_s=1e-6), devices(3), PlanOptions(64, 8)).summary()[0]
    assert re.search(r"\((\d+\.\d\d[kM]|\d+) samples/s\)", quick), "numbers for humans: 2.04k, not 2.04e+03"


def test_what_a_device_needs_besides_a_node_counts() -> None:
    model = layers(6, weights=1000)
    there = [replace(each, memory_bytes=4500.0) for each in devices(3)]
    burdened = [replace(there[0], extra_bytes=600.0), *there[1:]]
    assert plan(model, there, PlanOptions(4, 4, process_bytes=500.0)).memory[0].total_bytes == 4500
    with pytest.raises(DoesNotFit, match="100 bytes"):
        plan(model, [replace(each, extra_bytes=100.0) for each in there], PlanOptions(4, 4, process_bytes=500.0))
    with pytest.raises(DoesNotFit, match="device0 needs .* 600 bytes"):
        plan(model, burdened, PlanOptions(4, 4, process_bytes=500.0))


def test_slow_lines_get_a_wider_window_and_a_small_device_does_not() -> None:
    """Nine are enough for five visits, unless a message is longer on its way than a microbatch is computed."""
    model = layers(8, forward_s=0.01, backward_s=0.02, output=1e6, stored=1e6)
    options = PlanOptions(32, 32, keep_all=True, process_bytes=0.0)
    slow = plan(model, devices(4, rate=30e6, latency_s=0.1), options)
    usual = plan(model, devices(4, rate=30e6, latency_s=0.1), replace(options, window=9))
    assert slow.window > 9
    assert slow.step_s < 0.95 * usual.step_s
    held = max(each.total_bytes for each in usual.memory)
    small = [replace(each, memory_bytes=held) for each in devices(4, rate=30e6, latency_s=0.1)]
    assert plan(model, small, options).window <= 9
