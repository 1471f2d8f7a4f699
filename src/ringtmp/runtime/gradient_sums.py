"""Gradients of a stage's parameters on their way up the tree of sums (`plan/sum_tree.py`).

Autograd, and weight gradients that were left for later, add to a parameter's `grad`. So `grad` always is the sum of one
part, the one at work; sums of others are set aside here, and those of complete parts go up the tree as far as their
siblings are there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from ringtmp.plan.sum_tree import ROOT, SumTree
from ringtmp.runtime.gradients_at_segment_edges import Gradient

#: One for every parameter; None where there is none.
Sums = list[Gradient]


def added(first: Sums | None, second: Sums | None) -> Sums | None:
    """Both, the first changed in place. What is absent passes the other on unchanged."""
    if first is None or second is None:
        return second if first is None else first
    with torch.no_grad():
        return [
            right if left is None else left if right is None else left.add_(right)
            for left, right in zip(first, second, strict=True)
        ]


class GradientSums:
    """Of one step. Parts may be under way at once; within each, gradients come in the order of microbatches."""

    def __init__(self, tree: SumTree, parameters: Sequence[torch.Tensor]) -> None:
        self._tree = tree
        self._parameters = parameters
        self._begun = False
        self._last_came: set[int] = set()  # parts whose last microbatch has gone backward
        self._at = -1  # the part whose sums the parameters' `grad` are
        self._aside: dict[int, Sums] = {}  # of parts that are not complete
        self._made: dict[int, Sums] = {}  # by node of the tree

    def turn_to(self, part: int) -> None:
        """From now on gradients are of this part."""
        if part != self._at:
            self._set_aside()
            for parameter, gradient in zip(self._parameters, self._aside.pop(part, ()), strict=False):
                parameter.grad = gradient
            self._at, self._begun = part, True

    def last_of(self, part: int) -> None:
        """Of this part no further microbatch will go backward."""
        self._last_came.add(part)

    def close(self, waiting: Collection[int]) -> None:
        """Parts whose last microbatch has come are complete, but for those of which something waits."""
        for part in sorted(self._last_came.difference(waiting)):
            self._last_came.discard(part)
            if part == self._at:
                self._set_aside()
            if part in self._aside:
                self._rise(self._tree.leaf(part), self._aside.pop(part))

    def total(self) -> None:
        """All of the step is there: the parameters' `grad` are the whole sums. Nothing happens where nothing was added."""
        if self._begun:
            (total,) = self.take([ROOT])
            for parameter, gradient in zip(self._parameters, total or (), strict=False):
                parameter.grad = gradient

    def take(self, nodes: Sequence[int]) -> list[Sums | None]:
        """All there will be is there: the sums below these nodes of the tree; the parameters have no gradients now."""
        found = self.take_some(nodes, 0, len(self._parameters))
        self.end()
        return found

    def take_some(self, nodes: Sequence[int], first: int, stop: int) -> list[Sums | None]:
        """Likewise of some parameters, while others may still get gradients."""
        known = {node: _taken(sums, first, stop) for node, sums in self._made.items()}
        known.update((self._tree.leaf(part), _taken(sums, first, stop)) for part, sums in self._aside.items())
        if self._at >= 0:
            known[self._tree.leaf(self._at)] = [each.grad for each in self._parameters[first:stop]]
            for parameter in self._parameters[first:stop]:
                parameter.grad = None
        return [self._below(node, known) for node in nodes]

    def end(self) -> None:
        """Everything was taken."""
        self._set_aside()
        self._aside.clear()
        self._made.clear()
        self._last_came.clear()
        self._begun = False

    def give(self, first: int, gradients: Sequence[Gradient]) -> None:
        """The gradients of the parameters from the first of these on, flat, summed over all who share the step. Each gets the
        strides of its parameter, as autograd would give it: fused optimizers go through both as they lie in memory."""
        for parameter, gradient in zip(self._parameters[first:], gradients, strict=False):
            given = None if gradient is None else gradient.view(parameter.shape).to(parameter.device)
            if given is not None and given.stride() != parameter.stride():
                given = torch.empty_like(parameter).copy_(given)
            parameter.grad = given

    def _set_aside(self) -> None:
        if self._at >= 0:
            self._aside[self._at] = [parameter.grad for parameter in self._parameters]
            for parameter in self._parameters:
                parameter.grad = None
            self._at = -1

    def _rise(self, node: int, sums: Sums) -> None:
        while node > ROOT and node ^ 1 in self._made:
            other = self._made.pop(node ^ 1)
            pair = added(other, sums) if node & 1 else added(sums, other)
            assert pair is not None
            node, sums = node >> 1, pair
        self._made[node] = sums

    def _below(self, node: int, known: Mapping[int, Sums]) -> Sums | None:
        if node in known:
            return known[node]
        if node >= self._tree.parts:
            return None
        return added(self._below(2 * node, known), self._below(2 * node + 1, known))


def _taken(sums: Sums, first: int, stop: int) -> Sums:
    found = sums[first:stop]
    sums[first:stop] = [None] * len(found)
    return found
