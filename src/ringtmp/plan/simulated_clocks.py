"""The clocks of a simulation: a processor under its quota, and the lines between devices.

Pure and deterministic; every call is O(1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ringtmp.plan.devices import Device, Paths, Quota

#: Of a quota: less than this is no work left, but what floating point leaves.
ROUNDING = 1e-9


class Processor:
    """When work that begins now is done. One piece of work at a time, starts never go back."""

    def __init__(self, quota: Quota | None, speed: float) -> None:
        self._quota = quota
        self._speed = speed
        self._period = -1  # the period of the last work
        self._left_s = 0.0  # of its quota

    def finish(self, start: float, profiled_s: float, own_s: float = 0.0) -> float:
        """`profiled_s` is work in seconds of the profiled machine, `own_s` in seconds of this one."""
        work = profiled_s / self._speed + own_s
        quota = self._quota
        if quota is None:
            return start + work
        period = math.floor(start / quota.period_s)
        left = self._left_s if period == self._period else quota.run_s
        now = min(left, (period + 1) * quota.period_s - start)
        if work <= now:
            self._period, self._left_s = period, left - work
            return start + work
        # What does not fit in this period takes whole quotas of the next ones, and part of a last.
        rest = work - now
        whole = max(math.ceil(rest / quota.run_s - ROUNDING) - 1, 0)
        last = rest - whole * quota.run_s
        self._period, self._left_s = period + 1 + whole, quota.run_s - last
        return self._period * quota.period_s + last


class Lines:
    """Every device's line, both directions, first come first served, cut through: what goes in is going out already.

    A message of s bytes from a to b takes s / min(up of a, down of b) and both latencies when the lines are free.
    """

    def __init__(self, devices: Sequence[Device], paths: Paths | None = None) -> None:
        self._up = [device.link.up_bytes_per_s for device in devices]
        self._down = [device.link.down_bytes_per_s for device in devices]
        self._latency = [device.link.latency_s for device in devices]
        self._paths = _by_number(devices, paths)
        self._up_free = [0.0] * len(devices)
        self._down_free = [0.0] * len(devices)
        self.carried: dict[tuple[int, int], float] = {}  # bytes, all messages so far

    def depart(self, now: float, source: int, target: int, size: float) -> float:
        """When the message begins to leave; call `arrive` at that time, not before: lines serve in order of time."""
        start = max(now, self._up_free[source])
        path = self._paths.get((source, target))
        rate = self._up[source] if path is None else min(self._up[source], path[0])
        self._up_free[source] = start + size / rate
        self.carried[source, target] = self.carried.get((source, target), 0.0) + size
        return start

    def carry(self, source: int, target: int, size: float) -> None:
        """Bytes whose time is counted elsewhere."""
        self.carried[source, target] = self.carried.get((source, target), 0.0) + size

    def arrive(self, start: float, source: int, target: int, size: float) -> float:
        """When the last byte of a message that begins to leave at `start` is there."""
        path = self._paths.get((source, target))
        up, latency = self._up[source], self._latency[source] + self._latency[target]
        if path is not None:
            up, latency = min(up, path[0]), path[1]
        begin = max(start + latency, self._down_free[target])
        end = max(start + size / up + latency, begin + size / self._down[target])
        self._down_free[target] = end
        return end


def _by_number(devices: Sequence[Device], paths: Paths | None) -> dict[tuple[int, int], tuple[float, float]]:
    if not paths:
        return {}
    number = {device.name: index for index, device in enumerate(devices)}
    return {
        (number[source], number[target]): (path.bytes_per_s, path.latency_s)
        for (source, target), path in paths.items()
        if source in number and target in number
    }
