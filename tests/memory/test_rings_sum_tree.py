"""`sum_tree`: gradients added up as a tree, with the bits of a plain loop that does the same, for every ring and schedule."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from harness import Built, recipe, ring_in_memory
from oracle import plain_loop, state_sha256
from ringtmp.plan.route import holders_of
from test_same_bits_as_one_process import MICROBATCHES
from test_schedules import CLIP, SEED, SETTINGS, Case, sgd


@pytest.fixture(scope="module")
def built_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Built]:
    return cache(lambda model: Case(model).build(tmp_path_factory.mktemp(model)))


@cache
def plain(model: str, parts: int, delayed: bool = False) -> tuple[str, list[float]]:
    case = Case(model)
    made = case.plain()
    losses = plain_loop(made, case.batches, MICROBATCHES, case.loss, sgd, SEED, CLIP, delayed=delayed, sum_tree=parts)
    return state_sha256(made), losses


@pytest.mark.long
@pytest.mark.parametrize("model", ["gpt", "mlp", pytest.param("convnet", marks=pytest.mark.long)])
def test_any_ring_adds_up_as_a_plain_loop_with_the_same_tree(model: str, built_of: Callable[[str], Built]) -> None:
    """With dropout, clipping, and a last batch of fewer microbatches than parts (7 samples, 8 parts)."""
    case, built = Case(model), built_of(model)
    cases = [
        (4, 1, "1f1b", "none"),
        (4, 3, "zero-bubble", "none"),
        (2, 2, "gpipe", "all"),
        (8, 4, "zero-bubble", "all"),
    ]
    for parts, nodes, schedule, recompute in cases:
        how = recipe("sgd", SETTINGS, seed=SEED, clip_norm=CLIP, sum_tree=parts)
        window = MICROBATCHES if schedule == "gpipe" else None
        got = ring_in_memory(
            built,
            how,
            case.batches,
            MICROBATCHES,
            case.loss,
            nodes,
            schedule,
            window=window,
            recompute=recompute,
            seed=parts,
        )
        assert got == plain(model, parts), (parts, nodes, schedule)
    assert plain(model, 4) != plain(model, 1)


def test_delayed_gradients_and_laps_keep_the_tree(built_of: Callable[[str], Built]) -> None:
    case, built = Case("mlp"), built_of("mlp")
    how = recipe("sgd", SETTINGS, seed=SEED, clip_norm=CLIP, sum_tree=4, staleness=1)
    got = ring_in_memory(built, how, case.batches, MICROBATCHES, case.loss, 2, "zero-bubble", holders=holders_of(2, 2))
    assert got == plain("mlp", 4, delayed=True)
