"""A worker's program at work on the microbatches of a batch, forward and backward. Knows nothing of messages: where workers
have something to do together it says what, and is given the result.

    forward    for every piece: its operators, microbatch after microbatch;  for every exchange: one vector of them all
    backward   the same from the end, with gradients
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch

from ringtmp.model.run_graph import Program
from ringtmp.runtime.random_keys import seed_generator
from ringtmp.strategies.tensor.cut_tensors import Cut, joined, part
from ringtmp.strategies.tensor.local_program import Exchange, LocalProgram, Piece


@dataclass(frozen=True)
class Together:
    """What all workers do now: `add` their vectors up, or `tell` each other theirs."""

    what: Literal["add", "tell"]
    vector: torch.Tensor


#: None: a piece of work is done. A Together is answered with the total, or with every worker's vector in their order.
Work = Generator[Together | None, Any, Any]
#: Values by number.
Values = dict[int, Any]


class Compiled:
    """A local program, ready to run with what the worker owns."""

    def __init__(self, program: LocalProgram, owned: Mapping[str, torch.Tensor], rank: int, workers: int) -> None:
        self.program = program
        self.owned = owned
        self.rank = rank
        self.workers = workers
        self.pieces = {
            at: Program(each.graph) for at, each in enumerate(program.steps) if isinstance(each, Piece)
        }  # fmt: skip
        last: dict[int, int] = {}
        for at, each in enumerate(program.steps):
            for value in each.takes if isinstance(each, Piece) else (each.exchanged.source,):
                last[value] = at
        kept = set(program.outputs)
        self.done: dict[int, list[int]] = {}  # by step: values nobody needs after it
        for value, at in last.items():
            if value not in kept:
                self.done.setdefault(at, []).append(value)


@dataclass
class Pass:
    """All microbatches of a batch on their way through a program."""

    compiled: Compiled
    seed: int
    step: int
    training: bool
    values: list[Values]  # per microbatch
    gradients: list[Values] = field(default_factory=list)
    kept: dict[int, list[tuple[Values, list[Any]]]] = field(
        default_factory=dict
    )  # by piece: what entered and what left

    def forward(self) -> Work:
        for at, step in enumerate(self.compiled.program.steps):
            if isinstance(step, Piece):
                with torch.enable_grad() if self.training else torch.no_grad():
                    for number, values in enumerate(self.values):
                        self._run(at, step, number, values)
                yield None
            else:
                yield from self._exchange(step)
            for values in self.values:
                for value in self.compiled.done.get(at, ()):
                    values.pop(value, None)

    def _run(self, at: int, piece: Piece, number: int, values: Values) -> None:
        entered = {each: _leaf(values[each]) if self.training else values[each] for each in piece.takes}
        reseed = partial(seed_generator, self.seed, self.step, number, piece.random_before)
        given = self.compiled.pieces[at].run(list(entered.values()), self.compiled.owned, None, reseed)
        if self.training:
            self.kept.setdefault(at, []).append((entered, given))
        values.update(zip(piece.gives, given, strict=True))

    def _exchange(self, step: Exchange) -> Work:
        each = step.exchanged
        mine = [values[each.source] for values in self.values]
        wants = [tensor.requires_grad for tensor in mine]
        found = mine
        if each.kind == "sum":
            found = yield from self._added(mine)
        elif each.kind == "gather":
            found = yield from self._put_together(mine, each.cut)
        elif each.kind == "slice":
            found = [self._part(tensor, each.cut) for tensor in mine]
        for values, tensor, wanted in zip(self.values, found, wants, strict=True):
            values[step.gives] = tensor.detach().requires_grad_(wanted)

    def outputs(self, number: int) -> list[torch.Tensor]:
        return [self.values[number][value] for value in self.compiled.program.outputs]

    def backward(self, seeds: Sequence[Sequence[torch.Tensor | None]]) -> Work:
        """`seeds`: gradients of the outputs, per microbatch."""
        self.gradients = [{} for _ in self.values]
        for found, given in zip(self.gradients, seeds, strict=True):
            for value, gradient in zip(self.compiled.program.outputs, given, strict=True):
                _add(found, value, gradient)
        self.values = []
        for at, step in reversed(list(enumerate(self.compiled.program.steps))):
            if isinstance(step, Piece):
                for number, (entered, left) in enumerate(self.kept.pop(at)):
                    self._back(step, entered, left, self.gradients[number])
                yield None
            else:
                yield from self._exchange_back(step)

    def _back(self, piece: Piece, entered: Values, left: Sequence[Any], found: Values) -> None:
        roots, seeds = [], []
        for value, output in zip(piece.gives, left, strict=True):
            gradient = found.pop(value, None)
            if gradient is not None and isinstance(output, torch.Tensor) and output.requires_grad:
                roots.append(output)
                seeds.append(gradient)
        if roots:
            torch.autograd.backward(roots, seeds)
        for value, tensor in entered.items():
            if isinstance(tensor, torch.Tensor):
                _add(found, value, tensor.grad)

    def _exchange_back(self, step: Exchange) -> Work:
        each = step.exchanged
        mine = [found.pop(step.gives, None) for found in self.gradients]
        if any(gradient is None for gradient in mine):  # of all or of none: workers run the same program
            return
        found = mine
        if each.kind == "copy":
            found = yield from self._added(mine)
        elif each.kind == "gather":
            found = [self._part(gradient, each.cut) for gradient in mine]
        elif each.kind == "slice":
            found = yield from self._put_together(mine, each.cut)
        for gradients, gradient in zip(self.gradients, found, strict=True):
            _add(gradients, each.source, gradient)

    # -- together ---------------------------------------------------------------------------------------------------------

    def _added(self, mine: Sequence[torch.Tensor]) -> Generator[Together, Any, list[torch.Tensor]]:
        total = yield Together("add", _flat(mine))
        return _like(total, mine)

    def _put_together(
        self, mine: Sequence[torch.Tensor], cut: Cut | None
    ) -> Generator[Together, Any, list[torch.Tensor]]:  # fmt: skip
        assert cut is not None
        told = yield Together("tell", _flat(mine))
        by_worker = [_like(each, mine) for each in told]
        return [joined(parts, cut) for parts in zip(*by_worker, strict=True)]

    def _part(self, tensor: torch.Tensor, cut: Cut | None) -> torch.Tensor:
        assert cut is not None
        return part(tensor, cut, self.compiled.rank, self.compiled.workers)


def _leaf(value: Any) -> Any:
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def _add(found: Values, value: int, gradient: torch.Tensor | None) -> None:
    if gradient is not None:
        found[value] = gradient if value not in found else found[value] + gradient


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([each.detach().reshape(-1) for each in tensors])


def _like(vector: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Freshly laid out: received vectors and slices of them start anywhere."""
    parts = torch.split(vector, [each.numel() for each in tensors])
    return [each.clone().view(tensor.shape) for each, tensor in zip(parts, tensors, strict=True)]
