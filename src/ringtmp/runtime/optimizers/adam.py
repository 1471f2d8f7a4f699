"""Adam (D. Kingma, J. Ba, ICLR 2015) and AdamW (I. Loshchilov, F. Hutter, ICLR 2019): torch's fused kernels."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from ringtmp.runtime.optimizers.update_rule import COUNTER, Setting, State, UpdateRule

if TYPE_CHECKING:
    import torch


def _adam(
    kernel: str,
    changed: list[torch.Tensor],
    gradients: list[torch.Tensor],
    states: list[State],
    *,
    first: bool,
    **options: Any,
) -> None:
    import torch

    moments = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if options["amsgrad"] else [])]
    if first:
        for state, parameter in zip(states, changed, strict=True):
            state[COUNTER] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for name in moments:
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    steps = [state[COUNTER] for state in states]
    torch._foreach_add_(steps, 1)
    kept = [[state[name] for state in states] for name in moments] + [[]] * (3 - len(moments))
    getattr(torch, kernel)(changed, gradients, *kept, steps, maximize=False, **options)


ADAM_SETTINGS = {
    "lr": Setting(2e-3), "beta1": Setting(0.9, high=1.0), "beta2": Setting(0.999, high=1.0), "eps": Setting(1e-8),
    "weight_decay": Setting(0.0), "amsgrad": Setting(False),
}  # fmt: skip
_ADAMW_SETTINGS = {**ADAM_SETTINGS, "weight_decay": Setting(0.01)}
_STATE = {COUNTER: "", "exp_avg": "", "exp_avg_sq": "", "max_exp_avg_sq": "amsgrad"}
#: Updates of AdamW, which other optimizers use for some of the parameters.
adamw_update = partial(_adam, "_fused_adamw_")
ADAM = UpdateRule("adam", ADAM_SETTINGS, _STATE, delay_limit=0.1, update=partial(_adam, "_fused_adam_"))
ADAMW = UpdateRule("adamw", _ADAMW_SETTINGS, _STATE, delay_limit=0.1, update=adamw_update)
