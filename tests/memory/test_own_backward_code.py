"""Contract 1 for models with backward code of their own: they train as a plain loop does, and their code travels as data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm

from harness import Built, recipe, ring_in_memory
from oracle import plain_loop, state_sha256
from ringtmp.errors import ProtocolError, UsageError
from ringtmp.model import portable_layer
from ringtmp.model.build import build_layers
from ringtmp.model.parameters_changed_in_forward import refuse_written, written_parameters
from ringtmp.model.portable_layer import Custom, Graph, Input, Op, Ref
from ringtmp.model.run_graph import Program

WIDTH = 8


class Reverse(torch.autograd.Function):
    """Gradient reversal: the identity forward, a scaled and turned gradient backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, strength: float) -> torch.Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return -ctx.strength * gradient, None


reverse = Reverse.apply  # as many write it: bound before anybody could watch


class Rounded(torch.autograd.Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient


class Scaled(torch.autograd.Function):
    """Two results, saved tensors, a parameter among its arguments, sizes in its backward, set up apart."""

    @staticmethod
    def forward(x: torch.Tensor, low: float, scale: torch.Tensor) -> Any:
        return (x * scale).clamp(low), x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, low, scale = inputs
        ctx.save_for_backward(x, scale, output[0])
        ctx.low = low

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> Any:
        x, scale, out = ctx.saved_tensors
        return first * (x > ctx.low) * scale + second * out, None, (first * x).sum(0) / x.shape[0]


class Adverse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return reverse(self.inner(x), 0.3)


class Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(Rounded.apply(x), Rounded.apply(self.inner.weight), self.inner.bias)


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = Scaled.apply(self.inner(x), -0.1, self.scale)
        return Rounded.apply(one) + reverse(other, 0.5)


class Nested(torch.autograd.Function):
    """Calls another, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return Rounded.apply(x) * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * Rounded.apply(ctx.saved_tensors[0])


class Largest(torch.autograd.Function):
    """A result without a gradient, and a size that backward makes a tensor of."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        values, places = x.topk(2, dim=1)
        ctx.mark_non_differentiable(places)
        ctx.save_for_backward(places)
        ctx.shape = x.shape
        return values, places

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> Any:
        return torch.zeros(ctx.shape).scatter(1, ctx.saved_tensors[0], gradient)


class Tripled(torch.autograd.Function):
    """Gives back the very tensor it was given."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * 3


class Stopped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, owner: nn.Module) -> torch.Tensor:
        return x * owner.factor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, None


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("factor", torch.linspace(1, 2, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = Nested.apply(self.inner(x))
        values, places = Largest.apply(x)
        x = Tripled.apply(x) + Stopped.apply(x, self) + x
        return x + (x.gather(1, places) * values).sum(1, keepdim=True)


class Unwatched(nn.Module):
    """Normalises by statistics that get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            mean = self.inner(x).mean(0)
        return self.inner(x) - mean


def masked() -> nn.Module:
    """A weight of which a part stays as it is, and a bias that learns at half the rate."""
    layer = nn.Linear(WIDTH, WIDTH)
    mask = (torch.arange(WIDTH * WIDTH) % 3 > 0).reshape(WIDTH, WIDTH)
    layer.weight.register_hook(lambda gradient: gradient * mask)
    assert layer.bias is not None
    layer.bias.register_hook(lambda gradient: gradient.mul_(0.5))
    return layer


def numbers(count: int) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(count))


def pictures(count: int) -> torch.Tensor:
    return torch.randn(count, 2, 4, 4, generator=torch.Generator().manual_seed(count))


def words(count: int) -> torch.Tensor:
    return torch.randint(0, 20, (count, 5), generator=torch.Generator().manual_seed(count))


# name -> (first layer, what enters it)
TAKEN: dict[str, tuple[Callable[[], nn.Module], Callable[[int], torch.Tensor]]] = {
    "gradient reversal": (Adverse, numbers),
    "straight-through": (Quantised, numbers),
    "two results": (Both, numbers),
    "odd functions": (Odd, numbers),
    "hooks on parameters": (masked, numbers),
    "no_grad": (Unwatched, numbers),
    "spectral norm": (lambda: spectral_norm(nn.Linear(WIDTH, WIDTH)), numbers),
    "parametrized spectral norm": (lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), numbers),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)), numbers),
    "padding same": (lambda: nn.Sequential(nn.Conv2d(2, 2, (2, 3), padding="same"), nn.Flatten(1), nn.Linear(32, 8)), pictures),
    "embedding bag": (lambda: nn.EmbeddingBag(20, WIDTH), words),
    "max_norm": (lambda: nn.Sequential(nn.Embedding(20, WIDTH, max_norm=1.0), nn.Flatten(1), nn.Linear(40, 8)), words),
}  # fmt: skip


def squared(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return ((outputs - targets) ** 2).mean()


#: The others say it of one operator more.
QUICK = ("two results", "hooks on parameters", "no_grad", "max_norm")


@pytest.mark.parametrize(
    "kind", [pytest.param(each, marks=() if each in QUICK else pytest.mark.long) for each in TAKEN]
)
def test_a_model_with_backward_code_of_its_own_trains_with_the_bits_of_a_plain_loop(kind: str, tmp_path: Path) -> None:
    first, sample = TAKEN[kind]

    def build() -> list[nn.Module]:
        # Wrapped, so that one layer has the parts to itself; in the middle the gradient of what enters is needed, too.
        middle = Whole(first()) if sample is numbers else nn.Linear(WIDTH, WIDTH)
        return [Whole(first()), nn.Tanh(), middle, nn.Linear(WIDTH, WIDTH)]

    batches = [(sample(9), numbers(9)), (sample(7), numbers(7))]
    torch.manual_seed(1)
    plain = nn.Sequential(*build())
    losses = plain_loop(plain, batches, 3, squared, lambda p: torch.optim.SGD(p, lr=0.1, fused=True), 1)
    built = Built(tmp_path, build, sample, [2, 3], 1)
    built.layers = [portable_layer.decode(portable_layer.encode(each)) for each in built.layers]
    expected = (state_sha256(plain), losses)
    for nodes, schedule, recompute in ((1, "1f1b", "none"), (2, "1f1b", "all"), (3, "zero-bubble", "none")):
        got = ring_in_memory(
            built, recipe(seed=1), batches, 3, squared, nodes, schedule, recompute=recompute
        )  # fmt: skip
        assert got == expected, f"{nodes} nodes, {schedule}, recompute {recompute}"


class Whole(nn.Module):
    """One layer, whatever is inside."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


# -- as data -----------------------------------------------------------------------------------------------------------


def test_a_layer_written_before_custom_functions_existed_is_read() -> None:
    (built,) = build_layers(nn.Sequential(nn.Linear(WIDTH, WIDTH)), 0, numbers, [2])
    older = msgspec.to_builtins(built.layer)
    del older["train"]["customs"], older["evaluate"]["customs"]
    assert portable_layer.decode(msgspec.msgpack.encode(older)) == built.layer


def test_a_parameter_changed_in_forward_is_refused_where_several_nodes_hold_it() -> None:
    (built,) = build_layers(nn.Sequential(nn.Embedding(20, 4, max_norm=1.0)), 0, words, [2])
    assert written_parameters(built.layer.train) == {"weight": True}
    with pytest.raises(UsageError, match="layer '0' changes its parameter weight in forward .*with ps every node"):
        refuse_written([built.layer], "ps")


def passing(outputs: tuple[Any, ...], ops: tuple[Op, ...] = (), inputs: int = 1) -> Graph:
    return Graph(tuple(Input("input", str(number)) for number in range(inputs)), ops, outputs, False)


@pytest.mark.parametrize(
    ("custom", "op"),
    [
        (Custom("it", passing((Ref(0),)), passing((Ref(0),)), (True,)), Op("custom", (1, Ref(0)), {})),
        (Custom("it", passing((Ref(0),)), passing((Ref(0),)), (True,)), Op("custom", (-1, Ref(0)), {})),
        (Custom("it", passing((Ref(0),)), passing((Ref(0),)), (True,)), Op("custom", (), {})),
        (Custom("it", passing((Ref(0),)), passing((Ref(0), Ref(0))), (True,)), Op("custom", (0, Ref(0)), {})),
        (Custom("it", passing((Ref(0),)), passing((Ref(0),)), (True, True)), Op("custom", (0, Ref(0)), {})),
        (
            Custom(
                "it",
                msgspec.structs.replace(
                    passing((Ref(0),)), customs=(Custom("in it", passing((Ref(0),)), passing((Ref(0),)), (True,)),)
                ),
                passing((Ref(0),)),
                (True,),
            ),
            Op("custom", (0, Ref(0)), {}),
        ),
        (
            Custom("it", passing((Ref(1),), (Op("aten.from_file.default", ("x",), {}),)), passing((Ref(0),)), (True,)),
            Op("custom", (0, Ref(0)), {}),
        ),
        (
            Custom("it", passing((Ref(0),)), passing((Ref(1),), (Op("os.system", ("x",), {}),)), (True,)),
            Op("custom", (0, Ref(0)), {}),
        ),
    ],
)
def test_a_custom_function_that_does_not_hold_together_is_refused(custom: Custom, op: Op) -> None:
    with pytest.raises(ProtocolError):
        Program(Graph((Input("input", "0"),), (op,), (Ref(1),), False, (custom,)))


def test_a_gradient_mode_does_not_outlive_the_graph() -> None:
    graph = passing((Ref(0),), (Op("grad_mode", (False,), {}),))
    Program(graph).run([torch.zeros(1)], {})
    assert torch.is_grad_enabled()
    with pytest.raises(ProtocolError, match="neither on nor off"):
        Program(passing((Ref(0),), (Op("grad_mode", ("yes",), {}),))).run([torch.zeros(1)], {})
