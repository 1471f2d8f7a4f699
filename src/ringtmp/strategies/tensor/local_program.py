"""One worker's share of a model: graphs of its own operators, and between them what it exchanges with the others. Pure.

    copy     x -> x        gradients of all workers are added up on the way back (f of Megatron-LM)
    sum      x_k -> sum    the total of all workers; the gradient comes back as it is (g of Megatron-LM)
    gather   x_k -> x      the parts of all workers put together; the gradient comes back in parts
    slice    x -> x_k      this worker's part; the parts of the gradient are put together

A value is whole, with the same bits on every worker and a gradient that is the same there, or it is cut, and every worker has
its part of it and of its gradient. Values are numbered: what enters and what the worker owns first, then one for every
operator or exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from ringtmp.model.portable_layer import Argument, Graph, Input, Items, Op, Ref, slots
from ringtmp.model.random_operators import draws
from ringtmp.strategies.tensor.cut_tensors import Cut


@dataclass(frozen=True)
class Exchanged:
    kind: Literal["copy", "sum", "gather", "slice"]
    source: int
    cut: Cut | None = None
    values: int = 0  # of the whole value, for the samples that the cutting was tried with
    back: bool = True  # whether a gradient comes back

    def sent(self, workers: int, training: bool) -> int:
        """Values that all workers together send for it."""
        added, put_together = 2 * (workers - 1) * self.values, (workers - 1) * self.values
        there = {"sum": added, "gather": put_together}.get(self.kind, 0)
        return there + ({"copy": added, "slice": put_together}.get(self.kind, 0) if training and self.back else 0)


@dataclass(frozen=True)
class Piece:
    """Operators between two exchanges, as a graph that takes and gives numbered values."""

    graph: Graph
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    random_before: int


@dataclass(frozen=True)
class Exchange:
    exchanged: Exchanged
    gives: int


@dataclass(frozen=True)
class LocalProgram:
    steps: tuple[Piece | Exchange, ...]
    outputs: tuple[int, ...]
    inputs: int  # values 0 to inputs - 1 enter

    def sent(self, workers: int, training: bool) -> int:
        return sum(each.exchanged.sent(workers, training) for each in self.steps if isinstance(each, Exchange))


@dataclass
class Writer:
    """Operators and exchanges in order, as they are found."""

    inputs: tuple[Input, ...]
    items: list[Op | Exchanged] = field(default_factory=list)

    def op(self, target: str, *args: Argument, **kwargs: Argument) -> Ref:
        return self.add(Op(target, args, kwargs))

    def add(self, item: Op | Exchanged) -> Ref:
        self.items.append(item)
        return Ref(len(self.inputs) + len(self.items) - 1)

    def program(self, outputs: Sequence[int]) -> LocalProgram:
        first = len(self.inputs)
        last = {slot: first + len(self.items) for slot in outputs}  # by value: its last user
        for slot, item in reversed(list(enumerate(self.items, first))):
            for used in _taken(item):
                last.setdefault(used, slot)
        steps: list[Piece | Exchange] = []
        run: list[tuple[int, Op]] = []
        drawn = 0
        for slot, item in enumerate(self.items, first):
            if isinstance(item, Op):
                run.append((slot, item))
                continue
            drawn += self._close(steps, run, last, drawn)
            run = []
            steps.append(Exchange(item, slot))
        self._close(steps, run, last, drawn)
        entering = sum(each.kind == "input" for each in self.inputs)
        return LocalProgram(tuple(steps), tuple(outputs), entering)

    def _close(self, steps: list[Piece | Exchange], run: list[tuple[int, Op]], last: dict[int, int], drawn: int) -> int:
        """The operators so far become a piece. How many random numbers they take."""
        if not run:
            return 0
        here = {slot for slot, _ in run}
        used = dict.fromkeys(each for _, op in run for each in _taken(op) if each not in here)
        takes = tuple(each for each in used if not self._owned(each))
        owned = [each for each in used if self._owned(each)]
        inputs = [Input("input", str(each)) for each in takes] + [self.inputs[each] for each in owned]
        place = {each: at for at, each in enumerate((*takes, *owned, *here_in_order(run)))}
        ops = tuple(
            Op(op.target, tuple(_moved(each, place) for each in op.args),
               {name: _moved(each, place) for name, each in op.kwargs.items()})
            for _, op in run
        )  # fmt: skip
        gives = tuple(slot for slot, _ in run if last.get(slot, slot) > run[-1][0])
        graph = Graph(tuple(inputs), ops, tuple(Ref(place[each]) for each in gives), False)
        steps.append(Piece(graph, takes, gives, drawn))
        return sum(draws(op) for op in ops)

    def _owned(self, slot: int) -> bool:
        return slot < len(self.inputs) and self.inputs[slot].kind != "input"


def here_in_order(run: Sequence[tuple[int, Op]]) -> list[int]:
    return [slot for slot, _ in run]


def _taken(item: Op | Exchanged) -> list[int]:
    if isinstance(item, Exchanged):
        return [item.source]
    return [slot for value in (*item.args, *item.kwargs.values()) for slot in slots(value)]


def _moved(value: Argument, place: dict[int, int]) -> Argument:
    if isinstance(value, Ref):
        return Ref(place[value.slot])
    if isinstance(value, Items):
        return Items(tuple(_moved(each, place) for each in value.values))
    return value
