"""Graphs, trees and mixing weights: what is made of them, and what is refused of them before a start."""

from __future__ import annotations

import pytest

from ringtmp.errors import UsageError
from ringtmp.strategies import registry
from ringtmp.strategies.base import Sizes
from ringtmp.strategies.data_parallel import worker_topologies


@pytest.mark.parametrize("nodes", [2, 3, 5, 8])
@pytest.mark.parametrize("kind", [worker_topologies.ring, worker_topologies.complete])
def test_metropolis_weights_are_symmetric_and_doubly_stochastic(kind: object, nodes: int) -> None:
    graph = kind(nodes)  # type: ignore[operator]
    matrix = worker_topologies.metropolis(graph)
    worker_topologies.refuse_unfair(matrix)
    assert worker_topologies.graph_of(matrix) == graph
    assert worker_topologies.connected(graph)


def test_a_ring_gives_thirds_and_a_complete_graph_the_mean() -> None:
    third = pytest.approx(1 / 3)
    assert worker_topologies.metropolis(worker_topologies.ring(5))[0] == (third, third, 0.0, 0.0, third)
    assert worker_topologies.metropolis(worker_topologies.complete(4))[2] == pytest.approx((0.25,) * 4)


def test_a_graph_of_ones_own_has_metropolis_weights() -> None:
    """0-1, 1-2, 1-3: node 1 has three neighbours, the others one."""
    matrix = worker_topologies.metropolis(worker_topologies.of_edges("graph", "0-1+1-2+1-3", 4))
    assert matrix[0] == pytest.approx((0.75, 0.25, 0, 0))
    assert matrix[1] == pytest.approx((0.25, 0.25, 0.25, 0.25))
    worker_topologies.refuse_unfair(matrix)


def test_a_ring_bears_the_loss_of_one_and_of_its_neighbour_but_not_of_two_apart() -> None:
    ring = worker_topologies.ring(5)
    assert worker_topologies.connected(ring, [2])
    assert worker_topologies.connected(ring, [2, 3])
    assert not worker_topologies.connected(ring, [1, 3])


def test_orphans_turn_to_the_nearest_one_above_that_is_there() -> None:
    parents = worker_topologies.parents_in_tree("tree", "0-1+1-2+2-3+1-4", 5)
    assert parents == {1: 0, 2: 1, 3: 2, 4: 1}
    assert [worker_topologies.living_parent(parents, node, {1, 2}) for node in (0, 3, 4)] == [None, 0, 0]
    assert worker_topologies.binary_tree(6) == {1: 0, 2: 0, 3: 1, 4: 1, 5: 2}


def checked(name: str, nodes: int) -> None:
    choice = registry.parse(name)
    registry.get(choice.name).read(choice.settings).check(nodes, "float32")


@pytest.mark.parametrize(
    ("name", "nodes", "said"),
    [
        ("easgd:0", 5, "tau=0 must be a whole number of at least 1"),
        ("easgd:alpha=0.6", 5, "alpha=0.6 must be from 0 to 0.5"),
        ("easgd:alpha=-0.1", 5, "from 0 to 0.5"),
        ("tree-easgd:4:0", 5, "tau_down=0 must be a whole number of at least 1"),
        ("tree-easgd:alpha=1", 5, "from 0 to 0.5"),
        ("tree-easgd:tree=0-1+1-2+2-0", 3, "not a tree: 3 nodes need 2 edges without a circle, not 3"),
        ("tree-easgd:tree=0-1+2-3", 4, "no way leads from node 0 to node 2"),
        ("tree-easgd:tree=0-1+0-7", 3, "nodes from 0 to 2"),
        ("gosgd:1.5", 5, "p=1.5 must be from 0 to 1"),
        ("gosgd:p=-0.2", 5, "from 0 to 1"),
        ("gosgd:often", 5, "write gosgd:0.25"),
        ("gossip-learning:0", 5, "every=0 must be a whole number of at least 1"),
        ("gossip-learning:often", 5, "write gossip-learning:2 for models"),
        ("gossip-learning:cache=0", 5, "cache=0 must be from 1 to 100"),
        ("gossip-learning:cache=101", 5, "cache=101 must be from 1 to 100"),
        ("gossip-learning:create=um", 5, "create of strategy gossip-learning"),
        ("gossip-learning:create=rw:cache=2", 5, "cache=2 needs create=mu"),
        ("dpsgd:graph=0-1+2-3", 4, "no way leads from node 0 to node 2"),
        ("dpsgd:graph=0-0", 4, "two different nodes from 0 to 3"),
        (
            "dpsgd:graph=star",
            4,
            "graph=star: choose ring or complete, or write edges as 0-1.1-2, with nodes from 0 to 3",
        ),
        ("dpsgd:graph=0-1+1-0+1-2", 3, "there twice"),
        ("dpsgd:matrix=0.5_0.5/0.4_0.6", 2, "symmetric: node 0 gives node 1 0.5 and gets 0.4"),
        ("dpsgd:matrix=0.5_0.4/0.4_0.5", 2, "not doubly stochastic: row 0 adds up to 0.9"),
        ("dpsgd:matrix=1.5_-0.5/-0.5_1.5", 2, "weight 1.5 of row 0 must be from 0 to 1"),
        ("dpsgd:matrix=0.5_0.5/0.5_0.5", 3, "3 nodes need 3 rows of 3"),
        ("dpsgd:matrix=1_0/0_1", 2, "no way leads from node 0 to node 1"),
        ("dpsgd:matrix=a_b", 2, "write numbers with _"),
        ("dpsgd:complete:matrix=0.5_0.5/0.5_0.5", 2, "contradict"),
    ],
)
def test_bad_settings_are_refused_with_the_valid_range(name: str, nodes: int, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        checked(name, nodes)


@pytest.mark.parametrize("name", ["easgd", "tree-easgd", "dpsgd", "gosgd", "gossip-learning"])
def test_a_wire_that_rounds_parameters_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="use --wire float32"):
        registry.get(name).read({}).check(4, "bfloat16")


@pytest.mark.parametrize(
    ("name", "total", "busiest"),
    [
        ("dpsgd", 10, 2), ("dpsgd:complete", 20, 4), ("gosgd:0.5", 2.5, 0.5), ("easgd:4", 2, 1),
        ("gossip-learning:2", 2.5, 0.5), ("tree-easgd:4:2", 4 / 4 + 4 / 2, 0.25 + 1), ("averaging:4", 2, 0.4),
        ("block-momentum:2", 4, 0.8), ("gadmm", 8, 2), ("scheduled:1", 8 * 3, 8 * 3 / 5),
    ],
)  # fmt: skip
def test_models_sent_per_step_by_five_nodes(name: str, total: float, busiest: float) -> None:
    choice = registry.parse(name)
    strategy = registry.get(choice.name)
    found = strategy.traffic(strategy.read(choice.settings), Sizes(1.0, (), 64), 5)
    assert (found.total, found.busiest) == (pytest.approx(total), pytest.approx(busiest))
