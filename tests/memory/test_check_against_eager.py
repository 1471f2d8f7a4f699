"""What would train otherwise than in eager mode is refused before the start, by name and line; checking leaves no trace."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ringtmp.config import RingPart, RunConfig
from ringtmp.errors import UsageError
from ringtmp.model.build import build_layers
from ringtmp.model.layers import layers_of, opened_model
from ringtmp.strategies.ring.plan import refuse_too_few
from test_own_backward_code import WIDTH, Whole, numbers, words


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] >= 4 else x


class Even(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] % 2 == 0 else x


class Alone(nn.Module):
    """Export takes one sample for a special case and never looks at it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] == 1 else x


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * 2 if self.calls % 100 == 0 else x


class Growing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.strength = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.strength += 0.1
        return x * self.strength


CALLS = [0]


class OfTheClass(nn.Module):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        OfTheClass.calls += 1
        return x * 2 if OfTheClass.calls > 200 else x


class InAnObject(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kept = SimpleNamespace(calls=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept.calls += 1
        return x * 2 if self.kept.calls > 200 else x


class InAGlobal(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        CALLS[0] += 1
        return x * 2 if CALLS[0] > 200 else x


class Elsewhere(nn.Module):
    """Counts where nobody looks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_exporting():
            calls.append(1)
        return x * len(calls)


calls = [1]


class Dicing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if random.random() < 1e-12 else x


class NumpyDicing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if np.random.rand() < 1e-12 else x


class Unsteady(nn.Module):
    """Counts where it is not looked for, with effect at once."""

    seen = itertools.count(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_exporting():
            return x * next(self.seen)
        return x


class Other(nn.Module):
    """Takes another path when it is exported."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1.5 if torch.compiler.is_exporting() else x * 1.25


class Clamped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.inner.weight.clamp_(-0.2, 0.2)
        return self.inner(x)


class HookedTensor(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        if y.requires_grad or torch.compiler.is_exporting():
            y.register_hook(lambda gradient: gradient * 2)
        return y


class ByNumpy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return torch.from_numpy(gradient.numpy() * 2)


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * 2


class Calling(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function.apply(x + 0)


def watched_module() -> nn.Module:
    layer = Whole(nn.Linear(WIDTH, WIDTH))
    layer.inner.register_full_backward_hook(lambda module, entering, leaving: (entering[0] * 2,))
    return layer


def watched_before() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.register_full_backward_pre_hook(lambda module, leaving: (leaving[0] * 2,))
    return layer


def stepping() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    return layer


def looking() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.weight.register_hook(lambda gradient: None)
    return layer


HERE = r"test_check_against_eager\.py:\d+"
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a branch on the number of samples": (Branching, rf"layer '0' .Branching.* the number of samples .{HERE}"),
    "a branch on even numbers": (Even, rf"layer '0' .Even.* depends on the number of samples .{HERE}"),
    "a branch for one sample": (Alone, r"layer '0' .Alone.* eager mode: with inputs of shape .1, 8., output 0"),
    "a counter": (Counting, "layer '0' .Counting.* changes its attribute calls .*register_buffer"),
    "a number that grows": (Growing, "layer '0' .Growing.* changes its attribute strength"),
    "a counter of the class": (OfTheClass, "layer '0' .OfTheClass.* changes the class attribute OfTheClass.calls with ev"),
    "a counter in an object": (InAnObject, "layer '0' .InAnObject.* changes its attribute kept.calls with every"),
    "a global counter": (InAGlobal, "layer '0' .InAGlobal.* changes the global variable CALLS with every"),
    "a counter elsewhere": (Elsewhere, "layer '0' .Elsewhere.* changes from one forward pass to the next"),
    "Python's random": (Dicing, rf"layer '0' .Dicing.* draws random numbers from Python or NumPy .{HERE}.*torch.rand"),
    "NumPy's random": (NumpyDicing, rf"layer '0' .NumpyDicing.* draws random numbers from Python or NumPy .{HERE}"),
    "not deterministic": (Unsteady, "layer '0' .Unsteady.* is not deterministic"),
    "another path": (Other, "layer '0' .Other.* would not train as it does in eager mode"),
    "a weight changed in forward": (Clamped, "layer '0' .Clamped.* changes its parameter inner.weight in forward"),
    "a hook on a tensor": (HookedTensor, rf"layer '0' .HookedTensor.* registers a hook .*{HERE}.*autograd.Function"),
    "a backward hook": (watched_module, rf"layer '0' .Whole.* has a backward hook on inner .{HERE}"),
    "a backward pre-hook": (watched_before, rf"layer '0' .Linear.* has a backward pre-hook on itself .{HERE}"),
    "a hook after the gradient": (stepping, rf"layer '0' .Linear.* has a hook after the gradient of weight .{HERE}"),
    "a hook that only looks": (looking, rf"layer '0' .Linear.* the hook on its parameter weight .{HERE}"),
    "a backward in NumPy": (lambda: Calling(ByNumpy), rf"layer '0' .Calling.* the backward of ByNumpy .{HERE}.* be exported"),
    "a function in place": (lambda: Calling(InPlace), rf"layer '0' .Calling.*: InPlace .{HERE}. changes what it is given"),
    "batch norm without momentum": (lambda: nn.BatchNorm1d(WIDTH, momentum=None), "layer '0' .*momentum=0.1"),
}  # fmt: skip


@pytest.mark.parametrize("kind", list(REFUSED))
def test_what_would_train_otherwise_is_refused_by_name_and_line(kind: str) -> None:
    make, says = REFUSED[kind]
    with pytest.raises(UsageError, match=says):
        list(build_layers(nn.Sequential(make()), 0, numbers, [2, 3]))


def test_a_global_backward_hook_is_refused() -> None:
    handle = nn.modules.module.register_module_full_backward_hook(lambda module, entering, leaving: None)
    try:
        with pytest.raises(UsageError, match=rf"layer '0' .Linear. has a global backward hook .{HERE}"):
            list(build_layers(nn.Sequential(nn.Linear(WIDTH, WIDTH)), 0, numbers, [2]))
    finally:
        handle.remove()


def test_checking_leaves_no_trace_in_the_users_model() -> None:
    model = nn.Sequential(nn.Embedding(20, WIDTH, max_norm=0.5), nn.Flatten(1), nn.BatchNorm1d(40), nn.Linear(40, 2))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model[3].weight.grad = torch.ones(2, 40)
    state = random.getstate(), torch.get_rng_state()
    list(build_layers(model, 0, words, [2, 3]))
    assert all(before[name].equal(tensor) for name, tensor in model.state_dict().items())
    assert model[3].weight.grad.equal(torch.ones(2, 40))
    assert [each.grad for each in (model[0].weight, model[2].weight, model[3].bias)] == [None] * 3
    assert random.getstate() == state[0]
    assert torch.get_rng_state().equal(state[1])
    assert "apply" not in vars(torch.autograd.function._SingleLevelFunction)


class NodeSnapshots(nn.Module):
    """Hands a tensor to another layer by other means than its return value."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_exporting():
            kept[:] = [x]
        return x * 2


class Taking(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + kept[0].detach().sum()


kept = [torch.zeros(3, WIDTH)]


def test_a_tensor_that_goes_from_layer_to_layer_behind_their_backs_is_refused() -> None:
    """Layer by layer it looks like a constant."""
    model = nn.Sequential(NodeSnapshots(), nn.Linear(WIDTH, WIDTH), Taking(), nn.Linear(WIDTH, WIDTH))
    with pytest.raises(UsageError, match="run together, the layers do not train as they do in eager mode.*Return it"):
        list(build_layers(model, 0, numbers, [2, 3]))


def test_what_was_checked_is_told_with_the_last_layer() -> None:
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    assert [each.checked for each in build_layers(nn.Sequential(*layers), 0, numbers, [2])] == ["layers", "model"]
    assert [each.checked for each in build_layers(lambda: iter(layers), 0, numbers, [2])] == ["layers", "layers"]


def test_what_costs_nothing_to_see_is_seen_before_the_first_export(monkeypatch: pytest.MonkeyPatch) -> None:
    def export(*_: Any, **__: Any) -> Any:
        raise AssertionError("an export")

    monkeypatch.setattr("ringtmp.model.export.export", export)
    tied = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    tied[2].weight = tied[0].weight
    with pytest.raises(UsageError, match="0.weight and 2.weight are one tensor"):
        list(build_layers(lambda: tied, 0, numbers, [2]))
    for config, nodes, says in (
        (RunConfig(), 4, "4 nodes need at least 5 layers .* the model has 3: use 2 or fewer, or a deeper model"),
        (RunConfig(ring=RingPart(laps=2)), 2, "a route of 5 visits needs at least 5 layers; the model has 3"),
        (RunConfig(ring=RingPart(cuts="0-0,1-1,2-5")), 2, "5"),
    ):
        with pytest.raises(UsageError, match=says):
            list(build_layers(nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)]), 0, numbers, [2],
                              partial(refuse_too_few, config, nodes, True)))  # fmt: skip


class Doubled(nn.Sequential):
    """A container with a forward of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def test_a_container_is_opened_only_where_its_layers_in_a_row_are_what_it_computes() -> None:
    bend, first, last = nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    assert [each for _, each in layers_of(opened_model(nn.Sequential(first, bend, last, bend), 0))] == [
        first,
        bend,
        last,
        bend,
    ]
    (only,) = layers_of(opened_model(Doubled(first, last), 0))
    assert isinstance(only[1], Doubled)
    hooked = nn.Sequential(first, last)
    hooked.register_forward_hook(lambda module, entering, leaving: leaving * 2)
    assert [each for _, each in layers_of(opened_model(hooked, 0))] == [hooked]
    backward = nn.Sequential(nn.Sequential(first, bend), last)
    backward[0].register_full_backward_hook(lambda module, entering, leaving: None)
    with pytest.raises(UsageError, match=rf"layer '0' .Sequential. has a backward hook on itself .{HERE}"):
        list(build_layers(backward, 0, numbers, [2]))


def test_statistics_that_two_layers_share_are_refused_by_name() -> None:
    norm = nn.BatchNorm1d(WIDTH, affine=False)
    with pytest.raises(UsageError, match="0.running_mean and 2.running_mean are one tensor"):
        list(layers_of(opened_model(nn.Sequential(norm, nn.Linear(WIDTH, WIDTH), norm), 0)))


class Stated(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"seen": 3}

    def set_extra_state(self, state: Any) -> None: ...


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(Stated(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).relu()


@pytest.mark.parametrize(
    ("model", "who"),
    [
        (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(Stated(WIDTH, WIDTH), nn.ReLU())), r"1\.0"),
        (Around(), r"inner\.0"),
        ([Stated(WIDTH, WIDTH)], "0"),
    ],
)
def test_state_that_is_no_tensor_is_refused_by_name(model: Any, who: str) -> None:
    """It ended in "'dict' object has no attribute 'dtype'"."""
    with pytest.raises(UsageError, match=rf"^{who} .Stated. has a get_extra_state.*register_buffer"):
        list(build_layers(model, 0, numbers, [2]))
