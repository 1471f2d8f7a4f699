"""Optimizers: what each takes, what it keeps, and the kernel it calls. To add one, write its update and its entry below.

Updates call torch's fused kernels with the arguments of `torch.optim` with `fused=True`, hence the same bits (a test holds
them together), but without importing torch's compiler, which `torch.optim` does on its first step: that would cost every
node two seconds at its start and 70 MiB for good. Torch itself is loaded by the first update: settings are checked without.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ringtmp.errors import UsageError, unknown

if TYPE_CHECKING:
    import torch

State = dict[str, "torch.Tensor"]
#: The one state that counts, without a shape; every other has the shape of its parameter.
COUNTER = "step"


@dataclass(frozen=True)
class Setting:
    """A number of at least `low` and below `high`; or yes or no, if the default is."""

    default: float | bool
    low: float = 0.0
    high: float = math.inf

    def checked(self, value: Any, name: str) -> float | bool:
        flag = isinstance(self.default, bool)
        if isinstance(value, bool) != flag or not isinstance(value, int | float):
            raise UsageError(f"{name}={value!r} must be {'yes or no' if flag else 'a number'}")
        if flag:
            return value
        if not self.low <= value < self.high or not math.isfinite(value):
            least = f"at least {self.low:g}"
            finite = "a finite number" + (f" of {least}" if self.low > -math.inf else "")
            raise UsageError(
                f"{name}={value} must be {finite if self.high == math.inf else f'{least} and below {self.high:g}'}"
            )
        return float(value)


@dataclass(frozen=True)
class UpdateRule:
    """How gradients become changes of parameters."""

    name: str
    settings: Mapping[str, Setting]  # "lr" among them
    #: What is kept for every parameter -> the setting without which it is not ("": always).
    state: Mapping[str, str]
    #: The learning rate from which training with a delay of one update was seen to collapse that went well without
    #: (docs/exactness.md has the table).
    delay_limit: float
    update: Callable[..., None]
    #: Why these settings do not go together; empty: they do.
    conflict: Callable[[Mapping[str, Any]], str] = lambda settings: ""

    def checked(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """What was given, typed, and the learning rate; refuses what this optimizer does not take."""
        settings = dict(given)
        if "betas" in settings:
            settings["beta1"], settings["beta2"] = settings.pop("betas")
        settings.setdefault("lr", self.settings["lr"].default)
        for key, value in settings.items():
            if key not in self.settings:
                raise unknown(f"setting of {self.name}", key, self.settings)
            settings[key] = self.settings[key].checked(value, f"{self.name}: {key}")
        if conflict := self.conflict(settings):
            raise UsageError(f"{self.name}: {conflict}")
        return settings

    def full(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Every setting but the learning rate, which comes with each step."""
        return {key: given.get(key, setting.default) for key, setting in self.settings.items() if key != "lr"}

    def kept(self, given: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of what is kept for every parameter with these settings."""
        full = self.full(given)
        return tuple(name for name, needs in self.state.items() if not needs or full[needs])


class Optimizer:
    """A rule at work. `states[i]` belongs to `parameters[i]` and is empty before its first step."""

    def __init__(self, rule: UpdateRule, settings: Mapping[str, Any], parameters: Sequence[torch.Tensor]) -> None:
        self._rule = rule
        self._settings = rule.full(settings)
        self._parameters = list(parameters)
        self.states: list[State] = [{} for _ in parameters]
        self._kept = rule.kept(settings)

    @property
    def state_tensors(self) -> int:
        """Tensors of a parameter's size that it keeps for each."""
        return len([name for name in self._kept if name != COUNTER])

    def step(self, lr: float, parameters: Sequence[torch.Tensor] | None = None) -> None:
        """With `parameters`: on these, which take the place of the first ones, with the same state."""
        import torch

        every = self._parameters if parameters is None else parameters
        groups: dict[tuple[torch.dtype, bool], list[int]] = {}
        for index, parameter in enumerate(every):
            if parameter.grad is not None:
                first = bool(self._kept) and not self.states[index]
                groups.setdefault((parameter.dtype, first), []).append(index)
        with torch.no_grad():
            for (_, first), members in groups.items():
                changed = [every[index] for index in members]
                gradients = [each.grad for each in changed if each.grad is not None]
                states = [self.states[index] for index in members]
                self._rule.update(changed, gradients, states, first=first, lr=lr, **self._settings)


def _sgd(
    changed: list[torch.Tensor], gradients: list[torch.Tensor], states: list[State], *, first: bool, **options: Any
) -> None:
    import torch

    if first:
        for state, gradient in zip(states, gradients, strict=True):
            state["momentum_buffer"] = torch.empty_like(gradient)
    buffers = [state["momentum_buffer"] for state in states] if options["momentum"] else []
    torch._fused_sgd_(changed, gradients, buffers, maximize=False, is_first_step=first, **options)


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
            state[COUNTER] = torch.zeros((), dtype=torch.float32)
            for name in moments:
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    steps = [state[COUNTER] for state in states]
    torch._foreach_add_(steps, 1)
    kept = [[state[name] for state in states] for name in moments] + [[]] * (3 - len(moments))
    getattr(torch, kernel)(changed, gradients, *kept, steps, maximize=False, **options)


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


def _nesterov_alone(settings: Mapping[str, Any]) -> str:
    alone = settings.get("nesterov") and (not settings.get("momentum") or settings.get("dampening"))
    return "nesterov needs a momentum above 0 and no dampening" if alone else ""


_SGD = {
    "lr": Setting(0.1), "momentum": Setting(0.0), "nesterov": Setting(False), "weight_decay": Setting(0.0),
    "dampening": Setting(0.0, low=-math.inf),
}  # fmt: skip
_ADAM = {
    "lr": Setting(2e-3), "beta1": Setting(0.9, high=1.0), "beta2": Setting(0.999, high=1.0), "eps": Setting(1e-8),
    "weight_decay": Setting(0.0), "amsgrad": Setting(False),
}  # fmt: skip
_ADAMW = {**_ADAM, "weight_decay": Setting(0.01)}
_ADAGRAD = {"lr": Setting(1e-2), "lr_decay": Setting(0.0), "weight_decay": Setting(0.0), "eps": Setting(1e-10)}
_ADAM_STATE = {COUNTER: "", "exp_avg": "", "exp_avg_sq": "", "max_exp_avg_sq": "amsgrad"}
_RULES = (
    UpdateRule("sgd", _SGD, {"momentum_buffer": "momentum"}, delay_limit=1.0, update=_sgd, conflict=_nesterov_alone),
    UpdateRule("adam", _ADAM, _ADAM_STATE, delay_limit=0.1, update=partial(_adam, "_fused_adam_")),
    UpdateRule("adamw", _ADAMW, _ADAM_STATE, delay_limit=0.1, update=partial(_adam, "_fused_adamw_")),
    UpdateRule("adagrad", _ADAGRAD, {COUNTER: "", "sum": ""}, delay_limit=0.1, update=_adagrad),
)
OPTIMIZERS: dict[str, UpdateRule] = {rule.name: rule for rule in _RULES}
#: Every name a state may have.
STATE_KEYS = frozenset(name for rule in _RULES for name in rule.state)


def checked_optimizer(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, complete and typed; refuses names and values no optimizer takes."""
    if name not in OPTIMIZERS:
        raise unknown("optimizer", name, OPTIMIZERS)
    return OPTIMIZERS[name].checked(settings)


def make_optimizer(name: str, settings: Mapping[str, Any], parameters: Sequence[torch.Tensor]) -> Optimizer:
    """Settings as `checked_optimizer` leaves them; the learning rate comes with every step."""
    return Optimizer(OPTIMIZERS[name], settings, parameters)


def state_tensors(name: str, settings: Mapping[str, Any]) -> int:
    """Tensors of a parameter's size that the optimizer keeps for each, once it has made a step."""
    return make_optimizer(name, settings, ()).state_tensors


def delay_warning(optimizer: str, settings: Mapping[str, Any], staleness: int) -> str | None:
    """What is known to go wrong with delayed gradients at such a learning rate. Momentum counts: on a slope of curvature c
    plain descent is stable up to lr = 2 (1 + momentum) / c, with a delay only up to (1 - momentum) / c."""
    lr, momentum, limit = settings["lr"], settings.get("momentum", 0.0), OPTIMIZERS[optimizer].delay_limit
    rate = lr / (1 - momentum) if momentum < 1 else math.inf
    if staleness == 0 or rate < limit:
        return None
    given = f"lr {lr:g}" + (f" and momentum {momentum:g}, which act as {rate:.3g}" if momentum else "")
    return (
        f"--staleness 1 with {optimizer}, {given}: from {limit:g} on, training that works without delay was seen to collapse "
        f"with it: use a smaller --lr{' or momentum' if momentum else ''}, or --staleness 0"
    )
