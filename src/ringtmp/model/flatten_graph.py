"""An exported program as one list of steps: `torch.no_grad()` blocks opened, custom functions found between their marks.

`torch.export` puts a block without gradients into a graph of its own. Here its nodes stand in line with the others,
between two steps that switch the mode. A custom function (custom.py) was traced like this:

    begin            the tensors that enter it
    ...              its forward
    middle           the gradients of its results, as its backward gets them
    ...              its backward
    end              the results as the rest of the layer sees them
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node


@dataclass(frozen=True)
class Mode:
    """Gradients on or off from here on; None: as before the last one."""

    enabled: bool | None


@dataclass
class Region:
    """A custom function. Nodes are keys, as the program names them; `Flat.source` says where a value comes from."""

    name: str
    hook: bool
    entering: list[Node]  # outside
    entered: list[Node]  # the same, as its forward sees them
    forward: list[Node]
    results: list[Node]
    gradients: list[Node]
    backward: list[Node]
    returned: list[Node | None]
    differentiable: tuple[bool, ...]
    given: list[Node | None]  # the results as the layer sees them; None where it ignores one
    captured: list[Node] = field(default_factory=list)  # values from outside beside those that enter
    saved: list[Node] = field(default_factory=list)  # what backward needs of forward, in its names


Step = Node | Mode | Region


class Flat:
    """The steps of a program, in order, and its outputs."""

    def __init__(self, module: GraphModule) -> None:
        self._same: dict[Node, Node] = {}
        self.placeholders: list[Node] = []
        self.outputs: list[Any] = []
        self.steps: list[Step] = []
        rest = self._open(module, top=True)
        for step in rest:
            if isinstance(step, Node) and _is_mark(step, "begin"):
                self.steps += self._region(step, rest)
            else:
                self.steps.append(step)

    def source(self, node: Node) -> Node:
        """The node that makes a value: through blocks opened."""
        while node in self._same:
            node = self._same[node]
        return node

    def read_by(self, nodes: Iterable[Node]) -> list[Node]:
        return [self.source(each) for node in nodes for each in node.all_input_nodes]

    def _open(self, module: GraphModule, top: bool) -> Iterator[Step]:
        blocks: dict[Node, list[Any]] = {}
        for node in module.graph.nodes:
            if node.op == "placeholder" and top:
                self.placeholders.append(node)
            elif node.op == "output" and top:
                self.outputs = list(_args(node)[0])
            elif node.op in ("placeholder", "output"):
                continue
            elif node.op == "call_function" and node.target is torch.ops.higher_order.wrap_with_set_grad_enabled:
                enabled, inner, *arguments = _args(node)
                block = getattr(module, inner.target)
                for place, argument in zip(block.graph.find_nodes(op="placeholder"), arguments, strict=True):
                    self._same[place] = argument
                yield Mode(enabled)
                yield from self._open(block, top=False)
                yield Mode(None)
                blocks[node] = list(_args(next(iter(block.graph.find_nodes(op="output"))))[0])
            elif node.target is operator.getitem and _args(node)[0] in blocks:
                self._same[node] = blocks[_args(node)[0]][_args(node)[1]]
            elif node.op == "get_attr" and isinstance(getattr(module, node.target, None), GraphModule):
                continue
            else:
                yield node

    def _region(self, begin: Node, rest: Iterator[Step]) -> list[Step]:
        """Up to the end mark. Sizes that follow from what enters are computed before, where others may read them too."""
        inside: list[Node] = []
        end = begin
        for step in rest:
            if isinstance(step, Node) and _is_mark(step, "end"):
                end = step
                break
            if isinstance(step, Node):
                inside.append(step)
        _, results, _, returned, positions, name, differentiable, hook = _args(end)
        middle = next(node for node in inside if _is_mark(node, "middle"))
        entering = [self.source(each) for each in _args(begin)[0]]
        entered, gradients = self._taken(begin, len(entering)), self._taken(middle, len(results))
        before: list[Step] = []
        forward: list[Node] = []
        backward: list[Node] = []
        past = False
        outside_of = dict(zip(entered, entering, strict=True))
        held: set[Node] = {*entered, *gradients}
        for node in inside:
            if node is middle:
                past = True
            elif node in held:
                continue
            elif _is_size(node) and all(outside_of.get(each, each) not in held for each in self.read_by([node])):
                node.args = torch.fx.map_arg(node.args, lambda each: outside_of.get(self.source(each), each))
                before.append(node)
            else:
                held.add(node)
                (backward if past else forward).append(node)
        found: list[Node | None] = [None] * len(entered)
        for position, each in zip(positions, returned, strict=True):
            found[position] = self.source(each)
        region = Region(
            name, hook, entering, entered, forward, [self.source(each) for each in results], gradients, backward,
            found, tuple(differentiable), [None] * len(results),
        )  # fmt: skip
        for user in end.users:
            region.given[_args(user)[1]] = user
        self._bind(region)
        return [*before, region]

    def _taken(self, mark: Node, count: int) -> list[Node]:
        """What comes out of a mark, one by one."""
        found = {_args(each)[1]: each for each in mark.users}
        return [found[place] for place in range(count)]

    def _bind(self, region: Region) -> None:
        """What a region takes from outside, and what its backward needs of its forward."""
        own = {*region.entered, *region.forward}
        later = {*region.gradients, *region.backward}
        wanted = [*self.read_by(region.forward), *region.results]
        needed = [*self.read_by(region.backward), *(each for each in region.returned if each is not None)]
        for node in needed:
            if node not in later and node not in region.saved:
                region.saved.append(node)
        for node in (*wanted, *region.saved):
            if node not in own and node not in region.captured:
                region.captured.append(node)


def _args(node: Node) -> Any:
    return node.args


def _is_mark(node: Node, name: str) -> bool:
    return node.op == "call_function" and str(node.target) == f"ringtmp.{name}.default"


def _is_size(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, int | float | torch.SymInt | torch.SymFloat | torch.SymBool)
