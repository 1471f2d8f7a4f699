"""What a model returns, as flat tensors and the tree that puts them back: tuples, dicts, dataclasses, named tuples.

A tree names a class, and nothing is ever imported because data names it. Where the loss is the user's own, the class is
looked up among the modules this process has loaded; anywhere else, and where it is not found, an `Output` stands in for it.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ringtmp.errors import UsageError
from ringtmp.model.portable_layer import OutputTree

#: What may go from one layer to the next; objects are for the loss.
PLAIN = ("*", "tuple", "list", "dict")


class Output:
    """Stands in for an output whose class is not at hand: fields by attribute and by key; those not None also by position."""

    def __init__(self, kind: str, fields: Mapping[str, Any]) -> None:
        self._kind = kind
        self._fields = dict(fields)

    def __getattr__(self, name: str) -> Any:
        fields = vars(self).get("_fields", {})
        if name not in fields:
            raise AttributeError(f"{self} has no field {name!r}")
        return fields[name]

    def __getitem__(self, key: str | int | slice) -> Any:
        if isinstance(key, str):
            return self._fields[key]
        return tuple(each for each in self._fields.values() if each is not None)[key]

    def __contains__(self, name: object) -> bool:
        return name in self._fields

    def __repr__(self) -> str:
        return f"{self._kind.rpartition(':')[2] or 'Output'}({', '.join(self._fields)})"

    def fields(self) -> tuple[str, dict[str, Any]]:
        return self._kind, dict(self._fields)


def flattened(value: Any, label: str = "the model") -> tuple[OutputTree, list[torch.Tensor]]:
    """Refuses what is neither a tensor nor made of tensors, and says where it is."""
    found: list[torch.Tensor] = []
    return _flatten(value, label, "", found), found


def leaves_of(value: Any) -> list[torch.Tensor]:
    return flattened(value)[1]


def names_of(tree: OutputTree, path: str = "") -> list[str]:
    """Where each tensor lies, in order: "logits", "hidden.0"; a tensor alone is called ""."""
    if tree.kind == "*":
        return [path]
    keys = tree.names or tuple(map(str, range(len(tree.children))))
    parts = zip(keys, tree.children, strict=True)
    return [name for key, child in parts for name in names_of(child, f"{path}.{key}".lstrip("."))]


def named_tensors(value: Any) -> dict[str, torch.Tensor]:
    """What a model returns, by the names of `names_of`."""
    tree, tensors = flattened(value)
    return dict(zip(names_of(tree), tensors, strict=True))


def map_outputs(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    tree, tensors = flattened(value)
    return nest(tree, [function(each) for each in tensors], own=True)


def nest(tree: OutputTree, flat: Sequence[Any], own: bool = False) -> Any:
    """Flat tensors as the layer returned them. `own`: with the user's own classes, where this process has loaded them."""
    return _nest(tree, iter(flat), own)


def joined(outputs: Sequence[Any]) -> Any:
    """The outputs of several microbatches as if of one. What is one number per microbatch, such as a loss, becomes None."""
    trees, parts = zip(*(flattened(each) for each in outputs), strict=True)
    columns = list(zip(*parts, strict=True))
    if not any(column[0].dim() for column in columns):
        raise UsageError(f"the model returns {described(outputs[0])} per microbatch, so there is nothing to predict")
    return nest(trees[0], [torch.cat(column) if column[0].dim() else None for column in columns], own=True)


def is_plain(tree: OutputTree) -> bool:
    return tree.kind in PLAIN and all(is_plain(each) for each in tree.children)


def described(value: Any) -> str:
    """For an error: 'a tensor of shape 4x10', 'a GPT2Output with loss, logits'."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {'x'.join(map(str, value.shape))}" if value.dim() else "one number"
    parts = _fields(value)
    if parts is not None:
        kind, fields = parts
        name = kind.rpartition(":")[2].rpartition(".")[2] or "dict"
        return f"a {name} with {', '.join(key for key, each in fields.items() if each is not None) or 'nothing in it'}"
    return (
        f"a {type(value).__name__} of {len(value)}" if isinstance(value, tuple | list) else f"a {type(value).__name__}"
    )


def field_of(value: Any, name: str) -> Any:
    """A field of an object or an entry of a mapping; None if there is no such thing."""
    parts = _fields(value)
    return None if parts is None else parts[1].get(name)


def _fields(value: Any) -> tuple[str, dict[str, Any]] | None:
    """The class and the fields of what has names for its parts; a mapping's class is ""."""
    kind = f"{type(value).__module__}:{type(value).__qualname__}"
    if isinstance(value, Output):
        return value.fields()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # transformers' ModelOutput is a mapping too, and leaves out what is None
        given = value if isinstance(value, Mapping) else {each.name for each in dataclasses.fields(value)}
        return kind, {name: getattr(value, name) for name in (each.name for each in dataclasses.fields(value))
                      if name in given}  # fmt: skip
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind, dict(zip(value._fields, value, strict=True))
    return ("", dict(value)) if isinstance(value, Mapping) else None


def _flatten(value: Any, label: str, path: str, found: list[torch.Tensor]) -> OutputTree:
    if isinstance(value, torch.Tensor):
        found.append(value)
        return OutputTree("*")
    if value is None:
        if not path:
            raise UsageError(f"{label} returns None: return a tensor, or tensors in a tuple, dict or dataclass")
        return OutputTree("none")
    if (parts := _fields(value)) is not None:
        kind, fields = parts
        if not all(isinstance(key, str) for key in fields):
            raise UsageError(f"{label} returns a dict whose keys are not all strings{_at(path)}: use strings")
        children = tuple(_flatten(each, label, f"{path}.{key}", found) for key, each in fields.items())
        return OutputTree("object" if kind else "dict", children, tuple(fields), kind)
    if isinstance(value, tuple | list):
        children = tuple(_flatten(each, label, f"{path}.{place}", found) for place, each in enumerate(value))
        return OutputTree("list" if isinstance(value, list) else "tuple", children)
    hint = ", or return it as a tensor" if isinstance(value, bool | int | float) else ""
    if "Cache" in type(value).__name__:
        hint = " (use_cache=False)"
    raise UsageError(
        f"{label} returns a {type(value).__name__}{_at(path)}, which is neither a tensor nor made of tensors: "
        f"leave it out{hint}"
    )


def _at(path: str) -> str:
    return f" in {path.lstrip('.')!r}" if path else ""


def _nest(tree: OutputTree, rest: Iterator[Any], own: bool) -> Any:
    # Not a function within `nest`: one that calls itself would hold itself, and the tensors, until a garbage collection.
    if tree.kind == "*":
        return next(rest)
    if tree.kind == "none":
        return None
    parts = [_nest(child, rest, own) for child in tree.children]
    if tree.kind in ("dict", "object"):
        fields = dict(zip(tree.names, parts, strict=False))
        return fields if tree.kind == "dict" else _made(tree.cls, fields, own)
    return parts if tree.kind == "list" else tuple(parts)


def _made(kind: str, fields: dict[str, Any], own: bool) -> Any:
    found = _loaded_class(kind) if own else None
    if found is not None:
        taken = fields
        if dataclasses.is_dataclass(found):
            taken = {
                each.name: fields[each.name] for each in dataclasses.fields(found) if each.init and each.name in fields
            }
        try:
            return found(**taken)
        except Exception:  # the class is the user's: it may be made in another way
            return Output(kind, fields)
    return Output(kind, fields)


def _loaded_class(kind: str) -> Any:
    """The dataclass or named tuple of this name, if it is there already."""
    module, _, path = kind.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None  # not getattr, which may import
    if not isinstance(found, type):
        return None
    return (
        found if dataclasses.is_dataclass(found) or (issubclass(found, tuple) and hasattr(found, "_fields")) else None
    )
