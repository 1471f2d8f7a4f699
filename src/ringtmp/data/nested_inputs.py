"""Inputs as people have them: a tensor, or tensors in tuples, lists and mappings with string keys, nested as they like.

Tensors are numbered in the order they come, a mapping's in the order of its keys. That order is part of a model once it is
exported, so it is written down as names ("input_ids", "extra.mask", "0") and every later batch is arranged by them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ringtmp.errors import UsageError


def leaves(inputs: Any) -> list[torch.Tensor]:
    """The tensors, in order."""
    return [leaf for _, leaf in _named(inputs, "")]


def names(inputs: Any) -> tuple[str, ...]:
    """Where each tensor lies, in the order of `leaves`; a tensor alone is called ""."""
    return tuple(name for name, _ in _named(inputs, ""))


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], inputs: Any) -> Any:
    """The same with every tensor replaced: mappings become dicts, lists become tuples."""
    if isinstance(inputs, torch.Tensor):
        return function(inputs)
    if isinstance(inputs, Mapping):
        return {key: map_tensors(function, item) for key, item in inputs.items()}
    return tuple(map_tensors(function, item) for item in inputs)


def arranged(inputs: Any, expected: Sequence[str], where: str) -> Any:
    """The inputs with the keys of mappings in the expected order. Refuses other keys, or another number of tensors."""
    given = names(inputs)
    if given == tuple(expected):
        return inputs
    if sorted(given) != sorted(expected):
        missing = [each for each in expected if each not in given]
        extra = [each for each in given if each not in expected]
        parts = [f"lacks {_quoted(missing)}"] if missing else []
        parts += [f"has {_quoted(extra)}"] if extra else []
        raise UsageError(f"{where} {' and '.join(parts)}: every batch must have {_quoted(expected)}")
    return _sorted(inputs, "", {name: place for place, name in enumerate(expected)})[1]


def _named(inputs: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(inputs, torch.Tensor):
        yield path, inputs
    elif isinstance(inputs, Mapping) and inputs:
        for key, item in inputs.items():
            if not isinstance(key, str):
                raise UsageError(f"the keys of inputs must be strings, not {key!r}")
            yield from _named(item, f"{path}.{key}".lstrip("."))
    elif isinstance(inputs, tuple | list) and inputs:
        for place, item in enumerate(inputs):
            yield from _named(item, f"{path}.{place}".lstrip("."))
    else:
        what = f"{path!r} is" if path else "they are"
        empty = "an empty " if isinstance(inputs, Mapping | tuple | list) else "a "
        raise UsageError(
            f"inputs must be tensors, or tuples or dicts of tensors, but {what} {empty}{type(inputs).__name__}"
        )


def _sorted(inputs: Any, path: str, places: Mapping[str, int]) -> tuple[int, Any]:
    """With the place of its first tensor."""
    if isinstance(inputs, torch.Tensor):
        return places[path], inputs
    if isinstance(inputs, Mapping):
        found = [(*_sorted(item, f"{path}.{key}".lstrip("."), places), key) for key, item in inputs.items()]
        found.sort(key=lambda each: each[0])
        return found[0][0], {key: item for _, item, key in found}
    parts = [_sorted(item, f"{path}.{place}".lstrip("."), places) for place, item in enumerate(inputs)]
    return min(place for place, _ in parts), tuple(item for _, item in parts)


def _quoted(found: Sequence[str]) -> str:
    return ", ".join(repr(each) if each else "one tensor" for each in found)
