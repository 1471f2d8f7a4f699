"""Contract 1 for what keeps the ring busy: deferred weight gradients, delayed gradients, laps, recomputed activations."""

from __future__ import annotations

from collections import OrderedDict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from harness import Built, recipe, ring_in_memory
from oracle import plain_loop, state_sha256
from ringtmp.model import zoo
from ringtmp.ring.losses import cross_entropy, next_byte
from test_exact import MICROBATCHES, MODELS, batches_of, source

SEED = 5
CLIP = 0.3
SETTINGS = {"lr": 0.05, "momentum": 0.9}


class Case:
    """A small model of the zoo with dropout, trained with clipping: everything that could differ."""

    def __init__(self, model: str) -> None:
        self.data, sizes = MODELS[model]
        self._layers = lambda: zoo.build(model, source(self.data).shape, {**sizes, "dropout": 0.2})
        self.loss: Any = next_byte if model == "gpt" else cross_entropy
        self.batches = batches_of(self.data, 4)

    def plain(self) -> nn.Sequential:
        torch.manual_seed(SEED)
        return nn.Sequential(OrderedDict(self._layers()))

    def built(self, folder: Path) -> Built:
        return Built(folder, self._layers, lambda count: source(self.data).example(count)[0], [3, 4], seed=SEED)

    def run(self, built: Built, nodes: int, **how: Any) -> tuple[str, list[float]]:
        more = {key: how.pop(key) for key in ("staleness", "recompute") if key in how}
        return ring_in_memory(
            built, recipe("sgd", SETTINGS, seed=SEED, clip_norm=CLIP, **more), self.batches, MICROBATCHES, self.loss,
            nodes, seed=nodes, **how,
        )  # fmt: skip


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, fused=True, **SETTINGS)


@cache
def plain_result(model: str) -> tuple[str, list[float]]:
    case = Case(model)
    plain = case.plain()
    losses = plain_loop(plain, case.batches, MICROBATCHES, case.loss, sgd, seed=SEED, clip_norm=CLIP)
    return state_sha256(plain), losses


@pytest.mark.parametrize("model", list(MODELS))
def test_deferred_weight_gradients_change_no_bit(model: str, tmp_path: Path) -> None:
    case = Case(model)
    built = case.built(tmp_path)
    for nodes in (1, 3):
        assert case.run(built, nodes, schedule="zero-bubble") == plain_result(model), f"{nodes} nodes"
