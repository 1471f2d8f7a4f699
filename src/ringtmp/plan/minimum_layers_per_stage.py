"""How many layers a route needs at least, and why so many. Pure.

Every visit has a layer. The master's front reaches to the first layer with parameters, so that no raw input leaves it, and
its tail back to the last, so that no label does. A tied weight belongs to the first layer that uses it: a head that uses
the weight of the embedding has none of its own, and the tail takes the layer before it, too.

    layers with parameters   x x x x .       3 nodes: front 1, workers 1 + 1, tail 2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ringtmp.errors import UsageError


@dataclass(frozen=True)
class Ends:
    """The fewest layers of the front and of the tail."""

    front: int
    tail: int

    @staticmethod
    def of(has_parameters: Sequence[bool]) -> Ends:
        return Ends(_up_to_first(has_parameters), _up_to_first(has_parameters[::-1]))

    def needed(self, visits: int) -> int:
        return self.front + self.tail + visits - 2 if visits > 1 else 1

    def nodes(self, layers: int) -> int:
        """The most that a plain ring of so many layers can have."""
        return max(1, layers - self.front - self.tail + 1)

    @property
    def why(self) -> str:
        """What makes it more than a layer per visit, to go on with behind "at least N layers"; mostly nothing does."""
        ends = (("front", "first", self.front), ("tail", "last", self.tail))
        parts = [
            f"the {name} takes {count}, because {_without(end, count - 1)}" for name, end, count in ends if count > 1
        ]
        tied = " (a tied weight belongs to the first layer that uses it)" if self.tail > 1 else ""
        return "".join(f"; {part}" for part in parts) + tied


def too_few_layers(ends: Ends, nodes: int, layers: int, instead: str) -> UsageError:
    """For a plain ring. `instead` begins with what ends the sentence."""
    return UsageError(
        f"{nodes} nodes need at least {ends.needed(nodes + 1)} layers (the master's front and tail and one per worker"
        f"{ends.why}); the model has {layers}{instead}"
    )


def too_few_for_route(ends: Ends, visits: int, layers: int, instead: str) -> UsageError:
    return UsageError(
        f"a route of {visits} visits needs at least {ends.needed(visits)} layers{ends.why}; the model has {layers}{instead}"
    )


def _without(end: str, count: int) -> str:
    return (
        f"the {end} has no parameters of its own"
        if count == 1
        else f"the {end} {count} have no parameters of their own"
    )


def _up_to_first(has_parameters: Sequence[bool]) -> int:
    return next((index + 1 for index, has in enumerate(has_parameters) if has), len(has_parameters))
