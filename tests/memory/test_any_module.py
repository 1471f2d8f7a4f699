"""Any module is cut, and trains with the bits of a plain eager loop, wherever the cuts lie."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import Built, recipe, ring_in_memory
from oracle import plain_loop, state_sha256
from ordinary_models import ORDINARY, class_loss, targets_for
from ringtmp.plan.route import holders_of

BATCH, STEPS, PARTS = 6, 2, 3
SETTINGS: dict[str, Any] = {"lr": 0.01}
QUICK = {("unet", 3), ("tied", 3), ("shared block", 4), ("recommender", 2), ("lstm", 2), ("resnet", 2), ("aliased", 3)}


@cache
def _ready(name: str, folder: Path) -> tuple[Built, list[tuple[Any, torch.Tensor]], str]:
    """The model as cells, its batches, and what a plain loop makes of it."""
    make, sample = ORDINARY[name]
    torch.manual_seed(1)
    model = make()
    inputs = sample(BATCH * STEPS)
    targets = targets_for(copy.deepcopy(model), inputs)
    batches = [(_rows(inputs, step), _rows(targets, step)) for step in range(STEPS)]
    built = Built(folder, copy.deepcopy(model), sample, [BATCH // PARTS])
    plain_loop(
        model, batches, PARTS, class_loss, lambda parameters: torch.optim.Adam(parameters, **SETTINGS, fused=True),
        clip_norm=0.5,
    )  # fmt: skip
    return built, batches, state_sha256(model)


def _rows(value: Any, step: int) -> Any:
    if isinstance(value, tuple):
        return tuple(_rows(each, step) for each in value)
    return value[step * BATCH : (step + 1) * BATCH].clone()  # which begins on a boundary of 64 bytes, as a batch does


def _tier(name: str, nodes: int, schedule: str) -> list[pytest.MarkDecorator]:
    """Every model on one ring in `make long`; what is left at night."""
    if (name, nodes) in QUICK:
        return [] if schedule == "zero-bubble" or nodes != 3 else [pytest.mark.long]
    ring = ((2, "1f1b"), (4, "zero-bubble"))[list(ORDINARY).index(name) % 2]
    return [pytest.mark.long if (nodes, schedule) == ring else pytest.mark.nightly]


@pytest.mark.parametrize(
    ("name", "nodes", "schedule"),
    [
        pytest.param(name, nodes, schedule, marks=_tier(name, nodes, schedule))
        for schedule in ("1f1b", "zero-bubble")
        for name in ORDINARY
        for nodes in (1, 2, 3, 4)
    ],
)
def test_an_ordinary_module_trains_with_the_bits_of_eager(
    name: str, nodes: int, schedule: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    built, batches, expected = _ready(name, tmp_path_factory.getbasetemp() / f"any-{name}")
    found, _ = ring_in_memory(
        built, recipe("adam", SETTINGS, clip_norm=0.5), batches, PARTS, class_loss, nodes, schedule
    )  # fmt: skip
    assert len(built.layers) >= len(holders_of(nodes)), "there are fewer cells than visits"
    assert found == expected
