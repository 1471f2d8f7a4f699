"""Layers and devices in round numbers, for tests of plans."""

from __future__ import annotations

import math

from ringtmp.plan.devices import Device, LayerCost, Link, Measured


def layer(
    name: str = "layer", forward_s: float = 1.0, backward_s: float = 1.0, output: float = 0.0, stored: float = 0.0,
    weights: int = 0, update_s: float = 0.0, parameters: bool = True,
) -> LayerCost:  # fmt: skip
    """Measured with one sample; times and bytes grow with the number of samples."""
    measured = (Measured(1, forward_s, backward_s, stored, output),)
    return LayerCost(name, measured, weights, weights, 0, update_s, parameters)


def layers(count: int, **each: float) -> list[LayerCost]:
    return [layer(f"layer{index}", **each) for index in range(count)]  # type: ignore[arg-type]


def device(name: str = "device", speed: float = 1.0, rate: float = math.inf, latency_s: float = 0.0) -> Device:
    return Device(name, speed, link=Link(rate, rate, latency_s))


def devices(count: int, **each: float) -> list[Device]:
    return [device(f"device{index}", **each) for index in range(count)]
