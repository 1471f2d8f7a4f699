"""Cross-entropy over a large vocabulary, a few rows at a time: the bits of torch, without three more tensors as large as the
logits.

torch keeps the logarithms of all probabilities for the way back, and makes two gradients of that size there. Rows have
nothing to do with each other, so here the logarithms of a few rows are made, used and dropped, once on either way; what
remains is the gradient itself. The mean is taken by torch's own kernel, over one value a row: the same order of additions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ringtmp.system.resources import REUSED_UP_TO_BYTES

aten = torch.ops.aten

#: What a few rows take: this much stays in a cache, and leaves no holes in the heap.
SLICE_BYTES = REUSED_UP_TO_BYTES // 32
_MEAN, _SUM = 1, 2
#: What an ignored row has as its target where every row has one value: no class, whatever the caller ignores.
_IGNORED = -1


def cross_entropy_loss(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """As aten::cross_entropy_loss, which also does whatever is not large and plain."""
    plain = logits.dim() == 2 and target.dim() == 1 and logits.is_contiguous() and logits.dtype == torch.float32
    usual = weight is None and reduction in (_MEAN, _SUM) and label_smoothing == 0.0
    labels = target.dtype in (torch.int64, torch.uint8) and len(logits) == target.numel()  # else torch has a word on it
    large = logits.nbytes > REUSED_UP_TO_BYTES and logits.device.type == "cpu"
    if not (plain and usual and labels and large):
        ordinary: Callable[..., torch.Tensor] = aten.cross_entropy_loss.default
        return ordinary(logits, target, weight, reduction, ignore_index, label_smoothing)
    in_slices: Callable[..., torch.Tensor] = _InSlices.apply
    return in_slices(logits, target.long(), reduction, ignore_index)


class _InSlices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor, reduction: int, ignored: int) -> torch.Tensor:
        counted = target != ignored
        _refuse_labels_out_of_range(target, counted, logits.shape[1])
        right = torch.where(counted, target, 0)[:, None]
        picked = torch.empty(len(target), 1)
        for rows in _slices(logits):
            torch.gather(aten._log_softmax.default(logits[rows], 1, False), 1, right[rows], out=picked[rows])
        only = torch.where(counted, 0, _IGNORED)  # the one value of its row
        loss: torch.Tensor
        loss, total = aten.nll_loss_forward.default(picked, only, None, reduction, _IGNORED)
        ctx.save_for_backward(logits, target, total)
        ctx.how = reduction, ignored
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        logits, target, total = ctx.saved_tensors
        found = torch.empty_like(logits)
        for rows in _slices(logits):
            logs = aten._log_softmax.default(logits[rows], 1, False)
            of_logs = aten.nll_loss_backward.default(gradient, logs, target[rows], None, *ctx.how, total)
            found[rows] = aten._log_softmax_backward_data.default(of_logs, logs, 1, logits.dtype)
        return found, None, None, None


def _slices(logits: torch.Tensor) -> list[slice]:
    few = max(1, SLICE_BYTES // max(1, logits[0].nbytes))
    return [slice(first, first + few) for first in range(0, len(logits), few)]


def _refuse_labels_out_of_range(target: torch.Tensor, counted: torch.Tensor, classes: int) -> None:
    wrong = target[counted & ((target < 0) | (target >= classes))]
    if len(wrong):
        raise IndexError(f"Target {int(wrong[0])} is out of bounds.")


#: Operations of a graph that are computed here.
IN_SLICES = {"aten.cross_entropy_loss.default": cross_entropy_loss}
