"""SGD, Adam and AdamW on torch's fused kernels, called directly.

The same kernels with the same arguments as `torch.optim` with `fused=True`, hence the same bits (a test holds them
together), but without importing torch's compiler, which `torch.optim` does on its first step: that would cost every
node two seconds at its start and 70 MiB for good.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

State = dict[str, torch.Tensor]
#: Every name a state may have; `step` is a counter, the others have the shape of their parameter.
STATE_KEYS = ("step", "momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")


class Optimizer(Protocol):
    """`states[i]` belongs to `parameters[i]` and is empty before its first step."""

    states: list[State]

    def step(self, lr: float, parameters: Sequence[torch.Tensor] | None = None) -> None:
        """With `parameters`: on these, which take the place of the first ones, with the same state."""
        ...


def make_optimizer(name: str, settings: Mapping[str, Any], parameters: Sequence[torch.Tensor]) -> Optimizer:
    """Settings as `checked_optimizer` leaves them; the learning rate comes with every step."""
    options = {key: value for key, value in settings.items() if key != "lr"}
    if name == "sgd":
        return FusedSGD(parameters, **options)
    return FusedAdam(parameters, decoupled=name == "adamw", **options)


class FusedSGD:
    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        self._parameters = list(parameters)
        self.states: list[State] = [{} for _ in parameters]
        self._options: dict[str, Any] = {
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }

    @torch.no_grad()
    def step(self, lr: float, parameters: Sequence[torch.Tensor] | None = None) -> None:
        every = self._parameters if parameters is None else parameters
        groups: dict[tuple[torch.dtype, bool], list[int]] = {}
        for index, parameter in enumerate(every):
            if parameter.grad is not None:
                first = bool(self._options["momentum"]) and not self.states[index]
                groups.setdefault((parameter.dtype, first), []).append(index)
        for (_, first), members in groups.items():
            changed = [every[index] for index in members]
            gradients = _gradients(changed)
            buffers: list[torch.Tensor] = []
            if self._options["momentum"]:
                for index, gradient in zip(members, gradients, strict=True):
                    if first:
                        self.states[index]["momentum_buffer"] = torch.empty_like(gradient)
                    buffers.append(self.states[index]["momentum_buffer"])
            torch._fused_sgd_(changed, gradients, buffers, lr=lr, maximize=False, is_first_step=first, **self._options)


def _gradients(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [each.grad for each in parameters if each.grad is not None]


class FusedAdam:
    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        decoupled: bool,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float | None = None,
        amsgrad: bool = False,
    ) -> None:
        self._parameters = list(parameters)
        self.states: list[State] = [{} for _ in parameters]
        self._kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
        self._amsgrad = amsgrad
        decay = (0.01 if decoupled else 0.0) if weight_decay is None else weight_decay  # torch's own defaults
        self._options: dict[str, Any] = {
            "beta1": beta1,
            "beta2": beta2,
            "eps": eps,
            "weight_decay": decay,
            "amsgrad": amsgrad,
        }

    @torch.no_grad()
    def step(self, lr: float, parameters: Sequence[torch.Tensor] | None = None) -> None:
        every = self._parameters if parameters is None else parameters
        groups: dict[torch.dtype, list[int]] = {}
        for index, parameter in enumerate(every):
            if parameter.grad is not None:
                if not self.states[index]:
                    self.states[index] = self._fresh(parameter)
                groups.setdefault(parameter.dtype, []).append(index)
        for members in groups.values():
            changed = [every[index] for index in members]
            states = [self.states[index] for index in members]
            steps = [state["step"] for state in states]
            torch._foreach_add_(steps, 1)
            self._kernel(
                changed,
                _gradients(changed),
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [state["max_exp_avg_sq"] for state in states] if self._amsgrad else [],
                steps,
                lr=lr,
                maximize=False,
                **self._options,
            )

    def _fresh(self, parameter: torch.Tensor) -> State:
        state = {
            "step": torch.zeros((), dtype=torch.float32),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }
        if self._amsgrad:
            state["max_exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state
