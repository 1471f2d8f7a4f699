"""Stochastic gradient descent, with momentum if asked for: torch's fused kernel."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ringtmp.runtime.optimizers.update_rule import Setting, State, UpdateRule

if TYPE_CHECKING:
    import torch


def _sgd(
    changed: list[torch.Tensor], gradients: list[torch.Tensor], states: list[State], *, first: bool, **options: Any
) -> None:
    import torch

    if first:
        for state, gradient in zip(states, gradients, strict=True):
            state["momentum_buffer"] = torch.empty_like(gradient)
    buffers = [state["momentum_buffer"] for state in states] if options["momentum"] else []
    torch._fused_sgd_(changed, gradients, buffers, maximize=False, is_first_step=first, **options)


def _nesterov_alone(settings: Mapping[str, Any]) -> str:
    alone = settings.get("nesterov") and (not settings.get("momentum") or settings.get("dampening"))
    return "nesterov needs a momentum above 0 and no dampening" if alone else ""


_SETTINGS = {
    "lr": Setting(0.1), "momentum": Setting(0.0), "nesterov": Setting(False), "weight_decay": Setting(0.0),
    "dampening": Setting(0.0, low=-math.inf),
}  # fmt: skip
SGD = UpdateRule(
    "sgd", _SETTINGS, {"momentum_buffer": "momentum"}, delay_limit=1.0, update=_sgd, conflict=_nesterov_alone,
    summing="momentum",
)  # fmt: skip
