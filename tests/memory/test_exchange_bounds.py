"""No exchange of the model takes fewer bytes, or less time, than its lower bound; and the bounds are the paper's."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from costs import devices, layers
from ringtmp import api
from ringtmp.bench.training_runs.strategy_variants import parse
from ringtmp.config import RingPart, RunConfig, TrainingPart
from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.plan import exchange_bounds as bounds
from ringtmp.plan.exchange_bounds import Exchange, Speeds
from ringtmp.plan.planner import PlanOptions
from ringtmp.strategies import registry
from ringtmp.strategies.base import Sizes, Task
from ringtmp.strategies.compare import compare
from ringtmp.transport.slow_link import Slow

#: As they stand in the lecture: n workers; how often T, R and U.
PAPER = {
    bounds.synchronous: lambda n: (2 * n, n - 1, 1),
    bounds.below_a_tree: lambda n: (2 * math.ceil(math.log2(n + 1)), math.ceil(math.log2(n)), 1),
    bounds.scatter_reduce: lambda n: (2 + 2 * (n - 1) / n, (n - 1) / n, 1),
    bounds.asynchronous: lambda n: (n, 0, 1),
    bounds.whole_models: lambda n: (math.ceil(math.log2(n)), math.ceil(math.log2(n)), 1),
    bounds.around_a_ring: lambda n: (2 * (n - 1) / n, (n - 1) / n, 1),
}
#: Every pattern that a strategy makes, with a setting that makes it several times within a few steps; and how much more than
#: the bound may pass the fullest link: padding, what evaluations take, and what chance gives one node more than another.
WAYS = {
    "ps:bsp": 1.2,
    "ps:bsp:2": 1.2,
    "ps:bsp:workers": 1.2,
    "ps:async": 1.2,
    "ps:async:n_push=2:n_fetch=2": 1.6,
    "allreduce:ring": 1.1,
    "allreduce:tree": 1.1,
    "allreduce:halving": 1.4,  # every owner sends its totals to all others
    "averaging:2": 1.1,
    "block-momentum:2": 1.1,
    "mpca:2": 1.1,
    "dpsgd": 1.2,
    "gadmm:passes=2": 1.2,
    "easgd:2": 1.4,
    "tree-easgd:2:tau_down=2": 1.2,
    "gosgd:1": 2.0,
    "gossip-learning": 2.0,
}
#: One with a server, one without, one with neighbours alone; the others are long.
QUICK = ("ps:bsp", "allreduce:tree", "dpsgd")
NODES, STEPS, RATE = 4, 8, 2e6
#: The last exchanges are not counted to the steps, or still under way when these are done.
COUNTED = STEPS - 2


def exchange_of(text: str, nodes: int = NODES) -> Exchange:
    choice = registry.parse(text)
    strategy = registry.get(choice.name)
    found = strategy.traffic(strategy.read(choice.settings), Sizes(1.0, (), 1.0), nodes).exchange
    assert found is not None
    return found


def test_the_bounds_are_the_papers() -> None:
    speeds = Speeds(10.0, 1.0, 0.1)
    for pattern, times in PAPER.items():
        for n in (2, 3, 4, 7, 8, 64):
            made = pattern(n)
            assert (made.transmit, made.reduce, made.update) == pytest.approx(times(n))
            assert made.source == bounds.PAPER
            assert made.in_turn_s(speeds) == pytest.approx(
                sum(a * b for a, b in zip(times(n), (10, 1, 0.1), strict=True))
            )
            assert made.floor_s(speeds) <= made.in_turn_s(speeds)


def test_what_it_says_in_words_follows_from_them() -> None:
    eight = bounds.synchronous(8)
    assert bounds.synchronous(8, 4).transmit == eight.transmit / 4
    assert bounds.synchronous(4, 8).transmit == 2, "a worker's own link carries a model each way"
    assert bounds.on_all_workers(8).transmit == bounds.around_a_ring(8).transmit == 2 * 7 / 8
    assert bounds.around_a_ring(8).apart(10).transmit == pytest.approx(2 * 7 / 80)
    assert bounds.to_neighbours(2).busiest == 2
    assert bounds.between_pairs(8).busiest == bounds.around_a_ring(8).busiest


def test_every_strategy_says_what_it_exchanges_or_that_it_is_something_else() -> None:
    said = {name for name, way in ((name, parse(name)) for name in registry.OURS) if way.exchange(NODES) is not None}
    assert said == {text.partition(":")[0] for text in WAYS}
    # Nothing is known of how much travels where it depends on the data.
    for text in ("ps:asp:0.1", "ps:bsp:factors=true", "averaging:auto:budget=1MiB"):
        assert parse(text).exchange(NODES) is None


@pytest.mark.parametrize("text", WAYS)
def test_no_step_on_paper_undercuts_the_bound(text: str) -> None:
    for nodes in (2, 3, 4, 8):
        if nodes == 2 and text == "ps:bsp:2":
            continue  # nobody would work
        work = layers(6, output=1.0, weights=1000, forward_s=0.0, backward_s=0.0)
        task = Task(work, devices(nodes, rate=100.0), PlanOptions(16, 8))
        way = compare(registry.parse(text), task)
        assert way.simulated is not None, way.problem
        assert way.simulated.step_s >= exchange_of(text, nodes).floor_s(Speeds(6000 / 100.0)) * 0.999


@pytest.mark.parametrize(
    "text", [each if each in QUICK else pytest.param(each, marks=pytest.mark.long) for each in WAYS]
)
def test_nothing_measured_undercuts_the_bound_in_bytes_or_in_time(text: str, tmp_path: Path) -> None:
    """Nodes in one process behind slow links: work is next to nothing, and a machine that has no time makes it only longer."""
    strategy = registry.get(text.partition(":")[0])
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 10))
    part = {"batch_size": 1438 if strategy.full_batch else 12, "microbatches": 12, "steps": STEPS}
    config = RunConfig(training=TrainingPart(**part), ring=RingPart(strategy=text, nodes=NODES))
    pool = InMemoryPool(NODES, wrap=lambda transport: Slow(transport, 0.0, RATE))
    made = api.start(config, model, run_dir=tmp_path / "run", pool=pool).summary
    model_bytes = 4 * sum(each.numel() for each in model.parameters())
    exchange = exchange_of(text)
    busiest = max(max(node.bytes_sent, node.bytes_received) for node in made.per_node)
    assert model_bytes * COUNTED * exchange.busiest <= busiest
    assert busiest <= model_bytes * STEPS * exchange.busiest * WAYS[text]
    assert made.wall_s >= COUNTED * exchange.floor_s(Speeds(model_bytes / RATE))
