"""Calls of listed operators, made up from their schemas: sane ones first, then bent by odd shapes, dtypes, strides, values.

`call(target, number)` is the same call in every process. It is data: what crashed a process can be printed and made again.
What a schema does not say (that a matrix product needs a common width) stands in `operator_recipes.py`.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ringtmp.model.allowed_operators import resolve

FLOATS = ["float32"] * 8 + ["float64"] * 3 + ["bfloat16", "float16"]
DTYPES = [
    "float32", "float64", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64",
    "complex128", "uint16", "uint64", "float8_e4m3fn",
]  # fmt: skip
LAYOUTS = ["plain"] * 6 + ["transposed", "expanded", "step", "offset", "last"]
WORDS = {
    "approximate": ["none", "tanh"],
    "reduce": ["add", "multiply"],
    "mode": ["constant", "reflect", "replicate", "circular"],
    "rounding_mode": ["floor", "trunc"],
}
ODD_INTS = [-1, 0, 1, 2, 3, 5, 7, -2, -3, 100, 2**31 - 1, 2**31, -(2**31), 2**32 + 1, 2**62, 2**63 - 1, -(2**63)]
ODD_FLOATS = [0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 1e38, -1e308, float("inf"), float("-inf"), float("nan"), 2.0**63]
ODD_INDICES = [-1, -2, 2**31 - 1, 2**31, -(2**31), 2**40, -(2**40), 2**62, -(2**63), 2**63 - 1]


@dataclass(frozen=True)
class T:
    """A tensor to be made. `fill`: normal, positive, unit, zero, odd, bool, huge, steps, "<N" for indices below N, "=N"."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    fill: str = "normal"
    layout: str = "plain"


@dataclass(frozen=True)
class Kind:
    """A torch constant by kind and name, as a graph has it."""

    kind: str
    name: str


@dataclass(frozen=True)
class Call:
    target: str
    number: int
    arguments: dict[str, Any]  # by name, in the schema's order
    gradients: bool
    tamper: bool  # integers are overwritten between forward and backward
    owned: bool  # tensors are parameters, and weight gradients wait


class Draw:
    """One call's random choices."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)
        self.base = tuple(self.random.choice([1, 2, 3, 4, 5, 8]) for _ in range(self.random.choice([1, 2, 2, 3, 3, 4])))
        self.dtype = self.random.choice(FLOATS)

    def size(self) -> int:
        return self.random.choice([1, 2, 3, 4, 5, 8, 16])

    def one(self, choices: Sequence[Any]) -> Any:
        return self.random.choice(choices)

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def tensor(self, *shape: int, fill: str = "normal", dtype: str | None = None) -> T:
        return T(shape, dtype or self.dtype, fill, self.one(LAYOUTS))

    def indices(self, *shape: int, below: int) -> T:
        return T(shape, self.one(["int64", "int64", "int64", "int32"]), f"<{below}", self.one(LAYOUTS))

    def dim(self, shape: Sequence[int]) -> int:
        return self.random.randrange(-len(shape), len(shape)) if shape else 0


def call(target: str, number: int) -> Call:
    from operator_recipes import RECIPES

    draw = Draw(f"{target} {number}")
    schema = resolve(target)._schema  # type: ignore[attr-defined]
    _, name, overload = target.split(".")
    plain = name if name.startswith("__") else name.rstrip("_")  # which an operator in place has at its end
    recipe = RECIPES.get(f"{plain}.{overload}") or RECIPES.get(plain)
    given: dict[str, Any] = recipe(draw) if recipe is not None else {}
    arguments: dict[str, Any] = {}
    for each in schema.arguments:
        if each.name in given and _is_a(given[each.name], str(each.real_type)):
            arguments[each.name] = given[each.name]
        elif each.has_default_value() and draw.chance(0.5 if recipe is None else 0.8):
            continue
        else:
            arguments[each.name] = _made(draw, each.name, str(each.real_type), each.N)
    for _ in range(draw.one([0, 0, 0, 1, 1, 2, 3])):
        name = draw.one(sorted(arguments)) if arguments else None
        if name is not None:
            arguments[name] = bend(draw, arguments[name])
    return Call(target, number, arguments, draw.chance(0.8), draw.chance(0.15), draw.chance(0.3))


def _is_a(value: Any, kind: str) -> bool:
    """Overloads of one operator share a recipe and differ in types."""
    kind = kind.removeprefix("Optional[")
    return value is None or (
        isinstance(value, T) == kind.startswith("Tensor") and isinstance(value, list) == kind.startswith("List")
    )


def _made(draw: Draw, name: str, kind: str, count: int | None) -> Any:
    """An argument from its name and type alone."""
    if kind.startswith("Optional["):
        return None if draw.chance(0.4) else _made(draw, name, kind[9:-1], count)
    if kind == "Tensor":
        if name in ("index", "indices", "batch_sizes", "repeats"):
            return draw.indices(*draw.base[:1], below=min(draw.base))
        if name == "mask" or name == "condition":
            return draw.tensor(*draw.base, fill="bool", dtype="bool")
        shape = draw.base if draw.chance(0.8) else tuple(draw.one([1, each]) for each in draw.base)
        return draw.tensor(*shape, fill=draw.one(["normal", "normal", "positive", "unit", "zero"]))
    if kind in ("List[Tensor]", "List[Optional[Tensor]]"):
        return [draw.tensor(*draw.base) for _ in range(draw.one([1, 2, 3]))]
    if kind == "int":
        if "dim" in name or name.startswith("axis") or name in ("source", "destination"):
            return draw.dim(draw.base)
        return draw.one([0, 1, 1, 2, 3])
    if kind == "List[int]":
        if "dim" in name or name in ("source", "destination"):
            return [draw.dim(draw.base)]
        return [draw.size() for _ in range(count or draw.one([0, 1, 2, 3]))]
    if kind == "bool":
        return draw.chance(0.5) if name != "pin_memory" else False
    if kind in ("float", "number"):
        return draw.one([0.5, 0.1, 1.0, 2.0, 0.0, 2, 1, -1])
    if kind == "List[float]":
        return [draw.one([0.5, 1.0, 2.0, 1.7]) for _ in range(draw.one([1, 2]))]
    if kind == "ScalarType":
        return Kind("dtype", draw.one(DTYPES))
    if kind == "Layout":
        return Kind("layout", "strided")
    if kind == "MemoryFormat":
        return Kind("memory_format", draw.one(["contiguous_format", "preserve_format", "channels_last"]))
    if kind == "Device":
        return Kind("device", "node")
    if kind == "str":
        return draw.one(WORDS.get(name, ["", "a"]))
    return None  # a generator


def bend(draw: Draw, value: Any) -> Any:
    """The argument, a little or a lot wrong."""
    if isinstance(value, T):
        return _bend_tensor(draw, value)
    if isinstance(value, list):
        items = list(value)
        what = draw.one(["item", "item", "more", "fewer", "none"])
        if what == "item" and items:
            at = draw.random.randrange(len(items))
            items[at] = bend(draw, items[at])
        elif what == "more":
            items.append(items[-1] if items else 1)
        elif items and what == "fewer":
            items.pop()
        elif items and isinstance(items[0], T):
            items[0] = _bend_tensor(draw, items[0])
        return items
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return draw.one(ODD_INTS)
    if isinstance(value, float):
        return draw.one(ODD_FLOATS)
    if isinstance(value, Kind) and value.kind == "dtype":
        return Kind("dtype", draw.one(DTYPES))
    if value is None:
        return draw.one([None, 0, 1, 2, draw.tensor(*draw.base)])
    return value


def _bend_tensor(draw: Draw, value: T) -> T:
    what = draw.one(["size", "size", "rank", "dtype", "layout", "fill", "fill", "empty", "swap", "grow", "deep"])
    shape = list(value.shape)
    if what == "dtype":
        return dataclasses.replace(value, dtype=draw.one(DTYPES))
    if what == "layout":
        return dataclasses.replace(value, layout=draw.one(LAYOUTS))
    if what == "fill":
        if value.fill.startswith("<"):
            return dataclasses.replace(value, fill=draw.one(["odd index", "odd index", "odd"]))
        return dataclasses.replace(value, fill=draw.one(["zero", "odd", "huge"]))
    at = draw.random.randrange(len(shape)) if shape else None
    if what == "deep":
        shape = [1] * draw.one([20, 64, 70]) + shape
    elif what == "rank":
        if at is not None and draw.chance(0.5):
            shape.pop(at)
        else:
            shape.insert(0, draw.one([1, 2]))
    elif at is not None:
        if what == "swap":
            shape.reverse()
        else:
            change = {"size": draw.one([-1, 1]), "empty": -shape[at], "grow": draw.one([10, 100, 1000])}[what]
            shape[at] = max(0, shape[at] + change)
    return dataclasses.replace(value, shape=tuple(shape))


def strides(value: T) -> list[int]:
    """Of the layout wished for, as far as the shape allows it."""
    order = list(range(len(value.shape)))
    if value.layout == "transposed":
        order = order[::-1]
    elif value.layout == "last" and len(order) > 2:
        order = [0, *order[2:], 1]
    found, step = [0] * len(order), 2 if value.layout == "step" else 1
    for at in reversed(order):
        found[at] = step
        step *= max(1, value.shape[at])
    if value.layout == "expanded" and found:
        found[0] = 0
    return found


def values(value: T, count: int, generator: torch.Generator) -> torch.Tensor:
    """So many elements of memory, filled as wished."""
    dtype = getattr(torch, value.dtype)
    if value.fill == "bool":
        return torch.randint(0, 2, (count,), generator=generator).to(dtype)
    if value.fill.startswith("="):
        return torch.full((count,), int(value.fill[1:])).to(dtype)
    if value.fill == "steps":
        return torch.arange(count).to(dtype)
    if value.fill.startswith("<"):
        return torch.randint(0, max(1, int(value.fill[1:])), (count,), generator=generator).to(dtype)
    made = torch.randn(count, generator=generator)
    if value.fill == "positive":
        made = made.abs() + 0.1
    elif value.fill == "unit":
        made = torch.rand(count, generator=generator)
    elif value.fill == "zero":
        made = torch.zeros(count)
    elif value.fill == "huge":
        made = made * 1e30
    elif value.fill in ("odd", "odd index") and count:
        odd = ODD_FLOATS if dtype.is_floating_point or dtype.is_complex else ODD_INDICES
        picks = torch.randint(0, len(odd), (count,), generator=generator).tolist()
        if dtype.is_floating_point or dtype.is_complex:
            return torch.tensor([odd[pick] for pick in picks], dtype=torch.float64).to(dtype)
        whole = torch.tensor([odd[pick] for pick in picks], dtype=torch.int64)
        return torch.where(torch.rand(count, generator=generator) < 0.5, whole, torch.zeros_like(whole)).to(dtype)
    return (made * 3).to(dtype) if not dtype.is_floating_point else made.to(dtype)
