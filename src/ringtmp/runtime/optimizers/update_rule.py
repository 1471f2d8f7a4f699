"""What an optimizer is: the settings it takes, the state it keeps for a parameter, and the update itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ringtmp.errors import UsageError, unknown

if TYPE_CHECKING:
    import torch

State = dict[str, "torch.Tensor"]
#: The state that counts updates, a single number.
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
class MatrixRule:
    """Of an optimizer that treats hidden matrices apart: what it keeps for them and does with them."""

    state: tuple[str, ...]
    update: Callable[..., None]


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
    #: States that are single numbers; every other has the shape of its parameter.
    numbers: frozenset[str] = frozenset({COUNTER})
    #: The setting by which gradients add up over steps, so that it acts like a larger learning rate; empty: none does.
    summing: str = ""
    #: For hidden matrices; None: they are parameters like any other.
    matrices: MatrixRule | None = None

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

    def kept(self, given: Mapping[str, Any], matrix: bool = False) -> tuple[str, ...]:
        """Names of what is kept for a parameter, or for a hidden matrix, with these settings."""
        if matrix and self.matrices is not None:
            return self.matrices.state
        full = self.full(given)
        return tuple(name for name, needs in self.state.items() if not needs or full[needs])

    def tensors(self, given: Mapping[str, Any], matrix: bool = False) -> int:
        """How many of these have the parameter's size."""
        return len([name for name in self.kept(given, matrix) if name not in self.numbers])


class Optimizer:
    """A rule at work. `states[i]` belongs to `parameters[i]` and is empty before its first step; `matrices[i]`: whether it is
    a hidden matrix."""

    def __init__(
        self,
        rule: UpdateRule,
        settings: Mapping[str, Any],
        parameters: Sequence[torch.Tensor],
        matrices: Sequence[bool] = (),
    ) -> None:
        self._rule = rule
        self._settings = rule.full(settings)
        self._parameters = list(parameters)
        apart = rule.matrices is not None
        self._matrices = [apart and each for each in matrices] or [False] * len(self._parameters)
        self.states: list[State] = [{} for _ in parameters]
        self._keeps = {matrix: bool(rule.kept(settings, matrix)) for matrix in (False, True)}
        self._tensors = {matrix: rule.tensors(settings, matrix) for matrix in (False, True)}

    @property
    def state_tensors(self) -> int:
        """Tensors of a parameter's size that it keeps for each, at most."""
        return max(self._tensors.values())

    @property
    def state_bytes(self) -> int:
        """What it keeps once every parameter has had a gradient, but for single numbers."""
        pairs = zip(self._parameters, self._matrices, strict=True)
        return sum(parameter.nbytes * self._tensors[matrix] for parameter, matrix in pairs)

    def step(self, lr: float, parameters: Sequence[torch.Tensor] | None = None) -> None:
        """With `parameters`: on these, which take the place of the first ones, with the same state."""
        import torch

        every = self._parameters if parameters is None else parameters
        groups: dict[tuple[torch.dtype, bool, bool], list[int]] = {}
        for index, parameter in enumerate(every):
            if parameter.grad is not None:
                matrix = self._matrices[index]
                first = self._keeps[matrix] and not self.states[index]
                groups.setdefault((parameter.dtype, matrix, first), []).append(index)
        with torch.no_grad():
            for (_, matrix, first), members in groups.items():
                changed = [every[index] for index in members]
                gradients = [each.grad for each in changed if each.grad is not None]
                states = [self.states[index] for index in members]
                rule = self._rule.matrices if matrix and self._rule.matrices is not None else self._rule
                rule.update(changed, gradients, states, first=first, lr=lr, **self._settings)
