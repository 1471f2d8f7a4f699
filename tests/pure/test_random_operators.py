"""Which operators draw random numbers, told from a graph, is what torch does: the generator's state says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from ringtmp.errors import ProtocolError
from ringtmp.model import portable_layer
from ringtmp.model.allowed_operators import ATEN_OVERLOADS, resolve
from ringtmp.model.export import Exporter
from ringtmp.model.portable_layer import Graph, Input, Items, Layer, Op, OutputTree, Ref
from ringtmp.model.random_operators import draws, random_count
from ringtmp.model.run_graph import Program

SEEDED = sorted(
    each for each in ATEN_OVERLOADS if torch.Tag.nondeterministic_seeded in getattr(resolve(each), "tags", ())
)
PROBABILITIES = (0, 0.0, 0.3, 1.0)
X = torch.linspace(-1, 1, 64).reshape(4, 4, 4)
POSITIVE = X.abs() + 0.1


def _recurrent(name: str, layers: int, dropout: float, train: bool) -> tuple[Any, ...]:
    gates, weights = {"lstm": 4, "gru": 3}.get(name, 1), torch.ones(16, 4)
    params = [weights[: 4 * gates], weights[: 4 * gates]] * layers
    hidden = torch.zeros(layers, 4, 4)
    return X, [hidden, hidden] if name == "lstm" else hidden, params, False, layers, dropout, train, False, True


def calls(target: str) -> list[tuple[Any, ...]]:
    """Arguments by place that tell the cases of an operator apart."""
    _, name, overload = target.split(".")
    size, half = [4], torch.full((4, 4, 4), 0.5)
    if "dropout" in name:
        return [(X.clone(), p, train) for p in PROBABILITIES for train in (True, False)]
    if name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        return [_recurrent(name, n, p, train) for n in (1, 2) for p in PROBABILITIES for train in (True, False)]
    if name.startswith("rrelu"):
        return [(X.clone(), 0.1, 0.3, train) for train in (True, False)] + [(X.clone(),)]
    if name == "scaled_dot_product_attention":
        return [(X, X, X), *((X, X, X, None, p) for p in PROBABILITIES)]
    by_hand: dict[str, list[tuple[Any, ...]]] = {
        "rand": [(size,)],
        "randn": [(size,)],
        "randint": [(1, size) if overload == "default" else (3, 9, size)],
        "multinomial": [(POSITIVE[0], 2), (POSITIVE[0], 2, True)],
        "bernoulli": [(half, *{"Tensor": [half], "p": [0.0]}.get(overload, []))],
        "bernoulli_": [(X.clone(), half if overload == "Tensor" else 0.0)],
        "normal": [(X, 0.0 if overload == "Tensor_float" else POSITIVE)],
    }
    return by_hand.get(name, [(X.clone(),)])


def as_value(value: Any) -> Any:
    if isinstance(value, list):
        return Items(tuple(as_value(each) for each in value))
    return Ref(0) if isinstance(value, torch.Tensor) else value


def has_drawn(call: Callable[[], Any]) -> bool:
    with torch.random.fork_rng(devices=[]):
        generator = torch.default_generator.manual_seed(1)
        before = generator.get_state()
        call()
        return not generator.get_state().equal(before)


@pytest.mark.parametrize("target", SEEDED)
def test_a_graph_tells_what_draws(target: str) -> None:
    for args in calls(target):
        told = draws(Op(target, tuple(as_value(each) for each in args), {}))
        assert told == has_drawn(lambda args=args: resolve(target)(*args)), args


def test_every_operator_that_takes_a_generator_is_known() -> None:
    taking = {each for each in ATEN_OVERLOADS if "Generator" in str(getattr(resolve(each), "_schema", ""))}
    assert taking <= set(SEEDED)
    assert len(SEEDED) == 32


def test_arguments_by_name_and_those_that_are_computed() -> None:
    assert draws(Op("aten.dropout.default", (Ref(0),), {"p": 0.5, "train": True}))
    assert not draws(Op("aten.dropout.default", (Ref(0),), {"p": 0.5, "train": False}))
    assert draws(Op("aten.dropout.default", (Ref(0), Ref(1), True), {}))
    assert not draws(Op("aten.relu.default", (Ref(0),), {}))
    assert not draws(Op("getitem", (Ref(0), 1), {}))
    assert not draws(Op("custom", (3,), {}))


def test_what_depends_on_values_is_numbered_all_the_same() -> None:
    assert draws(Op("aten.rrelu.default", (Ref(0), 0.1, 0.3, True), {}))
    assert not has_drawn(lambda: torch.rrelu(POSITIVE, 0.1, 0.3, True))


class Drawing(torch.autograd.Function):
    """Draws forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient + torch.rand_like(gradient) + torch.randn_like(gradient)


class Mixed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(x, 0.5, self.training)
        x = Drawing.apply(x)
        x = x + torch.rand_like(x)
        return nn.functional.dropout(x, 0.5)


def mixed() -> Layer:
    example, again = torch.ones(3, 6), torch.ones(4, 6)
    return Exporter().export("mixed", Mixed(), example, again)[0]


def test_operators_are_numbered_in_order_those_of_custom_functions_included() -> None:
    layer, asked = mixed(), list[int]()
    assert (random_count(layer.train), random_count(layer.evaluate)) == (6, 5)
    x = torch.ones(3, 6, requires_grad=True)
    (out,) = Program(layer.train).run([x], {}, None, asked.append)
    assert asked == [0, 1, 4, 5]
    out.sum().backward()
    assert asked == [0, 1, 4, 5, 2, 3]


def test_without_a_seed_for_each_they_draw_one_after_the_other() -> None:
    program, live = Program(mixed().train), Mixed().train()
    program.run([torch.ones(3, 6)], {}, None, lambda number: None)
    results = []
    for run in (lambda x: program.run([x], {})[0], live):
        torch.default_generator.manual_seed(4)
        x = torch.ones(3, 6, requires_grad=True)
        out = run(x)
        out.sum().backward()
        results.append((out, x.grad))
    assert all(a.equal(b) for a, b in zip(*results, strict=True))


def test_a_layer_of_an_older_version_has_no_numbers_and_none_may_be_absurd() -> None:
    graph = Graph((Input("input", "0"),), (), (Ref(0),), False)
    layer = Layer("a", graph, graph, (), OutputTree("*"), random_before=7)
    held = msgspec.msgpack.decode(portable_layer.encode(layer))
    assert portable_layer.decode(msgspec.msgpack.encode(held)) == layer
    for wrong in (-1, 2**40, "7"):
        with pytest.raises(ProtocolError):
            portable_layer.decode(msgspec.msgpack.encode({**held, "random_before": wrong}))
    del held["random_before"], held["random_before_evaluating"]
    assert portable_layer.decode(msgspec.msgpack.encode(held)).random_before == 0
