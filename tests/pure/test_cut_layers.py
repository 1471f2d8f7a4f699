"""Layers cut inside, on paper: how a cut passes through operators, what parts come to, what is sent."""

from __future__ import annotations

import pytest
import torch

from costs import devices, layers
from ringtmp.bench.analysis.traffic_formulas import dense
from ringtmp.plan.planner import PlanOptions
from ringtmp.strategies import registry
from ringtmp.strategies.base import Sizes, Task
from ringtmp.strategies.compare import compare
from ringtmp.strategies.tensor.cut_operators import permuted, reshaped, transposed, without
from ringtmp.strategies.tensor.cut_tensors import Cut, joined, part, part_shape


@pytest.mark.parametrize("cut", [Cut(0), Cut(1), Cut(1, 3), Cut(2, 2)])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_parts_put_together_are_the_whole(cut: Cut, workers: int) -> None:
    whole = torch.arange(8 * 12 * 8).reshape(8, 12, 8)
    parts = [part(whole, cut, rank, workers) for rank in range(workers)]
    assert all(tuple(each.shape) == part_shape(whole.shape, cut, workers) for each in parts)
    assert torch.equal(joined(parts, cut), whole)


def test_a_worker_has_its_heads_of_queries_keys_and_values() -> None:
    assert part(torch.arange(12), Cut(0, 3), 0, 2).tolist() == [0, 1, 4, 5, 8, 9]
    assert part(torch.arange(12), Cut(0, 3), 1, 2).tolist() == [2, 3, 6, 7, 10, 11]


@pytest.mark.parametrize(
    ("cut", "before", "after", "found"),
    [
        (Cut(2), (5, 7, 12), (5, 7, 4, 3), Cut(2)),  # heads of one tensor
        (Cut(2, 3), (5, 7, 12), (5, 7, 3, 2, 2), Cut(3)),  # queries, keys and values, each with heads
        (Cut(2, 3), (5, 7, 18), (5, 7, 3, 3, 2), None),  # three heads for two workers
        (Cut(2), (5, 7, 4, 3), (5, 7, 12), Cut(2)),  # heads side by side again
        (Cut(1), (5, 8, 2, 2), (5, 32), Cut(1)),  # channels of a picture
        (Cut(2), (5, 7, 12), (35, 12), Cut(1)),
        (Cut(3), (5, 7, 4, 4), (5, 7, 16), None),  # the inner of two: parts would be interleaved
        (Cut(2), (5, 7, 6), (5, 7, 3, 2), None),
    ],
)
def test_a_cut_passes_through_a_new_shape_where_parts_stay_parts(
    cut: Cut, before: tuple[int, ...], after: tuple[int, ...], found: Cut | None
) -> None:
    assert reshaped(cut, before, after, 2) == found
    if found is not None:  # what a worker has of one shape is what it has of the other
        whole = torch.arange(torch.Size(before).numel()).reshape(before)
        mine = part(whole, cut, 1, 2).flatten()
        assert torch.equal(mine, part(whole.reshape(after), found, 1, 2).flatten())


def test_a_cut_moves_with_its_dimension() -> None:
    assert permuted(Cut(3), (2, 0, 3, 1, 4)) == Cut(2)
    assert transposed(Cut(1, 2), 1, -1, 3) == Cut(2, 2)
    assert without(Cut(3), [0, 2], 5) == Cut(1)
    assert without(Cut(1), [2, 3], 4, keep=True) == Cut(1)
    assert without(Cut(1), [-3], 4) is None


def test_a_value_that_is_added_up_is_sent_as_all_reduce_sends_it() -> None:
    found = registry.get("tensor").traffic(registry.get("tensor").read({}), Sizes(1.0, (), 64, 10.0), 5)
    assert (found.total, found.busiest) == (2 * 4 * 10 * 64, 2 * 4 * 10 * 64 / 5)
    # 784-a-b-c-10: b and 10 are sums forward; the third layer, columns again, has the sum of b backward.
    assert dense("", "", (784, 50, 40, 30, 10)).inside == 40 + 10 + 40


def test_on_paper_more_workers_hold_less_and_compute_less() -> None:
    def on(nodes: int, rate: float) -> tuple[float, float]:
        task = Task(layers(6, output=1.0, weights=1000), devices(nodes, rate=rate), PlanOptions(16, 8))
        way = compare(registry.parse("tensor"), task)
        assert way.simulated is not None
        return way.simulated.step_s, way.memory[0].weight_bytes

    assert on(4, 1e12)[1] == on(2, 1e12)[1] / 2
    assert on(4, 1e12)[0] < on(2, 1e12)[0]
    assert on(4, 1.0)[0] > on(4, 1e12)[0], "links count"
