"""The same work done another way, on paper: a strategy and devices in, a simulated step or the reason against it out.

Equal numbers of devices for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ringtmp.errors import RingError
from ringtmp.plan.devices import Device, LayerCost, Paths
from ringtmp.plan.memory_forecast import MemoryForecast, require_fit
from ringtmp.plan.planner import PlanOptions
from ringtmp.plan.simulation import Simulated
from ringtmp.strategies import registry
from ringtmp.strategies.registry import Choice


@dataclass(frozen=True, slots=True)
class Way:
    """`problem` is empty for a way that works; the step is simulated even where memory is too small."""

    name: str
    simulated: Simulated | None
    memory: tuple[MemoryForecast, ...]
    problem: str = ""


def compare(
    choice: Choice,
    layers: Sequence[LayerCost],
    devices: Sequence[Device],
    options: PlanOptions,
    paths: Paths | None = None,
) -> Way:
    name, strategy = registry.spelled(choice), registry.get(choice.name)
    settings = strategy.read(choice.settings)
    try:
        settings.check(len(devices), str(choice.run.get("wire", "float32")))
        simulated, memory = strategy.simulate(settings, layers, devices, options, paths)
    except RingError as error:
        return Way(name, None, (), str(error))
    if not strategy.splits_layers:  # else what does not fit is not planned
        try:
            require_fit(memory, options.ring.microbatches)
        except RingError as error:
            return Way(name, simulated, memory, str(error).rpartition(": ")[0])
    return Way(name, simulated, memory)
