"""NAdam: Adam with Nesterov's momentum (T. Dozat, ICLR workshop 2016). Torch has no fused kernel for it; these are the
operators of `torch.optim.NAdam` for a single tensor, in its order.

    mu(t)  = beta1 (1 - 0.96^(t momentum_decay) / 2)
    m, v  <- means of g and g^2
    n      = mu(t+1) m / (1 - prod mu up to t+1) + (1 - mu(t)) g / (1 - prod mu up to t)
    w     <- w - lr n / (sqrt(v / (1 - beta2^t)) + eps)

With gradients of one update ago, use beta1=0.99: the momentum then looks ahead about as far as the gradient lags behind
(T. Ajanthan et al., Nesterov Method for Asynchronous Pipeline Parallel Optimization, ICML 2025).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringtmp.runtime.optimizers.adam import ADAM_SETTINGS
from ringtmp.runtime.optimizers.update_rule import COUNTER, Setting, State, UpdateRule

if TYPE_CHECKING:
    import torch

#: The product of mu over all updates so far.
PRODUCT = "mu_product"


def _nadam(
    changed: list[torch.Tensor], gradients: list[torch.Tensor], states: list[State], *, first: bool, lr: float,
    beta1: float, beta2: float, eps: float, weight_decay: float, momentum_decay: float, decoupled_weight_decay: bool,
) -> None:  # fmt: skip
    import torch

    for parameter, gradient, state in zip(changed, gradients, states, strict=True):
        if first:
            state[COUNTER], state[PRODUCT] = torch.zeros(()), torch.ones(())
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        state[COUNTER] += 1
        step = state[COUNTER].item()
        if weight_decay and decoupled_weight_decay:
            parameter.mul_(1 - lr * weight_decay)
        elif weight_decay:
            gradient = gradient.add(parameter, alpha=weight_decay)
        mu = beta1 * (1.0 - 0.5 * (0.96 ** (step * momentum_decay)))
        mu_next = beta1 * (1.0 - 0.5 * (0.96 ** ((step + 1) * momentum_decay)))
        state[PRODUCT] *= mu
        product = state[PRODUCT].item()
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        below = state["exp_avg_sq"].div(1 - beta2**step).sqrt().add_(eps)
        parameter.addcdiv_(gradient, below, value=-lr * (1.0 - mu) / (1.0 - product))
        parameter.addcdiv_(state["exp_avg"], below, value=(-lr * mu_next) / (1.0 - product * mu_next))


_SETTINGS = {
    **{name: setting for name, setting in ADAM_SETTINGS.items() if name != "amsgrad"},
    "momentum_decay": Setting(4e-3), "decoupled_weight_decay": Setting(False),
}  # fmt: skip
NADAM = UpdateRule(
    "nadam", _SETTINGS, {COUNTER: "", PRODUCT: "", "exp_avg": "", "exp_avg_sq": ""}, delay_limit=0.1, update=_nadam,
    numbers=frozenset({COUNTER, PRODUCT}),
)  # fmt: skip
