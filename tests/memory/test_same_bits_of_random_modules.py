"""Contract 1 on modules nobody thought of, cut at random places: the bits of a plain loop, and in evaluation of eager mode."""

from __future__ import annotations

import copy
import itertools
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from harness import Built, recipe, ring_in_memory
from oracle import plain_loop, state_sha256
from random_modules import RandomModule, random_inputs, random_module, square_loss
from ringtmp.data.batches import Batch, split_batch
from ringtmp.model import build
from ringtmp.model.build_cells import Cutting
from ringtmp.model.call_module import call_arguments
from ringtmp.model.cut_cells import Whole
from ringtmp.model.cut_places import legal
from ringtmp.model.export import AGAIN_BATCH, EXAMPLE_BATCH
from ringtmp.model.recompute import repeatable
from ringtmp.plan.route import holders_of
from ringtmp.strategies.ring.master import Master

BATCH, STEPS, PARTS = 7, 2, 3
SETTINGS: dict[str, Any] = {"lr": 0.01, "momentum": 0.9}
#: Modules by seed; ways to cut each of them; rings for each cut.
QUICK, LONG, NIGHTLY, CUTS, RINGS = range(1), [1, 100, 101], [2, *range(102, 118), *range(5000, 5100)], 3, 6
ROUTES = [holders_of(nodes, laps) for nodes in (2, 3, 4) for laps in (1, 2, 3)] + [holders_of(3, shape="v"), [0]]

Results = tuple[str, list[float], list[Any]]


@dataclass(frozen=True)
class Ring:
    """One way to lay out what a module was cut into."""

    holders: list[int]
    bounds: list[tuple[int, int]]
    schedule: str
    recompute: str
    delayed: bool
    clip: float | None


def random_ring(dice: random.Random, cells: int, may_repeat: bool) -> Ring:
    fitting = [each for each in ROUTES if len(each) <= cells]
    holders = max(dice.choice(fitting), dice.choice(fitting), key=len)  # rather long: cells are visits of their own
    edges = [0, *sorted(dice.sample(range(1, cells), len(holders) - 1)), cells]
    return Ring(
        holders,
        list(itertools.pairwise(edges)),
        dice.choice(["1f1b", "zero-bubble"]),
        dice.choice(["none", "all"]) if may_repeat else "none",
        dice.random() < 0.3,
        dice.choice([None, 0.1]),
    )


def random_places(dice: random.Random, module: RandomModule) -> tuple[int, ...]:
    """Of all the legal ones, not only of those worth planning for."""
    sizes = EXAMPLE_BATCH, AGAIN_BATCH
    example, again = (call_arguments(module, random_inputs(module.width, each)) for each in sizes)
    exporter = build.Exporter()
    layer, _ = exporter.export(type(module).__name__, module, example, again)
    places = legal(Whole(layer, *exporter.facts).anatomies[0])
    return tuple(sorted(dice.sample(places, min(len(places), dice.choice([2, 5, 9, 16])))))


class Comparison:
    """A module, its data, and what plain loops make of it."""

    def __init__(self, module: Any) -> None:
        self.module = module
        x, tokens = random_inputs(module.width, BATCH * STEPS)
        targets = torch.linspace(0.5, 1.5, BATCH * STEPS)
        rows = [slice(BATCH * step, BATCH * (step + 1)) for step in range(STEPS)]
        self.batches: list[Any] = [((x[each], tokens[each]), targets[each]) for each in rows]
        self._expected: dict[tuple[bool, float | None], Results] = {}

    def expected(self, delayed: bool, clip: float | None) -> Results:
        if (delayed, clip) not in self._expected:
            plain = copy.deepcopy(self.module)
            losses = plain_loop(
                plain, self.batches, PARTS, square_loss, lambda p: torch.optim.SGD(p, **SETTINGS, fused=True),
                clip_norm=clip, delayed=delayed,
            )  # fmt: skip
            digest = state_sha256(plain)
            plain.eval()
            with torch.no_grad():
                outputs = [plain(tuple(map(torch.clone, each))) for each in split_batch(*self.batches[0], PARTS)[0]]
            self._expected[delayed, clip] = digest, losses, outputs
        return self._expected[delayed, clip]

    def built(self, folder: Path, places: tuple[int, ...]) -> Built:
        return Built(
            folder, copy.deepcopy(self.module), lambda count: random_inputs(self.module.width, count),
            [BATCH // PARTS, BATCH // PARTS + 1], cutting=Cutting(places=places),
        )  # fmt: skip

    def found(self, built: Built, ring: Ring) -> Results:
        outputs: list[Any] = []

        def evaluate(master: Master) -> None:
            inputs, targets = split_batch(*self.batches[0], PARTS)
            outputs.extend(master.predict([Batch(0, inputs, targets, BATCH)], STEPS))

        how = recipe("sgd", SETTINGS, clip_norm=ring.clip, staleness=int(ring.delayed))
        digest, losses = ring_in_memory(
            built, how, self.batches, PARTS, square_loss, max(ring.holders) + 1, ring.schedule, ring.bounds,
            holders=ring.holders, recompute=ring.recompute, then=evaluate,
        )  # fmt: skip
        return digest, losses, outputs


def differing(found: Results, expected: Results) -> list[str]:
    names = [what for what, one, other in zip(("weights", "losses"), found, expected, strict=False) if one != other]
    for one, other in zip(found[2], expected[2], strict=True):
        parts, others = (list(each) if isinstance(each, tuple) else [each] for each in (one, other))
        if not all(a.equal(b) for a, b in zip(parts, others, strict=True)):
            names.append("evaluation")
    return names


def compare(seed: int, folder: Path) -> None:
    dice, comparison = random.Random(seed), Comparison(random_module(seed))
    for number in range(CUTS):
        places = random_places(dice, comparison.module)
        built = comparison.built(folder / str(number), places)
        may_repeat = all(repeatable(layer.train) for layer in built.layers)
        for _ in range(RINGS):
            ring = random_ring(dice, len(built.layers), may_repeat)
            found = comparison.found(built, ring)
            wrong = differing(found, comparison.expected(ring.delayed, ring.clip))
            assert not wrong, f"{wrong} of {comparison.module.steps}, cut at {places}, as {ring}"


@pytest.mark.parametrize(
    "seed",
    [
        *QUICK,
        *(pytest.param(each, marks=pytest.mark.long) for each in LONG),
        *(pytest.param(each, marks=pytest.mark.nightly) for each in NIGHTLY),
    ],
)
def test_a_random_module_cut_anywhere_gives_the_bits_of_eager(seed: int, tmp_path: Path) -> None:
    compare(seed, tmp_path)


class ByItsEmbedding(nn.Module):
    """Scores against what a layer makes of the embedding: a weight of the front enters a linear layer of the tail."""

    width = 16

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 16)
        self.middle, self.project = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, tokens = inputs
        y = torch.tanh(self.middle(self.embed(tokens) + x))
        return F.linear(y, self.project(self.embed.weight))


@pytest.mark.parametrize("delayed", [False, True])
def test_a_weight_gradient_left_for_later_is_computed_of_a_weight_that_was_not_updated_yet(
    delayed: bool, tmp_path: Path
) -> None:
    """Front and tail are on one node: the tail had the front's weight itself, no copy, and the front's update came first."""
    torch.manual_seed(0)
    comparison = Comparison(ByItsEmbedding())
    built = comparison.built(tmp_path, (2, 4))
    ring = Ring([0, 1, 0], [(0, 1), (1, 2), (2, 3)], "zero-bubble", "none", delayed, None)
    assert not differing(comparison.found(built, ring), comparison.expected(delayed, None))
