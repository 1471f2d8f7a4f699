"""The same work done another way, on paper: a strategy and devices in, a simulated step or the reason against it out.

Equal numbers of devices for all.
"""

from __future__ import annotations

from dataclasses import dataclass

from ringtmp.errors import RingError
from ringtmp.plan.memory_forecast import MemoryForecast, require_fit
from ringtmp.plan.simulated_step import Simulated
from ringtmp.strategies import registry
from ringtmp.strategies.base import Task
from ringtmp.strategies.registry import Choice


@dataclass(frozen=True, slots=True)
class Way:
    """`problem` is empty for a way that works; the step is simulated even where memory is too small."""

    name: str
    simulated: Simulated | None
    memory: tuple[MemoryForecast, ...]
    problem: str = ""


def compare(choice: Choice, task: Task) -> Way:
    name, strategy = registry.spelled(choice), registry.get(choice.name)
    settings = strategy.read(choice.settings)
    try:
        wire = str(choice.run.get("wire", "float32"))
        settings.check(len(task.devices), wire)
        strategy.refuse_wire(wire)
        made = strategy.simulate(settings, task)
    except RingError as error:
        return Way(name, None, (), str(error))
    try:
        require_fit(made.memory, task.options.ring.microbatches)
    except RingError as error:
        return Way(name, made.step, made.memory, str(error).rpartition(": ")[0])
    return Way(name, made.step, made.memory)
