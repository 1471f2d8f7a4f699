"""What each emulated device gets of this machine: cores, the processors it runs on, link rate.

Pure. A device with less than a core stays on one processor: spread over two, its input/output thread could use up the
quota on the second while the computing thread waits for it on the first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from ringtmp.errors import UsageError
from ringtmp.lab.devices_file import Device
from ringtmp.units import bytes_text

#: Rounding must not make 4 x 0.25 more than one core.
_SLACK = 1e-6


class Share(msgspec.Struct, frozen=True):
    device: Device
    cpu: float  # cores, after scaling
    processors: tuple[int, ...]  # where it may run
    link_mbps: float  # after scaling

    @property
    def memory_bytes(self) -> int:
        return round(self.device.memory_mb * 2**20)


def share_out(
    devices: Sequence[Device], processors: Sequence[int], memory_bytes: int, threads: int, may_scale: bool
) -> tuple[float, tuple[Share, ...]]:
    """The factor all speeds are multiplied by (1 unless `may_scale`), and what each device gets."""
    _check_memory(devices, memory_bytes)
    wanted = [device.wanted_cpu(threads) for device in devices]
    scale = 1.0
    while True:
        cpu = [each * scale for each in wanted]
        placed, fullest = place(cpu, processors)
        overload = max(sum(cpu) / len(processors), fullest)
        if overload <= 1 + _SLACK:
            break
        if not may_scale:
            listed = ", ".join(f"{device.name} {each:g}" for device, each in zip(devices, wanted, strict=True))
            pinned = "" if sum(wanted) > len(processors) else " if no device with less than a core may use two"
            raise UsageError(
                f"the devices need {sum(wanted):g} cores ({listed}), but this machine has {len(processors)}{pinned}: "
                f"use fewer or slower devices, or --scale to slow every CPU and link by the same factor"
            )
        scale /= overload
    return scale, tuple(
        Share(device, cpu[index], placed[index], device.link_mbps * scale) for index, device in enumerate(devices)
    )


def place(cpu: Sequence[float], processors: Sequence[int]) -> tuple[list[tuple[int, ...]], float]:
    """Processors for each share, the largest share first onto the emptiest; and the load of single-processor shares on
    the fullest one (larger shares move aside by themselves)."""
    load = dict.fromkeys(processors, 0.0)
    pinned = dict.fromkeys(processors, 0.0)
    placed: list[tuple[int, ...]] = [()] * len(cpu)
    for index in sorted(range(len(cpu)), key=lambda each: -cpu[each]):
        width = min(math.ceil(cpu[index] - _SLACK), len(processors))
        chosen = sorted(processors, key=lambda each: load[each])[:width]
        for each in chosen:
            load[each] += cpu[index] / width
            pinned[each] += cpu[index] if width == 1 else 0.0
        placed[index] = tuple(sorted(chosen))
    return placed, max(pinned.values())


def _check_memory(devices: Sequence[Device], memory_bytes: int) -> None:
    wanted = sum(device.memory_mb for device in devices) * 2**20
    if wanted > memory_bytes:
        raise UsageError(
            f"the devices have {bytes_text(wanted)} of memory together, but this machine has {bytes_text(memory_bytes)} "
            f"free: use fewer devices or a smaller memory_mb (--scale does not help: it slows CPUs and links only)"
        )
