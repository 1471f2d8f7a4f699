"""Muon for hidden matrices, AdamW for all other parameters.

K. Jordan, Muon: An optimizer for hidden layers in neural networks, 2024; J. Liu et al., Muon is Scalable for LLM Training,
2025. The operators are those of `torch.optim.Muon` with its own number of iterations and coefficients, in its order.

    b <- momentum b + (1 - momentum) g;  u <- b, with nesterov a step further
    o <- Newton-Schulz(u), in bfloat16: about the orthogonal matrix nearest to u
    w <- (1 - lr weight_decay) w - lr scale o

With `match_adamw` scale is 0.2 sqrt(max(rows, columns)), so that one learning rate serves both optimizers; without it is
sqrt(max(1, rows / columns)). A matrix lives on one node, so nothing travels. Which matrices are hidden is decided by the
model alone (model/matrices_for_muon.py).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ringtmp.runtime.optimizers.adam import ADAM_SETTINGS, adamw_update
from ringtmp.runtime.optimizers.update_rule import COUNTER, MatrixRule, Setting, State, UpdateRule

if TYPE_CHECKING:
    import torch

ITERATIONS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
LEAST_NORM = 1e-7


def _orthogonal(update: torch.Tensor) -> torch.Tensor:
    import torch

    a, b, c = COEFFICIENTS
    tall = update.size(0) > update.size(1)
    near = update.bfloat16()
    if tall:
        near = near.T
    near.div_(near.norm().clamp(min=LEAST_NORM))
    for _ in range(ITERATIONS):
        gram = near @ near.T
        near = torch.addmm(near, torch.addmm(gram, gram, gram, beta=b, alpha=c), near, beta=a)
    return near.T if tall else near


def _matrices(
    changed: list[torch.Tensor], gradients: list[torch.Tensor], states: list[State], *, first: bool, lr: float,
    momentum: float, nesterov: bool, weight_decay: float, match_adamw: bool, **of_adamw: Any,
) -> None:  # fmt: skip
    import torch

    for parameter, gradient, state in zip(changed, gradients, states, strict=True):
        if first:
            state["momentum_buffer"] = torch.zeros_like(gradient, memory_format=torch.preserve_format)
        buffer = state["momentum_buffer"]
        buffer.lerp_(gradient, 1 - momentum)
        update = _orthogonal(gradient.lerp(buffer, momentum) if nesterov else buffer)
        rows, columns = parameter.shape
        scale = 0.2 * math.sqrt(max(rows, columns)) if match_adamw else math.sqrt(max(1, rows / columns))
        parameter.mul_(1 - lr * weight_decay)
        parameter.add_(update, alpha=-(lr * scale))


def _others(
    changed: list[torch.Tensor], gradients: list[torch.Tensor], states: list[State],
    *, momentum: float, nesterov: bool, match_adamw: bool, **options: Any,
) -> None:  # fmt: skip
    adamw_update(changed, gradients, states, amsgrad=False, **options)


_SETTINGS = {
    **{name: setting for name, setting in ADAM_SETTINGS.items() if name != "amsgrad"},
    "weight_decay": Setting(0.1), "momentum": Setting(0.95, high=1.0), "nesterov": Setting(True),
    "match_adamw": Setting(True),
}  # fmt: skip
MUON = UpdateRule(
    "muon", _SETTINGS, {COUNTER: "", "exp_avg": "", "exp_avg_sq": ""}, delay_limit=0.1, update=_others,
    matrices=MatrixRule(("momentum_buffer",), _matrices),
)  # fmt: skip
