"""Which operations of a graph draw random numbers, as far as the graph can tell: they are numbered, and each is seeded.

Torch tags the operators that may draw. Some draw only if their arguments say so: dropout in training with a probability
between 0 and 1, a recurrent network with dropout between its layers. What depends on the values that arrive counts as
drawing (`rrelu` draws for what is not positive, nothing is drawn for a tensor without elements), so that the number of an
operation is the same for every microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from ringtmp.model.allowed_operators import resolve
from ringtmp.model.portable_layer import CUSTOM, Custom, Graph, Op


def random_count(graph: Graph) -> int:
    """How many numbers the graph's random operations take."""
    return sum(draws(op, graph.customs) for op in graph.ops)


def draws(op: Op, customs: Sequence[Custom] = ()) -> int:
    """How many numbers an operation takes: 1 if it draws, 0 if not; of a custom function, those of its forward graph and
    then those of its backward graph."""
    if op.target != CUSTOM:
        return int(_draws(op))
    number = op.args[0] if op.args else None
    if type(number) is not int or not 0 <= number < len(customs):
        return 0  # the program refuses it
    return random_count(customs[number].forward) + random_count(customs[number].backward)


def _draws(op: Op) -> bool:
    defaults = _seeded(op.target)
    if defaults is None:
        return False
    given = {**defaults, **dict(zip(defaults, op.args, strict=False)), **op.kwargs}
    if given.get("train", given.get("training", True)) is False:
        return False
    if "num_layers" in given:  # of an LSTM, a GRU or another recurrent network: dropout lies between its layers
        return given["num_layers"] != 1 and _between(given["dropout"])
    if "dropout_p" in given:
        return _between(given["dropout_p"])
    return "dropout" not in op.target or _between(given["p"])


def _between(probability: Any) -> bool:
    """Everything is kept with probability 0 and dropped with 1: nothing to draw. A computed one may be anything."""
    return not isinstance(probability, int | float) or 0 < probability < 1


@cache
def _seeded(target: str) -> dict[str, Any] | None:
    """The arguments of an operator that may draw, in order, with their defaults; None: it never draws."""
    function: Any = resolve(target)
    if torch.Tag.nondeterministic_seeded not in getattr(function, "tags", ()):
        return None
    return {each.name: each.default_value if each.has_default_value() else None for each in function._schema.arguments}
