"""What makes an update: optimizer settings, the learning rate of a step, keyed randomness. The same on every node."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping
from typing import Any

from ringtmp.errors import UsageError, unknown

_ALLOWED: dict[str, dict[str, type]] = {
    "sgd": {"lr": float, "momentum": float, "nesterov": bool, "weight_decay": float, "dampening": float},
    "adam": {"lr": float, "beta1": float, "beta2": float, "eps": float, "weight_decay": float, "amsgrad": bool},
    "adamw": {"lr": float, "beta1": float, "beta2": float, "eps": float, "weight_decay": float, "amsgrad": bool},
}
DEFAULT_LR = {"sgd": 0.1, "adam": 2e-3, "adamw": 2e-3}
_SCHEDULES: dict[str, dict[str, float | None]] = {
    "constant": {"warmup": 0},
    "step": {"every": None, "factor": 0.1, "warmup": 0},
    "cosine": {"total": None, "floor": 0.0, "warmup": 0},
}


def checked_optimizer(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, complete and typed; refuses names and values no optimizer takes."""
    if name not in _ALLOWED:
        raise unknown("optimizer", name, _ALLOWED)
    given = dict(settings)
    if "betas" in given:
        given["beta1"], given["beta2"] = given.pop("betas")
    for key, value in given.items():
        if key not in _ALLOWED[name]:
            raise unknown(f"setting of {name}", key, _ALLOWED[name])
        wanted = _ALLOWED[name][key]
        if isinstance(value, bool) != (wanted is bool) or not isinstance(value, int | float):
            raise UsageError(f"{name}: {key}={value!r} must be a {'yes or no' if wanted is bool else 'number'}")
        given[key] = wanted(value)
    lr = given.setdefault("lr", DEFAULT_LR[name])
    if not (math.isfinite(lr) and lr >= 0):
        raise UsageError(f"{name}: lr={lr} must be a finite number of at least 0")
    for key, low, high in (
        ("momentum", 0.0, math.inf), ("weight_decay", 0.0, math.inf), ("eps", 0.0, math.inf), ("beta1", 0.0, 1.0),
        ("beta2", 0.0, 1.0), ("dampening", -math.inf, math.inf),
    ):  # fmt: skip
        if key in given and not (low <= given[key] < high):
            raise UsageError(f"{name}: {key}={given[key]} must be at least {low:g} and below {high:g}")
    if given.get("nesterov") and (not given.get("momentum") or given.get("dampening")):
        raise UsageError("sgd: nesterov needs a momentum above 0 and no dampening")
    return given


def checked_schedule(schedule: Mapping[str, Any], total_steps: int | None) -> dict[str, Any]:
    """The learning-rate schedule with every number in it, so that resuming does not change it."""
    kind = schedule.get("kind", "constant")
    if kind not in _SCHEDULES:
        raise unknown("learning-rate schedule", str(kind), _SCHEDULES)
    full: dict[str, Any] = {"kind": kind}
    for key, default in _SCHEDULES[kind].items():
        value = schedule.get(key, default)
        if key == "total" and value is None:
            value = total_steps
        if value is None:
            raise UsageError(f"schedule {kind} needs {key}=N")
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or value < 0
            or (key in ("every", "total") and value < 1)
        ):
            raise UsageError(f"schedule {kind}: {key}={value!r} must be a positive number")
        full[key] = value
    for key in schedule:
        if key not in full:
            raise unknown(f"setting of schedule {kind}", key, _SCHEDULES[kind])
    return full


def learning_rate(schedule: Mapping[str, Any], base: float, step: int) -> float:
    """Of step 0, 1, 2, ... The warm-up rises linearly over its first steps."""
    warmup = schedule["warmup"]
    if step < warmup:
        return float(base * (step + 1) / warmup)
    if schedule["kind"] == "step":
        return float(base * schedule["factor"] ** (step // schedule["every"]))
    if schedule["kind"] == "cosine":
        span = max(1, schedule["total"] - warmup)
        progress = min(1.0, (step - warmup) / span)
        floor = schedule["floor"]
        return float(base * (floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2))
    return base


#: Where training with a delay of one update was seen to collapse that went well without (docs/exactness.md has the table).
DELAY_LIMITS = {"sgd": 1.0, "adam": 0.1, "adamw": 0.1}


def delay_warning(optimizer: str, settings: Mapping[str, Any], staleness: int) -> str | None:
    """What is known to go wrong with delayed gradients at such a learning rate. Momentum counts: on a slope of curvature c
    plain descent is stable up to lr = 2 (1 + momentum) / c, with a delay only up to (1 - momentum) / c."""
    lr, momentum = settings["lr"], settings.get("momentum", 0.0)
    rate = lr / (1 - momentum) if momentum < 1 else math.inf
    if staleness == 0 or rate < DELAY_LIMITS[optimizer]:
        return None
    given = f"lr {lr:g}" + (f" and momentum {momentum:g}, which act as {rate:.3g}" if momentum else "")
    return (
        f"--staleness 1 with {optimizer}, {given}: from {DELAY_LIMITS[optimizer]:g} on, training that works without delay was "
        f"seen to collapse with it: use a smaller --lr{' or momentum' if momentum else ''}, or --staleness 0"
    )


def random_key(seed: int, step: int, microbatch: int, layer: int) -> int:
    """The seed of a layer's randomness in one microbatch: depends on nothing else, above all not on the cut."""
    digest = hashlib.blake2b(struct.pack("<4q", seed, step, microbatch, layer), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
