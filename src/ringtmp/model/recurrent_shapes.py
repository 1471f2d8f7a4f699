"""A recurrent layer is exported without being unrolled.

A graph has an LSTM as one operator. To learn the shapes it gives, torch's export goes through every step of the sequence in
Python, which takes minutes for a few hundred. Shapes follow from those of the arguments, so while a model is exported they
are taken from there; the graph is the same, and is compared with eager mode like any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import RLock
from typing import Any

import torch

_NAMES = ("lstm", "gru", "rnn_tanh", "rnn_relu")
#: What is replaced is there for the whole process: one export at a time.
_ONE_AT_A_TIME = RLock()


@contextmanager
def not_unrolled() -> Iterator[None]:
    """Where this torch keeps them elsewhere, nothing is changed: exports are slower and no less right."""
    with _ONE_AT_A_TIME:
        yield from _replaced()


def _replaced() -> Iterator[None]:
    kept: list[tuple[Any, dict[Any, Any]]] = []
    for name in _NAMES:
        operator: Any = getattr(torch.ops.aten, name).input
        kernels: dict[Any, Any] | None = getattr(operator, "py_kernels", None)
        if kernels and hasattr(operator, "_dispatch_cache"):
            kept.append((operator, dict(kernels)))
            kernels.update(dict.fromkeys(kernels, _shaped))
            operator._dispatch_cache.clear()
    try:
        yield
    finally:
        for operator, kernels in kept:
            operator.py_kernels.update(kernels)
            operator._dispatch_cache.clear()


def _shaped(
    sequence: torch.Tensor, before: torch.Tensor | Sequence[torch.Tensor], params: Sequence[torch.Tensor],
    has_biases: bool, num_layers: int, dropout: float, train: bool, bidirectional: bool, batch_first: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """What would come out, in shape, strides, and what it depends on."""
    states = [before] if isinstance(before, torch.Tensor) else list(before)
    depends = sum((each.flatten()[:1].sum() for each in (*states, *params)), sequence.flatten()[:1].sum())
    first, second = (1, 0) if batch_first else (0, 1)
    width = states[0].shape[-1] * (2 if bidirectional else 1)
    given = sequence.new_empty((sequence.shape[first], sequence.shape[second], width)) + depends
    after = [each.new_empty(each.shape) + depends for each in states]
    return given.transpose(0, 1) if batch_first else given, *after
