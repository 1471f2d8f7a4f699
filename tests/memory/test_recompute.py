"""Activations computed again instead of stored: what may be, what is kept, what is let go and when."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from harness import Built, recipe, ring_in_memory
from living import assert_lets_go, living_tensors
from oracle import plain_loop, state_sha256
from ringtmp.errors import UsageError
from ringtmp.model.export import Exporter
from ringtmp.model.portable_layer import Layer
from ringtmp.model.recompute import changed_buffers, refuse_unrepeatable, repeatable
from ringtmp.model.running_statistics import refuse_statistics
from ringtmp.plan.route import Visit
from ringtmp.runtime.stage import Stage
from ringtmp.wire.messages import Recipe

WIDTH = 6


class Counting(nn.Module):
    """Changes a buffer nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return x * self.scale


class Centred(nn.Module):
    """Reads a mean it has just moved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.copy_(0.9 * self.mean + 0.1 * x.detach().mean(0))
        return x - self.mean


class Roundabout(nn.Module):
    """The same through a view and an operation in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(2, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.table[0].add_(1)
        y = x * 1.0
        y.add_(self.table.sum(0))
        return y


def exported(module: nn.Module, example: torch.Tensor | None = None) -> tuple[Layer, dict[str, torch.Tensor]]:
    return Exporter().export("it", module, torch.zeros(3, WIDTH) if example is None else example)


@pytest.mark.parametrize(
    ("module", "changes", "may"),
    [
        (lambda: nn.Linear(WIDTH, WIDTH), set(), True),
        (lambda: nn.BatchNorm1d(WIDTH), {"running_mean", "running_var", "num_batches_tracked"}, True),
        (lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False), set(), True),
        (Counting, {"seen"}, True),
        (Centred, {"mean"}, False),
        (Roundabout, {"table"}, False),
    ],
)
def test_a_graph_tells_what_it_changes_and_whether_its_output_depends_on_it(
    module: Any, changes: set[str], may: bool
) -> None:
    layer, _ = exported(module())
    assert changed_buffers(layer.train) == changes
    assert repeatable(layer.train) is may


def test_what_a_layer_changes_is_told_by_its_name_in_the_model() -> None:
    layer, _ = exported(nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4)))
    cut = msgspec.structs.replace(
        layer, tensors=tuple(msgspec.structs.replace(each, full=f"net.{each.name}") for each in layer.tensors)
    )
    with pytest.raises(UsageError, match=r"changes net\.1\.num_batches_tracked, net\.1\.running_mean, net"):
        refuse_statistics([cut], "with --groups they meet in another order", "a ring")


def test_a_layer_that_cannot_be_repeated_is_refused_by_name() -> None:
    layer, _ = exported(Centred())
    with pytest.raises(UsageError, match="layer 'it' reads a buffer that it changes .*mean.*--recompute none"):
        refuse_unrepeatable([layer])


def staged(recompute: Any) -> Stage:
    layer, tensors = exported(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)))
    how = Recipe(0, 1, "sgd", {"lr": 0.1}, {"kind": "constant", "warmup": 0})
    stage = Stage(Visit(0, 0, 0, 1), how, recompute=recompute)
    stage.place(0, layer, [tensors[each.name].clone() for each in layer.tensors], {})
    return stage


@pytest.mark.parametrize("again", [False, True])
def test_what_is_stored_is_let_go_when_backward_has_used_it(again: bool) -> None:
    asked: list[int] = []
    stage = staged(lambda size: asked.append(size) or again)
    stage.forward(0, 0, [torch.randn(4, WIDTH)], [True], True)
    assert asked == [4 * WIDTH * 4], "the output of tanh is stored; what entered and the weights are held anyway"
    inputs = torch.randn(4, WIDTH)
    (outputs,) = stage.forward(1, 0, [inputs], [True], True)
    assert len(asked) == 1, "the question is asked once"
    entered, left = weakref.ref(inputs), weakref.ref(outputs)
    gradient = torch.randn(4, WIDTH)
    del inputs, outputs
    assert entered() is not None
    assert (left() is None) is again, "recomputing keeps what entered and nothing else"
    stage.backward(0, 0, [gradient])
    stage.backward(0, 1, [gradient])
    assert entered() is left() is None
    assert stage.held == 0


def test_auto_recomputes_where_memory_is_short_and_leaves_out_what_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build() -> list[nn.Module]:
        return [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)]

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return ((outputs - targets) ** 2).mean()

    torch.manual_seed(0)
    plain = nn.Sequential(*build())
    batches = [(torch.randn(8, WIDTH), torch.randn(8, WIDTH)) for _ in range(2)]
    losses = plain_loop(plain, batches, 4, loss, lambda p: torch.optim.SGD(p, lr=0.1, fused=True))
    torch.manual_seed(0)
    built = Built(tmp_path, build, lambda count: torch.zeros(count, WIDTH), [2])
    runs: list[bool] = []
    original = Stage._with_graph

    def counted(self: Stage, held: Any, step: int, microbatch: int, once_more: bool) -> Any:
        runs.append(once_more)
        return original(self, held, step, microbatch, once_more)

    monkeypatch.setattr(Stage, "_with_graph", counted)
    for free, repeats in ((1 << 40, False), (0, True)):
        runs.clear()
        monkeypatch.setattr("ringtmp.runtime.compute_device.free_memory_bytes", lambda free=free: free)
        assert ring_in_memory(built, recipe(), batches, 4, loss, 2, recompute="auto") == (state_sha256(plain), losses)
        assert any(runs) is repeats


@pytest.mark.long
def test_the_microbatch_that_was_measured_is_let_go_without_a_garbage_collection() -> None:
    """The first one is stored to see what it takes. An operator that saves its own output once held itself that way: a
    microbatch's activations stayed with every node that computes them again."""
    layer, tensors = Exporter().export("bent", nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.zeros(3, 8))
    how = Recipe(0, 1, "sgd", {"lr": 0.1}, {"kind": "constant", "warmup": 0})

    def living() -> int:
        stage = Stage(Visit(0, 0, 0, 1), how, recompute=lambda saved_bytes: True)
        stage.place(0, layer, [tensors[each.name].clone() for each in layer.tensors], {})
        stage.forward(0, 0, [torch.randn(4, 8)], [True], True)
        return living_tensors()

    assert_lets_go(living)
