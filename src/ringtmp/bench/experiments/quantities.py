"""What a record says, a value per step, ready for an interval: seconds, idleness, bytes, joules. Pure.

The first `warm_up` steps count for nothing here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from ringtmp.bench.record import Record, Track
from ringtmp.launch.devices import Device

#: Sending and receiving a byte, beside what it costs the processor: of the order of an Ethernet or Wi-Fi interface.
BYTE_NJ = 10.0


class Power(msgspec.Struct, frozen=True):
    """One device's watts and what a byte costs. Modelled joules restate time and bytes."""

    idle_w: float
    busy_w: float
    byte_nj: float = BYTE_NJ

    def varied(self, idle: float = 1.0, busy: float = 1.0, byte: float = 1.0) -> Power:
        """`busy` varies what computing adds, so that a busy device never takes less than an idle one."""
        idle_w = self.idle_w * idle
        return Power(idle_w, idle_w + (self.busy_w - self.idle_w) * busy, self.byte_nj * byte)


def powers(devices: Sequence[Device]) -> list[Power] | None:
    """None where the watts of a device are not known."""
    if any(device.idle_w is None or device.busy_w is None for device in devices):
        return None
    return [Power(device.idle_w or 0.0, device.busy_w or 0.0) for device in devices]


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
    return [
        sum(_joules(record, track, power[track.node], step) for track in record.tracks)
        for step in range(warm_up, len(record.steps))
    ]


def node_joules(record: Record, track: Track, power: Power, warm_up: int) -> float:
    """Per step, of one node."""
    every = [_joules(record, track, power, step) for step in range(warm_up, len(record.steps))]
    return sum(every) / max(1, len(every))


def _joules(record: Record, track: Track, power: Power, step: int) -> float:
    # A node's own records of one step may lie a little outside it: busy is bounded by what there was.
    busy = min(track.busy_s[step], record.took_s[step])
    moved = track.sent_bytes[step] + track.received_bytes[step]
    return power.idle_w * record.took_s[step] + (power.busy_w - power.idle_w) * busy + power.byte_nj * 1e-9 * moved


def reached(loss: Sequence[float], target: float, window: int) -> int | None:
    """Index of the first step whose loss, averaged over the last `window` steps, is at most `target`; None: never."""
    for index in range(window - 1, len(loss)):
        mean = sum(loss[index - window + 1 : index + 1]) / window
        if math.isfinite(mean) and mean <= target:
            return index
    return None
