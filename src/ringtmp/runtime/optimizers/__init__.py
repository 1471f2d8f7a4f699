"""Optimizers: what each takes, what it keeps, and the kernel it calls. To add one, write a file and name its rule below.

Updates call torch's fused kernels with the arguments of `torch.optim` with `fused=True`, or where there are none the same
operators in the same order, hence the same bits (a test holds them together), but without importing torch's compiler, which
`torch.optim` does on its first step: that would cost every node two seconds at its start and 70 MiB for good. Torch itself
is loaded by the first update: settings are checked without.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ringtmp.errors import unknown
from ringtmp.model.matrices_for_muon import hidden_matrices
from ringtmp.runtime.optimizers.adagrad import ADAGRAD
from ringtmp.runtime.optimizers.adam import ADAM, ADAMW
from ringtmp.runtime.optimizers.lion import LION
from ringtmp.runtime.optimizers.muon import MUON
from ringtmp.runtime.optimizers.nadam import NADAM
from ringtmp.runtime.optimizers.sgd import SGD
from ringtmp.runtime.optimizers.update_rule import COUNTER, Optimizer, Setting, UpdateRule

if TYPE_CHECKING:
    import torch

    from ringtmp.model.portable_layer import Layer

__all__ = [
    "COUNTER", "ELSEWHERE", "NUMBERS", "OPTIMIZERS", "STATE_KEYS", "Optimizer", "Setting", "UpdateRule",
    "checked_optimizer", "delay_warning", "make_optimizer", "state_tensors", "state_values",
]  # fmt: skip

_RULES = (SGD, ADAM, ADAMW, NADAM, MUON, LION, ADAGRAD)
OPTIMIZERS: dict[str, UpdateRule] = {rule.name: rule for rule in _RULES}
#: To use where there are no hidden matrices.
ELSEWHERE = ADAMW.name
#: Every name a state may have, and which of them are single numbers.
STATE_KEYS = frozenset(
    name for rule in _RULES for name in (*rule.state, *(rule.matrices.state if rule.matrices else ()))
)
NUMBERS = frozenset(name for rule in _RULES for name in rule.numbers)


def checked_optimizer(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, complete and typed; refuses names and values no optimizer takes."""
    if name not in OPTIMIZERS:
        raise unknown("optimizer", name, OPTIMIZERS)
    return OPTIMIZERS[name].checked(settings)


def make_optimizer(
    name: str, settings: Mapping[str, Any], parameters: Sequence[torch.Tensor], matrices: Sequence[bool] = ()
) -> Optimizer:
    """Settings as `checked_optimizer` leaves them; the learning rate comes with every step. `matrices`: which of the
    parameters are hidden matrices."""
    return Optimizer(OPTIMIZERS[name], settings, parameters, matrices)


def state_tensors(name: str, settings: Mapping[str, Any]) -> int:
    """Tensors of a parameter's size that the optimizer keeps for each, at most, once it has made a step."""
    return make_optimizer(name, settings, ()).state_tensors


def state_values(name: str, settings: Mapping[str, Any], layer: Layer) -> int:
    """Values that the optimizer keeps for a layer, once it has made a step."""
    rule = OPTIMIZERS[name]
    in_matrices = 0
    if rule.matrices is not None:
        hidden = hidden_matrices(layer)
        in_matrices = sum(math.prod(each.shape) for each in layer.tensors if each.name in hidden)
    return rule.tensors(settings, True) * in_matrices + rule.tensors(settings) * (layer.trained - in_matrices)


def delay_warning(optimizer: str, settings: Mapping[str, Any], staleness: int) -> str | None:
    """What is known to go wrong with delayed gradients at such a learning rate. Momentum counts: on a slope of curvature c
    plain descent is stable up to lr = 2 (1 + momentum) / c, with a delay only up to (1 - momentum) / c."""
    rule = OPTIMIZERS[optimizer]
    lr, momentum, limit = settings["lr"], settings.get(rule.summing, 0.0), rule.delay_limit
    rate = lr / (1 - momentum) if momentum < 1 else math.inf
    if staleness == 0 or rate < limit:
        return None
    given = f"lr {lr:g}" + (f" and momentum {momentum:g}, which act as {rate:.3g}" if momentum else "")
    return (
        f"--staleness 1 with {optimizer}, {given}: from {limit:g} on, training that works without delay was seen to collapse "
        f"with it: use a smaller --lr{' or momentum' if momentum else ''}, or --staleness 0"
    )
