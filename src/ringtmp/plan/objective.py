"""What a plan makes as small as possible: the time of a step, its energy, or the memory of the fullest device. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ringtmp.errors import UsageError
from ringtmp.plan.devices import Device
from ringtmp.plan.memory_forecast import MemoryForecast
from ringtmp.plan.simulated_step import Simulated
from ringtmp.units import bytes_text, joules_text, seconds_text

Objective = Literal["time", "energy", "memory"]
TIME: Objective = "time"


def cost_of(objective: Objective, step: Simulated, memory: Sequence[MemoryForecast]) -> float:
    """Seconds a step, modelled joules a step (metrics/energy.py), or bytes on the device that needs most."""
    if objective == "energy":
        return step.joules if step.joules is not None else float("inf")
    return step.step_s if objective == TIME else max(each.total_bytes for each in memory)


def cost_text(objective: Objective, cost: float) -> str:
    if objective == "energy":
        return f"{joules_text(cost)} (modelled)"
    return seconds_text(cost) if objective == TIME else bytes_text(cost)


def told(objective: Objective, cost: float) -> str:
    """For people, what a plan was made for; empty for the usual."""
    if objective == "energy":
        return f"for the least energy: {cost_text(objective, cost)} a step over the devices that take part"
    return "" if objective == TIME else f"for the least memory: at most {cost_text(objective, cost)} on a device"


def require_watts(objective: Objective, devices: Sequence[Device]) -> None:
    """UsageError where nobody could say what is least."""
    unknown = [each.name for each in devices if each.idle_w is None or each.busy_w is None]
    if objective == "energy" and unknown:
        raise UsageError(
            f"--for energy needs to know what every device draws, and nothing is known of {', '.join(unknown[:4])}"
            f"{' and others' if len(unknown) > 4 else ''}: give idle_w and busy_w, or a preset, in a devices file (ringtmp "
            "plan --devices), or use --for time"
        )
