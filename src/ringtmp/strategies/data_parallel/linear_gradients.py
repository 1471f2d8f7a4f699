"""Gradients of plain linear layers as factors (model/sufficient_factors.py), in a layer's flat vector and in parts of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ringtmp.model.portable_layer import Layer
from ringtmp.model.sufficient_factors import Factors, plain_linear
from ringtmp.strategies.data_parallel.replica import layer_flat


class Linear(NamedTuple):
    """As `Enlist.linear` has it: the matrix's shape, and where it and the bias begin in the layer's vector (-1: no bias)."""

    outputs: int
    inputs: int
    matrix: int
    bias: int

    @property
    def width(self) -> int:
        """Values in the factors of a row."""
        return self.outputs + self.inputs

    def columns(self, start: int, stop: int) -> tuple[int, int]:
        """Which errors a range of the layer's vector is made of: from this output to before that one."""
        last = self.matrix + self.outputs * self.inputs
        first, end = max(start, self.matrix), min(stop, last)
        spans = [((first - self.matrix) // self.inputs, -(-(end - self.matrix) // self.inputs))] if first < end else []
        if self.bias >= 0:
            first, end = max(start, self.bias) - self.bias, min(stop, self.bias + self.outputs) - self.bias
            spans += [(first, end)] if first < end else []
        return min((each for each, _ in spans), default=0), max((each for _, each in spans), default=0)

    def gradient(self, start: int, stop: int, rows: torch.Tensor, errors: torch.Tensor, first: int = 0) -> torch.Tensor:
        """The gradient of a range of the layer's vector. `errors` begin at output `first`; padding has none."""
        found = torch.zeros(stop - start)
        low, high = self.columns(start, stop)
        mine = errors[:, low - first : high - first]
        end = min(stop, self.matrix + self.outputs * self.inputs)
        at = max(start, self.matrix)
        if at < end:
            top = (at - self.matrix) // self.inputs
            bottom = -(-(end - self.matrix) // self.inputs)
            product = mine[:, top - low : bottom - low].t().mm(rows).reshape(-1)
            begun = self.matrix + top * self.inputs
            found[at - start : end - start] = product[at - begun : end - begun]
        if self.bias >= 0:
            at, end = max(start, self.bias), min(stop, self.bias + self.outputs)
            if at < end:
                found[at - start : end - start] = mine.sum(0)[at - self.bias - low : end - self.bias - low]
        return found


def linear_of(layer: Layer) -> tuple[int, ...]:
    """For `Enlist.linear`; empty: the layer is not plain."""
    plain = plain_linear(layer)
    if plain is None:
        return ()
    slots = {slot.name: slot for slot in layer_flat(layer).slots}
    matrix = slots[plain.matrix]
    outputs, inputs = matrix.shape
    return Linear(outputs, inputs, matrix.start, -1 if plain.bias is None else slots[plain.bias].start)


def known(linear: Sequence[tuple[int, ...]]) -> dict[int, Linear]:
    """By layer."""
    return {layer: Linear(*each) for layer, each in enumerate(linear) if each}


def together(linear: Linear, factors: Sequence[Factors]) -> Factors:
    """Of all microbatches, in their order; of none, no rows."""
    if not factors:
        return Factors(torch.empty(0, linear.inputs), torch.empty(0, linear.outputs))
    return Factors(*(torch.cat(list(each)) for each in zip(*factors, strict=True)))
