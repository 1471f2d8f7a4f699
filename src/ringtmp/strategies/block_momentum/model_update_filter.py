"""Blockwise model-update filtering: the mean change of a block becomes the change of the model. Every worker does the same."""

from __future__ import annotations

import torch


class UpdateFilter:
    """D of every layer, and the step from one block to the next."""

    def __init__(self, eta: float, zeta: float, nesterov: bool) -> None:
        self._eta = eta
        self._zeta = zeta
        self._nesterov = nesterov
        self._filtered: dict[int, torch.Tensor] = {}  # D, by layer

    def __call__(self, layer: int, begun: torch.Tensor, change: torch.Tensor) -> None:
        """`begun`: W_g, of the last block and then of the next; `change`: G of the block that ended."""
        eta, before = self._eta, self._filtered.get(layer)
        filtered = change.mul(self._zeta)
        if before is not None:
            filtered.add_(before, alpha=eta)
            if self._nesterov:
                begun.sub_(before, alpha=eta)  # W(t-1)
        begun.add_(filtered)
        if self._nesterov:
            begun.add_(filtered, alpha=eta)
        self._filtered[layer] = filtered
