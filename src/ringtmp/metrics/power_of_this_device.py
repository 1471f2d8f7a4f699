"""The device this process runs on: its watts, its meter if it has one. Found once, when first asked for.

RINGTMP_WATTS=idle,busy[,nanojoules per byte[,share]]   what it needs, where no meter tells (the lab sets it)
RINGTMP_METER=auto|off|hwmon|pmic|rapl|nvml             which meter to read
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
from collections.abc import Callable, Mapping
from pathlib import Path

from ringtmp.errors import UsageError, unknown
from ringtmp.metrics import power_meters
from ringtmp.metrics.energy import ETHERNET_NJ_PER_BYTE, PRESETS, Power, Watts

WATTS, METER = "RINGTMP_WATTS", "RINGTMP_METER"
#: How boards call themselves -> preset.
_BOARDS = {
    "Raspberry Pi Zero 2": "pi-zero-2w",
    "Raspberry Pi 3": "pi-3b",
    "Raspberry Pi 4": "pi-4b",
    "Raspberry Pi 5": "pi-5",
    "Jetson Nano": "jetson-nano",
}
_MOST_WATTS = 1e4


@functools.cache
def meter() -> Callable[[], float] | None:
    """Joules since some moment; None without a meter. Asked for before the first step, so a wrong setting is told then."""
    if (text := os.environ.get(WATTS)) is not None:
        parse_watts(text)
    found = _meter()
    return found.joules if found is not None else None


@functools.cache
def power(threads: int) -> Power | None:
    found = _meter()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return describe(Path("/"), os.environ, threads, cores, found.name if found is not None else "")


@functools.cache
def _meter() -> power_meters.Meter | None:
    wanted = os.environ.get(METER, "auto")
    if wanted not in power_meters.NAMES:
        raise unknown(METER, wanted, power_meters.NAMES)
    # An emulated device has no meter: the one of this machine sees all of them and whatever else it does.
    if wanted == "off" or os.environ.get("RINGTMP_EMULATED") == "1":
        return None
    return power_meters.find(Path("/"), wanted=wanted)


def describe(
    root: Path, environment: Mapping[str, str], threads: int, cores: int, meter_name: str = ""
) -> Power | None:
    """An emulated device stands for one of its own, and nobody knows its watts unless it was described with them; else
    nodes with the same boot share a machine."""
    emulated = environment.get("RINGTMP_EMULATED") == "1"
    host = environment.get("RINGTMP_DEVICE", "") if emulated else _boot(root)
    share = min(1.0, threads / cores)
    if (text := environment.get(WATTS)) is not None:
        watts, given_share = parse_watts(text)
        return Power("given", watts, share if given_share is None else given_share, host, meter_name)
    if emulated:
        return None
    if (known := _board(root)) is not None:
        return Power(known, PRESETS[known], share, host, meter_name)
    return Power("laptop (assumed)", PRESETS["laptop"], share, host, meter_name)


def parse_watts(text: str) -> tuple[Watts, float | None]:
    try:
        numbers = [float(each) for each in text.split(",")]
    except ValueError:
        numbers = []
    if not 2 <= len(numbers) <= 4 or not all(0 <= each <= _MOST_WATTS for each in numbers) or numbers[0] > numbers[1]:
        raise UsageError(f"{WATTS}={text!r}: give idle,busy[,nanojoules per byte[,share]] in watts, idle at most busy")
    idle_w, busy_w, *rest = numbers
    return Watts(idle_w, busy_w, rest[0] if rest else ETHERNET_NJ_PER_BYTE), rest[1] if len(rest) > 1 else None


def watts_text(watts: Watts, share: float) -> str:
    return f"{watts.idle_w:g},{watts.busy_w:g},{watts.nj_per_byte:g},{share:g}"


def _board(root: Path) -> str | None:
    try:
        name = (root / "proc/device-tree/model").read_bytes().decode(errors="replace")
    except OSError:
        return None
    return next((preset for part, preset in _BOARDS.items() if part in name), None)


def _boot(root: Path) -> str:
    """Equal in all processes of one machine, and no name of it."""
    try:
        text = (root / "proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        text = platform.node()
    return hashlib.sha256(text.encode()).hexdigest()[:12]
