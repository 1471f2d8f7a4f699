"""What a whole model's graph is made of, as far as cutting it is concerned. Pure: a graph and facts about its slots in.

Every slot is one of these:

    crossing   a tensor that must travel when it is made before a cut and used behind it
    again      depends on shapes, constants and buffers nobody writes: made again wherever it is used (masks, positions)
    size       a whole number that follows from the shape of a tensor: read off a tensor that is there anyway
    many       several values in one (what `split` gives), of which only the parts can travel
    own        a parameter, buffer or constant of the model

A change in place makes no new tensor: its result is the same object as the one it changed, under the number of that one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ringtmp.model.allowed_operators import GRAD_MODE, SIZE_FUNCTIONS, resolve
from ringtmp.model.memory_aliases import Memory, aliases
from ringtmp.model.portable_layer import CUSTOM, Graph, Op, slots
from ringtmp.model.random_operators import draws

#: Operators that may hand back the very tensor they were given.
_MAYBE_SAME = ("contiguous", "to", "type_as", "positive", "expand_as")
#: Asks for a tensor's size in one dimension.
SIZE = "aten.sym_size.int"
_SHAPES = frozenset([SIZE, "aten.sym_numel.default", "aten.sym_stride.int"])


@dataclass(frozen=True)
class Fact:
    """What is known about a slot. `shape` has a symbol wherever a size depends on the number of samples, and is None for
    what is not a tensor. `path`: the module whose forward made it."""

    shape: tuple[int | str, ...] | None
    dtype: str = ""
    many: bool = False
    path: str = ""
    sample_bytes: float = 0.0  # for one sample

    @property
    def is_tensor(self) -> bool:
        return self.shape is not None

    def of_samples(self, tensor: torch.Tensor, wanted: int, there: int) -> torch.Tensor:
        """The part of such a tensor that `wanted` of the samples `there` would give."""
        for dim, size in enumerate(self.shape or ()):
            if isinstance(size, str):
                tensor = tensor.narrow(dim, 0, tensor.shape[dim] * wanted // there)
        return tensor


def reads(op: Op) -> list[int]:
    return [slot for value in (*op.args, *op.kwargs.values()) for slot in slots(value)]


class Anatomy:
    """One graph, analysed once."""

    def __init__(self, graph: Graph, facts: Sequence[Fact], fixed: Iterable[str] = ()) -> None:
        """`fixed`: names of the model's own tensors that no gradient and no operator changes, in either mode."""
        self.graph, self.facts = graph, facts
        self.start = len(graph.inputs)
        self._fixed = frozenset(fixed)
        memory = Memory(graph)
        self.groups = [
            memory.group(slot) for slot in range(self.start + len(graph.ops))
        ]  # of slots that may share memory
        self.same = self._same_objects()
        self.reads = [[self.same[slot] for slot in reads(op)] for op in graph.ops]
        self.writes = [[self.same[slot] for slot in aliases(op)[1]] for op in graph.ops]
        self.outputs = [self.same[slot] for value in graph.outputs for slot in slots(value)]
        self.sizes = self._sizes()
        self.again = self._made_again()

    def position(self, slot: int) -> int:
        """The index of the operation that makes it; -1 if it enters the graph."""
        return slot - self.start if slot >= self.start else -1

    def is_own(self, slot: int) -> bool:
        return slot < self.start and self.graph.inputs[slot].kind != "input"

    def travels(self, slot: int) -> bool:
        """Whether it must be handed over at a cut between its making and its use."""
        return not (self.is_own(slot) or slot in self.sizes or slot in self.again)

    def facts_of(self, slots: Iterable[int]) -> tuple[Fact, ...]:
        return tuple(self.facts[slot] for slot in slots)

    def size_asked(self, at: int) -> int | str:
        """The size that an operation asks for: a number, or a symbol."""
        op, shape = self.graph.ops[at], self.facts[self.reads[at][0]].shape
        dim = op.args[1]
        assert isinstance(dim, int)
        assert shape is not None
        return shape[dim]

    def tells(self, slot: int, size: int | str) -> tuple[int, int, int] | None:
        """How a size is read off a tensor: the tensor, which of its sizes, and by what that is divided; None if it does not
        tell."""
        shape = self.facts[slot].shape or ()
        if size in shape:
            return slot, shape.index(size), 1
        for dim, each in enumerate(shape):
            multiple = re.fullmatch(rf"(\d+)\*{re.escape(str(size))}", str(each))
            if multiple is not None and int(multiple[1]) > 0:
                return slot, dim, int(multiple[1])
        return None

    @cached_property
    def last_use(self) -> dict[int, int]:
        """The last operation that reads a slot; one past the last operation for what leaves the model."""
        found: dict[int, int] = {}
        for at, each in enumerate(self.reads):
            for slot in each:
                found[slot] = at
        return found | dict.fromkeys(self.outputs, len(self.graph.ops))

    @cached_property
    def changes(self) -> dict[int, list[int]]:
        """By group of memory, the operations that write into it."""
        found: dict[int, list[int]] = {}
        for at, each in enumerate(self.writes):
            for group in {self.groups[slot] for slot in each}:
                found.setdefault(group, []).append(at)
        return found

    @cached_property
    def crossings(self) -> list[set[int]]:
        """For every place, the slots that must be handed over there."""
        count = len(self.graph.ops)
        found: list[set[int]] = [set() for _ in range(count + 1)]
        for slot, last in self.last_use.items():
            if self.travels(slot) and self.facts[slot].is_tensor:
                for place in range(self.position(slot) + 1, min(last, count) + 1):
                    found[place].add(slot)
        return found

    @cached_property
    def written(self) -> frozenset[str]:
        """Names of the model's own tensors that a run writes into."""
        return frozenset(
            each.name
            for slot, each in enumerate(self.graph.inputs)
            if each.kind != "input" and self.groups[slot] in self.changes
        )

    @cached_property
    def open_modes(self) -> list[tuple[int, ...]]:
        """For each operation, the slots that opened the no-gradient blocks it lies in."""
        found: list[tuple[int, ...]] = []
        stack: tuple[int, ...] = ()
        for at, op in enumerate(self.graph.ops):
            found.append(stack)
            if op.target == GRAD_MODE:
                stack = stack[:-1] if reads(op) else (*stack, self.start + at)
        return [*found, stack]

    def _same_objects(self) -> list[int]:
        same = list(range(self.start))
        for at, op in enumerate(self.graph.ops):
            first = slots(op.args[0]) if op.args else []
            target: Any = None if op.target in (CUSTOM, GRAD_MODE, "getitem") else resolve(op.target)
            schema = getattr(target, "_schema", None)
            alias = schema.returns[0].alias_info if schema is not None and len(schema.returns) == 1 else None
            in_place = alias is not None and alias.is_write and len(first) == 1
            same.append(same[first[0]] if in_place else self.start + at)
        return same

    def _sizes(self) -> frozenset[int]:
        """Whole numbers that follow from shapes."""
        found: set[int] = set()
        for at, op in enumerate(self.graph.ops):
            slot, fact = self.start + at, self.facts[self.start + at]
            if fact.is_tensor or fact.many or op.target == GRAD_MODE:
                continue
            if op.target in _SHAPES or (op.target in SIZE_FUNCTIONS and all(each in found for each in self.reads[at])):
                found.add(slot)
        return frozenset(found)

    def _made_again(self) -> frozenset[int]:
        found = {
            slot for slot, each in enumerate(self.graph.inputs) if each.kind != "input" and each.name in self._fixed
        }
        banned: set[int] = set()  # groups of memory into which something else is written
        while True:
            again = set(found)
            spoilt: set[int] = set()
            for at, op in enumerate(self.graph.ops):
                slot = self.same[self.start + at]
                repeats = op.target not in (GRAD_MODE, CUSTOM) and slot not in self.sizes and not draws(op)
                repeats = repeats and all(each in again or each in self.sizes for each in self.reads[at])
                if repeats and self.groups[slot] not in banned:
                    again.add(slot)
                else:
                    spoilt.update(self.groups[each] for each in self.writes[at] if each in again)
            if spoilt <= banned:
                return frozenset(slot for slot in again if slot >= self.start)
            banned |= spoilt


def maybe_same(op: Op) -> bool:
    """Whether the result may be the very tensor that was given."""
    name = op.target.split(".")[1] if op.target.startswith("aten.") else ""
    return name in _MAYBE_SAME or name.endswith("dropout")


def hides_a_view(op: Op) -> bool:
    """Whether the result may be a view of something made within: an operator put together of others, as `linear` is of a
    multiplication and a view where there are three dimensions. Autograd adds up the gradients of a view that is changed in
    place in another order than those of a tensor that came from elsewhere."""
    if not op.target.startswith("aten."):
        return False
    name = op.target.removesuffix(".default").replace("aten.", "aten::", 1)
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"))
