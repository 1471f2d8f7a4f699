"""Contract 1: the final weights are the bits one process computes, for every node count, cut, window and schedule."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from harness import Built, recipe, ring_in_memory
from oracle import plain_loop, state_sha256
from ringtmp.data import source_registry
from ringtmp.data.batches import aligned
from ringtmp.model import zoo
from ringtmp.runtime.losses import cross_entropy, next_byte
from ringtmp.transport.faults import Faults, Shaped

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mlp": ("digits", {"width": 32}),
    "convnet": ("digits", {"width": 8}),
    "resnet": ("digits", {"width": 8}),
    "gpt": ("pysource", {"width": 32, "heads": 2, "context": 16}),
}
OPTIMIZERS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "sgd momentum": (
        "sgd",
        {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01, fused=True),
    ),
    "adamw": (
        "adamw",
        {"lr": 0.003, "weight_decay": 0.1},
        lambda p: torch.optim.AdamW(p, lr=0.003, weight_decay=0.1, fused=True),
    ),
}
BATCH, MICROBATCHES = 20, 6


@cache
def source(data: str) -> Any:
    return source_registry.load(data, 0, {"context": 16})[0]


def batches_of(data: str, steps: int) -> list[Any]:
    """The last batch is smaller, as at the end of an epoch."""
    order = torch.randperm(200, generator=torch.Generator().manual_seed(3))
    sizes = [BATCH] * (steps - 1) + [7]
    pairs, start = [], 0
    for size in sizes:
        inputs, targets = source(data).take(order[start : start + size])
        pairs.append((aligned(inputs), aligned(targets)))
        start += size
    return pairs


EVERY_RING = list(itertools.product((1, 2, 3, 5), ("1f1b", "gpipe")))
QUICK_RINGS = [(1, "1f1b"), (3, "gpipe"), (5, "1f1b")]


def every_combination() -> list[Any]:
    """Some are quick, with every optimizer and every extra among them."""
    quick = {
        ("mlp", "sgd momentum", "dropout"),
        ("mlp", "adamw", "clipping"),
        ("convnet", "adamw", "dropout"),
        ("gpt", "sgd momentum", "clipping"),
    }
    found = itertools.product(MODELS, OPTIMIZERS, ("dropout", "clipping"))
    every = [
        pytest.param(*each, EVERY_RING, marks=pytest.mark.nightly if number % 2 else pytest.mark.long)
        for number, each in enumerate(found)
    ]
    return [*(pytest.param(*each, QUICK_RINGS) for each in sorted(quick)), *every]


@pytest.mark.parametrize(("model", "optimizer", "extra", "rings"), every_combination())
def test_any_ring_gives_the_bits_of_a_plain_loop(
    model: str, optimizer: str, extra: str, rings: list[tuple[int, str]], tmp_path: Path
) -> None:
    data, settings = MODELS[model]
    settings = {**settings, "dropout": 0.2 if extra == "dropout" else 0.0}
    loss = next_byte if model == "gpt" else cross_entropy
    name, values, make = OPTIMIZERS[optimizer]
    clip = 0.3 if extra == "clipping" else None
    schedule = {"kind": "cosine", "total": 4, "floor": 0.1, "warmup": 2}
    batches = batches_of(data, 4)

    torch.manual_seed(5)
    plain = nn.Sequential(OrderedDict(zoo.build(model, source(data).shape, settings)))
    losses = plain_loop(plain, batches, MICROBATCHES, loss, make, seed=5, clip_norm=clip, schedule=schedule)
    expected = state_sha256(plain)

    built = Built(
        tmp_path,
        lambda: zoo.build(model, source(data).shape, settings),
        lambda count: source(data).example(count)[0],
        [3, 4],
        seed=5,
    )
    how = recipe(name, values, seed=5, clip_norm=clip, schedule=schedule)
    for nodes, rule in rings:
        window = MICROBATCHES if rule == "gpipe" else None
        got = ring_in_memory(built, how, batches, MICROBATCHES, loss, nodes, rule, window=window, seed=nodes)
        assert got == (expected, losses), f"{nodes} nodes, {rule}"


@pytest.mark.parametrize("seed", [1, *(pytest.param(each, marks=pytest.mark.long) for each in (0, 2, 3))])
def test_lost_doubled_and_disordered_packets_change_nothing(seed: int, tmp_path: Path) -> None:
    batches = batches_of("digits", 3)
    built = Built(
        tmp_path,
        lambda: zoo.build("convnet", source("digits").shape, {"width": 4}),
        lambda count: source("digits").example(count)[0],
        [3, 4],
    )
    clean = ring_in_memory(built, recipe(), batches, 4, cross_entropy, 3)
    faults = Faults(drop=0.05, duplicate=0.05, reorder=0.05)
    rough = ring_in_memory(
        built, recipe(), batches, 4, cross_entropy, 3, seed=seed, wrap=lambda t: Shaped(t, faults, seed * 100 + t.node)
    )
    assert rough == clean


class Turned(nn.Module):
    """Its input's gradient lies in memory column by column, unlike the input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.t().contiguous().t()


def test_a_gradient_laid_out_unlike_its_tensor_crosses_a_cut_as_it_is(tmp_path: Path) -> None:
    """A leaf's `grad` is laid out like the leaf; matrix kernels before the cut then gave other bits."""

    def build() -> list[nn.Module]:
        return [nn.Linear(96, 96), Turned(), nn.Linear(96, 96)]

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return ((outputs - targets) ** 2).mean()

    generator = torch.Generator().manual_seed(3)
    batches = [tuple(torch.randn(40, 96, generator=generator) for _ in range(2)) for _ in range(2)]
    torch.manual_seed(1)
    plain = nn.Sequential(*build())
    losses = plain_loop(plain, batches, 4, loss, lambda p: torch.optim.SGD(p, lr=0.1, fused=True), 1)
    built = Built(tmp_path, build, lambda count: torch.zeros(count, 96), [10], 1)
    for bounds in ([(0, 1), (1, 2), (2, 3)], [(0, 1), (1, 3), (3, 3)]):
        got = ring_in_memory(built, recipe(seed=1), batches, 4, loss, 2, bounds=bounds)
        assert got == (state_sha256(plain), losses), bounds
