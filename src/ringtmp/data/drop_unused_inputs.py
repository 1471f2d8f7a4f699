"""Inputs that are left out by asking, because they say nothing: every value of them is one.

A mask of ones makes a model look at its values to choose a path, or take a slower one. Whoever asks for it to be left out
is believed only after every value was looked at: of a table before training, of a stream batch by batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ringtmp.data.nested_inputs import leaves
from ringtmp.data.tables_and_streams import Source, Stream, Table, shape_of
from ringtmp.errors import UsageError

#: Samples of a table that are looked at together.
_AT_ONCE = 1024


def names_of(given: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in (given or "").split(",") if name.strip())


def leave_out(source: Source, names: Sequence[str], needed: bool = True) -> Source:
    """The data without these inputs. Refuses a value that is not one, and a name that is not there; unless it is `needed`:
    other data of the same run may come without."""
    if names and not needed:
        first = source.example(1)[0]
        names = [name for name in names if isinstance(first, Mapping) and name in first]
    if not names:
        return source
    if isinstance(source, Stream):
        source.change_inputs(lambda inputs: without(source.name, inputs, names))
        return source
    return _table(source, names)


def _table(whole: Table, names: Sequence[str]) -> Table:
    for first in range(0, whole.size, _AT_ONCE):
        inputs, _ = whole.drawn(torch.arange(first, min(first + _AT_ONCE, whole.size)), "left out")
        without(whole.name, inputs, names, first)

    def take(index: torch.Tensor) -> tuple[Any, torch.Tensor]:
        inputs, targets = whole.take(index)
        return without(whole.name, inputs, names), targets

    made = replace(whole, take=take)
    return replace(made, shape=replace(shape_of(made.example(1)[0]), outputs=whole.shape.outputs))


def without(source: str, inputs: Any, names: Sequence[str], first: int = 0) -> dict[str, Any]:
    """`first`: the number of the first sample, if the samples have numbers."""
    if not isinstance(inputs, Mapping):
        raise UsageError(f"--leave-out {','.join(names)!r}: the inputs of {source} have no names; give dicts")
    for name in names:
        if name not in inputs:
            raise UsageError(f"--leave-out {name!r}: data {source} has {', '.join(map(repr, inputs))}")
        for leaf in leaves(inputs[name]):
            other = (leaf != 1).flatten(1).any(1) if leaf.dim() > 1 else (leaf != 1).reshape(-1)
            if bool(other.any()):
                raise UsageError(
                    f"--leave-out {name!r}: not all of its values are ones (sample {first + int(other.nonzero()[0][0])} of "
                    f"{source}), so it cannot be left out"
                )
    rest = {key: item for key, item in inputs.items() if key not in names}
    if not rest:
        raise UsageError(f"--leave-out {','.join(names)!r} would leave {source} without inputs")
    return rest
