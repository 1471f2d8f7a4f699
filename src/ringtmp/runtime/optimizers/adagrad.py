"""AdaGrad (J. Duchi et al., Adaptive Subgradient Methods for Online Learning, JMLR 2011): a rate of its own for every value.

sum <- sum + g^2;   w <- w - lr / (1 + (t - 1) lr_decay) g / (sqrt(sum) + eps)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ringtmp.runtime.optimizers.update_rule import COUNTER, Setting, State, UpdateRule

if TYPE_CHECKING:
    import torch


def _adagrad(
    changed: list[torch.Tensor], gradients: list[torch.Tensor], states: list[State], *, first: bool, **options: Any
) -> None:
    import torch

    if first:
        for state, parameter in zip(states, changed, strict=True):
            state[COUNTER] = torch.zeros((), dtype=torch.float32)
            state["sum"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    steps = [state[COUNTER] for state in states]
    torch._foreach_add_(steps, 1)
    torch._fused_adagrad_(changed, gradients, [state["sum"] for state in states], steps, maximize=False, **options)


_SETTINGS = {"lr": Setting(1e-2), "lr_decay": Setting(0.0), "weight_decay": Setting(0.0), "eps": Setting(1e-10)}
ADAGRAD = UpdateRule("adagrad", _SETTINGS, {COUNTER: "", "sum": ""}, delay_limit=0.1, update=_adagrad)
