"""Calls of listed operators with arguments that make sense: drawn by the operator's schema, or written by hand."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

Call = tuple[list[Any], dict[str, Any]]

#: Arguments that are indices or counts, by name, and how large they may be.
_INDICES = {"index": 4, "indices": 4, "target": 4, "lengths": 4}
#: Numbers where torch expects a type: it does not check them, and crashes.
_LEFT_ALONE = {"dtype", "layout", "device", "pin_memory", "memory_format", "out_dtype"}
_SHAPES = [(4, 4), (4, 4, 4), (4, 16), (8,), (2, 4, 8, 8), (2, 4, 8), (16, 32), (), (2, 4, 6, 6, 6), (1, 4, 8, 8)]


class Drawn:
    """Draws one call after another for an operator; what does not fit together the operator itself refuses."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)

    def values(self, *shape: int, positive: bool = False) -> torch.Tensor:
        values = torch.randn(shape, generator=self._generator)
        return values.abs() + 0.1 if positive else values

    def indices(self, below: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, below, shape, generator=self._generator)

    def call(self, target: str) -> Call:
        name = target.split(".")[1]
        if name in BY_HAND:
            return BY_HAND[name](self, target.split(".")[2])
        schema = getattr(getattr(torch.ops.aten, name), target.split(".")[2])._schema
        shape = self._random.choice(_SHAPES)
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for each in schema.arguments:
            if each.name in _LEFT_ALONE or (each.has_default_value() and self._random.random() < 0.7):
                value = each.default_value
            else:
                value = self._value(each.name, str(each.type), shape)
            if each.kwarg_only:
                kwargs[each.name] = value
            else:
                args.append(value)
        return args, kwargs

    def _value(self, name: str, kind: str, shape: tuple[int, ...]) -> Any:
        pick = self._random
        if kind.startswith("Optional["):
            return None if pick.random() < 0.5 else self._value(name, kind[9:-1], shape)
        if kind == "Tensor":
            return self._tensor(name, shape)
        if kind in ("List[Tensor]", "List[Optional[Tensor]]"):
            return [self._tensor(name, shape) for _ in range(pick.randint(1, 3))]
        if kind in ("int", "SymInt"):
            return pick.choice([0, 1, -1, 2, 1, 0, 3, 4])
        if kind in ("List[int]", "List[SymInt]"):
            if name in ("size", "shape", "repeats", "dims", "output_size"):
                return pick.choice([list(shape), [4, 4], [2, 1, *shape], [0, 1], [1, 0], list(range(len(shape)))])
            return pick.choice([[0], [1], [2, 2], [0, 1], [-1], [1, 1], [2]])
        if kind in ("float", "number", "List[float]"):
            number = pick.choice([0.5, 2.0, 1.5, 0.25, 3.0])
            return [number, number] if kind.startswith("List") else number
        if kind == "bool":
            return pick.random() < 0.5
        if kind == "str":
            return pick.choice(["none", "constant", "tanh", "floor", "trunc", "add", "ij->ji", "sum", "mean", "fro"])
        if kind == "ScalarType":
            return torch.float32
        return None

    def _tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        pick = self._random.random()
        if name in _INDICES:
            return self.indices(2, *shape) if pick < 0.7 else self.indices(2, 4)
        if name in ("mask", "condition"):
            return self.values(*shape) > 0
        if pick < 0.6:
            return self.values(*shape, positive=pick < 0.3)
        if pick < 0.7:
            return self.values(*shape[-1:], positive=True)
        if pick < 0.8 and len(shape) > 1:
            return self.values(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)
        if pick < 0.9:
            return self.values(positive=True)
        return self.values(*shape) > 0 if pick < 0.95 else self.indices(4, *shape)


def _rnn(gates: int, cells: int) -> Callable[[Drawn, str], Call]:
    def make(draw: Drawn, overload: str) -> Call:
        pick = draw._random
        width, hidden = pick.choice([(8, 8), (8, 16), (33, 17)])
        steps, batch = pick.choice([(5, 3), (1, 2), (7, 16)])
        layers, both, bias = pick.choice([1, 2]), pick.random() < 0.5, pick.random() < 0.7
        sides = 2 if both else 1
        weights = []
        for layer in range(layers):
            entering = width if layer == 0 else hidden * sides
            for _ in range(sides):
                weights += [draw.values(gates * hidden, entering) * 0.3, draw.values(gates * hidden, hidden) * 0.3]
                weights += [draw.values(gates * hidden), draw.values(gates * hidden)] if bias else []
        states = [draw.values(layers * sides, batch, hidden) for _ in range(cells)]
        state: Any = states if cells == 2 else states[0]
        train = pick.random() < 0.5
        first = pick.random() < 0.5
        if overload == "data":
            sizes = torch.tensor([batch] * steps)
            return [draw.values(steps * batch, width), sizes, state, weights, bias, layers, 0.0, train, both], {}
        shape = (batch, steps, width) if first else (steps, batch, width)
        return [draw.values(*shape), state, weights, bias, layers, 0.0, train, both, first], {}

    return make


def _conv(dimensions: int, turned: bool) -> Callable[[Drawn, str], Call]:
    def make(draw: Drawn, overload: str) -> Call:
        pick = draw._random
        groups = pick.choice([1, 1, 2, 4])
        size = pick.choice([6, 9])
        x = draw.values(pick.choice([1, 3]), 4, *[size] * dimensions)
        weight = draw.values(*((4, 8 // groups) if turned else (8, 4 // groups)), *[3] * dimensions)
        bias = draw.values(8) if pick.random() < 0.5 else None
        stride, padding, dilation = pick.choice([1, 2]), pick.choice([0, 1]), pick.choice([1, 2])
        if turned:
            return [x, weight, bias, [stride], [padding], [0], groups, [dilation]], {}
        return [x, weight, bias, [stride], [padding], [dilation], groups], {}

    return make


def _pool(dimensions: int) -> Callable[[Drawn, str], Call]:
    return lambda draw, overload: ([draw.values(3, 4, *[8] * dimensions), [2] * dimensions], {})


def _attention(draw: Drawn, overload: str) -> Call:
    pick = draw._random
    time, width = pick.choice([(5, 8), (33, 16), (16, 64)])
    q, k, v = (draw.values(2, 2, time, width) for _ in range(3))
    mask = pick.choice([None, draw.values(time, time), draw.values(time, time) > 0])
    return [q, k, v, mask, 0.0, mask is None and pick.random() < 0.5], {}


def _batch_norm(draw: Drawn, overload: str) -> Call:
    x = draw.values(*draw._random.choice([(6, 4, 3), (3, 4, 8), (3, 4, 8, 8), (64, 4, 2)]))
    # No running statistics: drawn tensors want gradients, which no buffer does.
    return [x, draw.values(4), draw.values(4), None, None, True, 0.1, 1e-5, True], {}


def _weight_norm(draw: Drawn, overload: str) -> Call:
    return [draw.values(6, 8), draw.values(6, 1, positive=True), 0], {}


BY_HAND: dict[str, Callable[[Drawn, str], Call]] = {
    "lstm": _rnn(4, 2),
    "gru": _rnn(3, 1),
    "rnn_tanh": _rnn(1, 1),
    "rnn_relu": _rnn(1, 1),
    **{f"conv{n}d": _conv(n, False) for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": _conv(n, True) for n in (1, 2, 3)},
    **{f"{kind}_pool{n}d": _pool(n) for kind in ("max", "avg", "adaptive_avg", "adaptive_max") for n in (1, 2, 3)},
    "scaled_dot_product_attention": _attention,
    "_weight_norm": _weight_norm,
    "batch_norm": _batch_norm,
    "instance_norm": _batch_norm,
    "linear": lambda draw, overload: (
        [draw.values(*draw._random.choice([(4, 8), (3, 5, 8), (33, 8), (8,)])), draw.values(16, 8), draw.values(16)],
        {},
    ),
    "bilinear": lambda draw, overload: (
        [draw.values(4, 3), draw.values(4, 5), draw.values(7, 3, 5), draw.values(7)],
        {},
    ),
    "embedding": lambda draw, overload: ([draw.values(10, 8), draw.indices(10, 3, 5)], {}),
    "embedding_bag": lambda draw, overload: (
        [draw.values(10, 8), draw.indices(10, 12), torch.tensor([0, 4, 9]), False, draw._random.choice([0, 1, 2])]
        + ([False, None, False, None] if overload == "padding_idx" else []),
        {},
    ),
    "layer_norm": lambda draw, overload: ([draw.values(6, 33), [33], draw.values(33), draw.values(33)], {}),
    "rms_norm": lambda draw, overload: ([draw.values(6, 33), [33], draw.values(33)], {}),
    "native_layer_norm": lambda draw, overload: (
        [draw.values(6, 33), [33], draw.values(33), draw.values(33), 1e-5],
        {},
    ),
    "group_norm": lambda draw, overload: ([draw.values(3, 4, 8), 2, draw.values(4), draw.values(4)], {}),
    "native_group_norm": lambda draw, overload: (
        [draw.values(3, 4, 8), draw.values(4), draw.values(4), 3, 4, 8, 2, 1e-5],
        {},
    ),
}
