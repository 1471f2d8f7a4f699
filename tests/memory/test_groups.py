"""Groups of nodes that hold the same layers and share a step's microbatches: the bits of one process with the same tree."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from harness import Built, recipe, ring_in_memory
from ringtmp.plan.node_groups import members_of
from ringtmp.transport.faults import Faults, Shaped
from test_rings_sum_tree import plain
from test_same_bits_as_one_process import MICROBATCHES
from test_schedules import CLIP, SEED, SETTINGS, Case


@pytest.fixture(scope="module")
def built_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Built]:
    return cache(lambda model: Case(model).build(tmp_path_factory.mktemp(model)))


@pytest.mark.parametrize(
    ("model", "groups", "schedule", "recompute"),
    [
        ("gpt", (2, 2), "zero-bubble", "none"),
        ("gpt", (4,), "1f1b", "all"),
        ("mlp", (3, 1, 2), "gpipe", "none"),
        pytest.param("gpt", (1, 3), "zero-bubble", "all", marks=pytest.mark.long),
    ],
)
def test_groups_end_in_the_bits_of_one_process(
    model: str, groups: tuple[int, ...], schedule: str, recompute: str, built_of: Callable[[str], Built]
) -> None:
    """With dropout, clipping, packets lost and out of order, and a last batch in which a member has nothing to do."""
    case, built, nodes = Case(model), built_of(model), 1 + sum(groups)
    how = recipe("sgd", SETTINGS, seed=SEED, clip_norm=CLIP, sum_tree=4)
    window = MICROBATCHES if schedule == "gpipe" else 5
    rough = Faults(drop=0.02, duplicate=0.02, reorder=0.05)
    got = ring_in_memory(
        built, how, case.batches, MICROBATCHES, case.loss, nodes, schedule, window=window, recompute=recompute,
        members=members_of(groups, range(nodes)), wrap=lambda t: Shaped(t, rough, 7 + t.node),
    )  # fmt: skip
    assert got == plain(model, 4)
