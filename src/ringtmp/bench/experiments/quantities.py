"""What a record says, a value per step, ready for an interval: seconds, idleness, bytes, joules. Pure.

The first `warm_up` steps count for nothing here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from ringtmp.bench.record import Record, Track
from ringtmp.launch.devices import Device
from ringtmp.metrics.energy import Load, Watts


class Power(msgspec.Struct, frozen=True):
    """One device's watts, and the part of its cores that a node keeps busy. Modelled joules restate time and bytes."""

    watts: Watts
    share: float = 1.0


def powers(devices: Sequence[Device], threads: int = 1) -> list[Power] | None:
    """None where the watts of a device are not known."""
    found = []
    for device in devices:
        if device.idle_w is None or device.busy_w is None:
            return None
        watts = Watts(device.idle_w, device.busy_w, device.nj_per_byte)
        found.append(Power(watts, device.busy_share(threads)))
    return found


def step_s(record: Record, warm_up: int) -> list[float]:
    return list(record.took_s[warm_up:])


def idle_shares(record: Record, warm_up: int) -> list[float]:
    """Of all workers' time in a step."""
    found = []
    for step in range(warm_up, len(record.steps)):
        idle = sum(track.idle_s[step] for track in record.workers)
        whole = idle + sum(track.busy_s[step] for track in record.workers)
        if whole > 0:
            found.append(idle / whole)
    return found


def sent_bytes(record: Record, warm_up: int) -> list[float]:
    return [float(sum(track.sent_bytes[step] for track in record.tracks)) for step in range(warm_up, len(record.steps))]


def busiest_bytes(record: Record, warm_up: int) -> float:
    """Per step, in the fuller direction of the fullest link."""
    steps = max(1, len(record.steps) - warm_up)
    return max(
        max(sum(track.sent_bytes[warm_up:]), sum(track.received_bytes[warm_up:])) / steps for track in record.tracks
    )


def step_joules(record: Record, power: Sequence[Power], warm_up: int) -> list[float]:
    """All nodes: idle watts for as long as the step takes, more while a node is busy, and the bytes."""
    return [sum(load.joules for load in loads(record, power, step)) for step in range(warm_up, len(record.steps))]


def loads(record: Record, power: Sequence[Power], step: int) -> list[Load]:
    """What the model is applied to, a node each. A node lost or never there costs nothing."""
    return [_load(record, track, power[track.node], step) for track in record.tracks]


def run_loads(record: Record, power: Sequence[Power], warm_up: int) -> list[Load]:
    """Of all steps that count together, a node each."""
    return [node_load(record, track, power[track.node], warm_up) for track in record.tracks]


def node_load(record: Record, track: Track, power: Power, warm_up: int) -> Load:
    every = [_load(record, track, power, step) for step in range(warm_up, len(record.steps))]
    return Load(
        power.watts,
        sum(each.seconds for each in every),
        sum(each.busy_s for each in every),
        sum(each.bytes for each in every),
        power.share,
    )


def _load(record: Record, track: Track, power: Power, step: int) -> Load:
    # A node's own record of a step may reach a little beyond it: it is busy for no longer than there was time.
    busy = min(track.busy_s[step], record.took_s[step])
    moved = track.sent_bytes[step] + track.received_bytes[step]
    return Load(power.watts, record.took_s[step], busy, float(moved), power.share)


def reached(loss: Sequence[float], target: float, window: int) -> int | None:
    """Index of the first step whose loss, averaged over the last `window` steps, is at most `target`; None: never."""
    for index in range(window - 1, len(loss)):
        mean = sum(loss[index - window + 1 : index + 1]) / window
        if math.isfinite(mean) and mean <= target:
            return index
    return None
