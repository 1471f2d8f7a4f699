"""The learning rate of every step: a plain function of its number, the same on every node. To add a schedule, add its entry."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ringtmp.errors import UsageError, unknown


@dataclass(frozen=True)
class RateSchedule:
    """`settings`: their defaults; None: must be given, `total` by the run. `factor`: of the base rate, after the warm-up."""

    name: str
    settings: Mapping[str, float | None]
    factor: Callable[[Mapping[str, Any], int], float]


def _cosine(settings: Mapping[str, Any], step: int) -> float:
    warmup, floor = settings["warmup"], settings["floor"]
    progress = min(1.0, (step - warmup) / max(1, settings["total"] - warmup))
    return float(floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2)


_SCHEDULES = (
    RateSchedule("constant", {"warmup": 0}, lambda settings, step: 1.0),
    RateSchedule(
        "step",
        {"every": None, "factor": 0.1, "warmup": 0},
        lambda settings, step: float(settings["factor"] ** (step // settings["every"])),
    ),
    RateSchedule("cosine", {"total": None, "floor": 0.0, "warmup": 0}, _cosine),
)
RATE_SCHEDULES: dict[str, RateSchedule] = {each.name: each for each in _SCHEDULES}


def checked_schedule(schedule: Mapping[str, Any], total_steps: int | None) -> dict[str, Any]:
    """The learning-rate schedule with every number in it, so that resuming does not change it."""
    kind = schedule.get("kind", "constant")
    if kind not in RATE_SCHEDULES:
        raise unknown("learning-rate schedule", str(kind), RATE_SCHEDULES)
    defaults = RATE_SCHEDULES[kind].settings
    full: dict[str, Any] = {"kind": kind}
    for key, default in defaults.items():
        value = schedule.get(key, default)
        if key == "total" and value is None:
            value = total_steps
        if value is None:
            raise UsageError(f"schedule {kind} needs {key}=N")
        least = 1 if default is None else 0
        if not isinstance(value, int | float) or isinstance(value, bool) or value < least:
            raise UsageError(f"schedule {kind}: {key}={value!r} must be a positive number")
        full[key] = value
    for key in schedule:
        if key not in full:
            raise unknown(f"setting of schedule {kind}", key, defaults)
    return full


def learning_rate(schedule: Mapping[str, Any], base: float, step: int) -> float:
    """Of step 0, 1, 2, ... The warm-up rises linearly over its first steps."""
    warmup = schedule["warmup"]
    if step < warmup:
        return float(base * (step + 1) / warmup)
    return base * RATE_SCHEDULES[schedule["kind"]].factor(schedule, step)
