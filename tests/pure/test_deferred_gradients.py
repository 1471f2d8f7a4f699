"""Deferred weight gradients: operator by operator the bits of autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from living import assert_lets_go, living_tensors
from ringtmp.model.deferred_gradients import ROOM
from ringtmp.model.export import Exporter
from ringtmp.model.run_graph import Program
from ringtmp.plan.route import Visit
from ringtmp.runtime.stage import Stage
from ringtmp.wire.messages import Recipe


class Twice(nn.Module):
    """One weight, two uses: its two gradients are summed before they reach the parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.same = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.same(torch.tanh(self.same(x)))


class Turned(nn.Module):
    """What enters the linear operator is column by column in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.t().contiguous().t())


def _frozen_bias() -> nn.Module:
    layer = nn.Linear(8, 8)
    layer.bias.requires_grad_(False)
    return layer


# name -> (layer, input, weight gradients that wait)
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "linear": (lambda: nn.Linear(8, 5), (6, 8), 1),
    "linear, large": (lambda: nn.Linear(256, 300), (130, 256), 1),
    "linear, one sample": (lambda: nn.Linear(8, 5), (1, 8), 1),
    "linear without bias": (lambda: nn.Linear(33, 17, bias=False), (6, 33), 1),
    "linear, frozen bias": (_frozen_bias, (6, 8), 1),
    "linear, frozen": (lambda: nn.Linear(8, 8).requires_grad_(False), (6, 8), 0),
    "linear on sequences": (lambda: nn.Linear(48, 20), (4, 9, 48), 1),
    "linear on sequences without bias": (lambda: nn.Linear(48, 20, bias=False), (4, 9, 48), 1),
    "linear on four dimensions": (lambda: nn.Linear(8, 5), (2, 3, 4, 8), 0),
    "linear, changed in place": (lambda: nn.Sequential(nn.Linear(8, 5), nn.ReLU(inplace=True)), (6, 8), 1),
    "linear on sequences, in place": (lambda: nn.Sequential(nn.Linear(8, 5), nn.ReLU(inplace=True)), (4, 3, 8), 1),
    "linear, column by column": (Turned, (6, 64), 0),
    "one weight twice": (Twice, (6, 8), 0),
    "two layers": (lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), (6, 8), 2),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, padding=1), (5, 4, 11), 1),
    "conv2d": (lambda: nn.Conv2d(3, 8, 3, padding=1), (5, 3, 9, 9), 1),
    "conv2d, strided, dilated": (lambda: nn.Conv2d(4, 6, 3, 2, 2, 2, bias=False), (5, 4, 13, 13), 1),
    "conv2d, by groups": (lambda: nn.Conv2d(8, 8, 3, groups=8), (5, 8, 9, 9), 1),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), (3, 2, 5, 5, 5), 1),
    "batch norm": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), (5, 3, 8, 8), 1),
    "attention": (lambda: nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), (3, 5, 16), 3),
    "embedding": (lambda: nn.Embedding(20, 7), (4, 6), 1),
    "embedding with padding": (lambda: nn.Embedding(20, 7, padding_idx=3, scale_grad_by_freq=True), (4, 6), 1),
}


def gradients(
    program: Program, owned: dict[str, torch.Tensor], inputs: list[torch.Tensor], defer: bool
) -> tuple[list[Any], int]:
    """Of everything, over two microbatches: what a node does."""
    waited = 0
    results: list[Any] = []
    for x in inputs:
        leaf = x.clone().requires_grad_(x.is_floating_point())
        later: list[Any] | None = [] if defer else None
        out = program.run([leaf], owned, later)[0]
        if out.requires_grad:
            out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(1)))
        results += [out.detach(), leaf.grad, None if leaf.grad is None else leaf.grad.stride()]
        for job in later or ():
            job.work()
        waited = len(later or ())
    results += [(each.grad, None if each.grad is None else each.grad.stride()) for each in owned.values()]
    return results, waited


@pytest.mark.parametrize("name", list(CASES))
def test_what_waits_has_the_bits_of_what_does_not(name: str) -> None:
    make, shape, waiting = CASES[name]
    torch.manual_seed(2)
    module = make()
    inputs = [torch.randint(0, 20, shape) if "embedding" in name else torch.randn(shape) for _ in range(2)]
    example = inputs[0][:1].expand(3, *shape[1:]).clone()
    layer, tensors = Exporter().export(name, module, example)
    program = Program(layer.train)
    found = []
    for defer in (False, True):
        owned = {
            each.name: tensors[each.name].detach().clone().requires_grad_(each.trainable) for each in layer.tensors
        }
        found.append(gradients(program, owned, inputs, defer))
    (plain, none), (deferred, waited) = found
    assert (none, waited) == (0, waiting)
    assert all(_same(a, b) for a, b in zip(plain, deferred, strict=True))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.equal(b)
    return bool(a == b)


def test_what_has_waited_is_let_go_when_it_is_done() -> None:
    """A job once held on to the graph before it, and the graph to the list of jobs: every microbatch stayed until a garbage
    collection, which a node hardly ever has."""
    layer, tensors = Exporter().export("two", nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.zeros(3, 8))
    how = Recipe(0, 1, "sgd", {"lr": 0.1}, {"kind": "constant", "warmup": 0})
    stage = Stage(Visit(0, 0, 0, 1), how, defer=True)
    stage.place(0, layer, [tensors[each.name].clone() for each in layer.tensors], {})

    def living() -> int:
        for microbatch in range(4):
            stage.forward(microbatch, 0, [torch.randn(4, 8)], [True], True)
            stage.backward(0, microbatch, [torch.randn(4, 8)])
        while stage.deferred:
            stage.weight_gradients()
        return living_tensors()

    assert_lets_go(living)


@pytest.mark.parametrize("defer", [False, True])
def test_gradients_of_large_weights_share_their_memory_and_have_the_bits_of_plain_torch(defer: bool) -> None:
    """Two sizes, so that the room grows; two steps, so that nothing of the first is left in the second."""
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(1500, 1500), nn.Tanh(), nn.Linear(1500, 1700))
    layer, tensors = Exporter().export("large", module, torch.zeros(3, 1500))
    how = Recipe(0, 1, "sgd", {"lr": 0.1}, {"kind": "constant", "warmup": 0})
    stage = Stage(Visit(0, 0, 0, 1), how, defer=defer)
    stage.place(0, layer, [tensors[each.name].detach().clone() for each in layer.tensors], {})
    sgd = torch.optim.SGD(module.parameters(), 0.1, foreach=False)
    rooms = set()
    for step in range(2):
        batches = [torch.randn(4, 1500) for _ in range(4)]
        gradient = torch.randn(4, 1700)
        for microbatch, batch in enumerate(batches):
            stage.forward(microbatch, step, [batch], [False], True)
            stage.backward(step, microbatch, [gradient])
            module(batch).backward(gradient)
            while stage.deferred:
                stage.weight_gradients()
            if microbatch > 1:
                assert ROOM.memory is not None, "autograd, or a new product, would have taken memory of its own"
                rooms.add((step, ROOM.memory.data_ptr()))
        assert len(rooms) == step + 1, "one room for all microbatches"
        for ours, plain in zip(stage.parameters[0], module.parameters(), strict=True):
            assert ours.grad is not None
            assert plain.grad is not None
            assert ours.grad.equal(plain.grad)
        stage.step(step, None)
        assert ROOM.memory is None, "an update needs the memory for other things"
        sgd.step()
        sgd.zero_grad()
    assert all(a.equal(b) for a, b in zip(stage.parameters[0], module.parameters(), strict=True))
