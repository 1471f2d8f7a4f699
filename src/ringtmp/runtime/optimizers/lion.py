"""Lion (X. Chen et al., Symbolic Discovery of Optimization Algorithms, NeurIPS 2023): steps of one size, by sign.

    w <- (1 - lr weight_decay) w - lr sign(beta1 m + (1 - beta1) g)
    m <- beta2 m + (1 - beta2) g

It keeps one tensor per parameter, and wants about a tenth of Adam's learning rate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringtmp.runtime.optimizers.update_rule import Setting, State, UpdateRule

if TYPE_CHECKING:
    import torch


def _lion(
    changed: list[torch.Tensor], gradients: list[torch.Tensor], states: list[State],
    *, first: bool, lr: float, beta1: float, beta2: float, weight_decay: float,
) -> None:  # fmt: skip
    import torch

    for parameter, gradient, state in zip(changed, gradients, states, strict=True):
        if first:
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        mean = state["exp_avg"]
        if weight_decay:
            parameter.mul_(1 - lr * weight_decay)
        parameter.add_(mean.mul(beta1).add_(gradient, alpha=1 - beta1).sign_(), alpha=-lr)
        mean.mul_(beta2).add_(gradient, alpha=1 - beta2)


_SETTINGS = {
    "lr": Setting(2e-4), "beta1": Setting(0.9, high=1.0), "beta2": Setting(0.99, high=1.0), "weight_decay": Setting(0.0)
}  # fmt: skip
LION = UpdateRule("lion", _SETTINGS, {"exp_avg": ""}, delay_limit=0.01, update=_lion)
