"""Plain values that a forward pass might count with: those a module keeps, or that its class, its objects or its globals do.

Not found: what a function called by `forward` keeps to itself, an object inside an object, a file, another process.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import nn


def plain_state(module: nn.Module) -> dict[str, object]:
    """By what an error calls them; of those that are not plain throughout, only that they are there."""
    found: dict[str, object] = {}
    seen: set[int] = set()  # a config is held by every part of a model
    for path, each in module.named_modules():
        prefix = f"its attribute {path}.".replace(" .", " ")
        found |= _values(prefix, vars(each))
        for name, held in vars(each).items():
            if _has_attributes(held) and id(held) not in seen:
                seen.add(id(held))
                found |= _values(f"{prefix}{name}.", vars(held))
        for cls in type(each).__mro__:
            if id(cls) not in seen and not _is_of_torch(cls):
                seen.add(id(cls))
                found |= _values(f"the class attribute {cls.__name__}.", vars(cls))
                found |= _values("the global variable ", dict(_globals_in_forward(cls)))
    return found


def _values(prefix: str, attributes: Mapping[str, object]) -> dict[str, object]:
    return {
        prefix + name: repr(value) if _is_plain(value) else None
        for name, value in attributes.items()
        if isinstance(value, bool | int | float | str)
        or (isinstance(value, list | tuple | dict) and not name.startswith("_"))
    }


def _has_attributes(value: object) -> bool:
    other = isinstance(value, nn.Module | torch.Tensor | type | ModuleType)
    return not other and isinstance(getattr(value, "__dict__", None), dict)


def _is_of_torch(cls: type) -> bool:
    return cls is object or cls.__module__.partition(".")[0] == "torch"


def _globals_in_forward(cls: type) -> Iterator[tuple[str, object]]:
    """Those that the class's own forward names."""
    own: Any = vars(cls).get("forward")
    forward = inspect.unwrap(own) if callable(own) else None
    if inspect.isfunction(forward):
        known = forward.__globals__
        yield from ((name, known[name]) for name in forward.__code__.co_names if name in known)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(each) for each in value.values())
    if isinstance(value, list | tuple):
        return all(_is_plain(each) for each in value)
    return value is None or isinstance(value, bool | int | float | str)
