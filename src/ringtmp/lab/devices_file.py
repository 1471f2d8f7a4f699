"""The devices file: what each emulated device has, checked before anything is started.

Pure: text in, frozen Devices out, and back. The first device is the master.

    [[device]]
    name = "desk"
    preset = "pi-4b"            # or cpu = 0.5, memory_mb = 1024, link_mbps = 100
    latency_ms = 1              # optional, like idle_w, busy_w, nj_per_byte and host
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ringtmp.errors import UsageError, unknown
from ringtmp.launch.device_names import checked_name
from ringtmp.metrics.energy import ETHERNET_NJ_PER_BYTE, Watts
from ringtmp.metrics.energy import PRESETS as WATTS

#: Addresses 10.77.0.1 to 10.77.0.200.
MAX_DEVICES = 200
#: The network between the devices has this name.
RESERVED = "switch"


class Preset(msgspec.Struct, frozen=True):
    cores: int
    core_speed: float  # of one core in float32 matrix products; one core of `laptop` is 1
    memory_mb: float
    link_mbps: float
    watts: Watts


# Where the numbers come from:
#   [hpl]     https://github.com/geerlingguy/top500-benchmark, results table: Linpack Gflop/s.
#   [peak]    float32 operations per cycle and core (Cortex-A53 4, A57 and A72 8, A76 16, x86 with AVX2 32) times clock.
#             Against [hpl] it is within 15 % where both are known, so it stands in where Linpack is not known.
#   [maker]   the maker's product page: cores, memory, network.
#   [assumed] no measurement found.
# Watts, and where they come from, are in metrics/energy.py.
# One core of `laptop` is taken to be one core of the machine the lab runs on: on a faster one every device is faster.
PRESETS = {
    # 4 x A53 at 1.0 GHz [maker]; 4 / 90 Gflop/s [peak] (Linpack runs out of its 512 MB); 2.4 GHz Wi-Fi, one stream:
    # 72 Mbit/s on air [maker], about 40 in a transfer [assumed]
    "pi-zero-2w": Preset(4, 0.045, 512, 40, WATTS["pi-zero-2w"]),
    # 4 x A53 at 1.2 GHz, 1 GB, 100 Mbit/s Ethernet [maker]; 4.8 / 90 Gflop/s [peak]
    "pi-3b": Preset(4, 0.053, 1024, 100, WATTS["pi-3b"]),
    # 4 x A72 at 1.8 GHz, 4 GB model, gigabit [maker]; 11.9 of 72.5 Gflop/s [hpl]
    "pi-4b": Preset(4, 0.164, 4096, 1000, WATTS["pi-4b"]),
    # 4 x A76 at 2.4 GHz, 8 GB model, gigabit [maker]; 30.2 of 72.5 Gflop/s [hpl]
    "pi-5": Preset(4, 0.417, 8192, 1000, WATTS["pi-5"]),
    # 4 x A57 at 1.479 GHz, 4 GB, gigabit, 10 W mode [maker]; 11.8 / 90 Gflop/s [peak]; CPU only
    "jetson-nano": Preset(4, 0.131, 4096, 1000, WATTS["jetson-nano"]),
    # 4 x86 cores of an i5-7400T, the unit of [hpl]: 72.5 Gflop/s; memory and gigabit [assumed]
    "laptop": Preset(4, 1.0, 16384, 1000, WATTS["laptop"]),
}

#: key -> smallest and largest value that makes sense
_BOUNDS = {
    "cpu": (0.01, 256.0),
    "memory_mb": (16.0, 4e6),
    "link_mbps": (0.1, 1e5),
    "latency_ms": (0.0, 1e4),
    "idle_w": (0.0, 1e4),
    "busy_w": (0.0, 1e4),
    "nj_per_byte": (0.0, 1e4),
}
_KEYS = ("name", "preset", *_BOUNDS, "host")


class Device(msgspec.Struct, frozen=True):
    name: str
    cpu: float  # cores of this machine it is worth in all
    core_speed: float  # and what one thread of it may use
    memory_mb: float  # MiB
    link_mbps: float
    latency_ms: float = 0.0
    idle_w: float | None = None
    busy_w: float | None = None
    host: str | None = None  # where the real device of this description lives; the lab does not go there
    preset: str | None = None
    nj_per_byte: float = ETHERNET_NJ_PER_BYTE

    def wanted_cpu(self, threads: int) -> float:
        """Cores of this machine that `threads` threads may use: four slow cores do not make one thread fast."""
        return min(self.cpu, self.core_speed * threads)

    def busy_share(self, threads: int) -> float:
        """Of its cores, those that `threads` threads keep busy: busy_w is what it needs when all are."""
        return self.wanted_cpu(threads) / self.cpu


def read(file: Path) -> tuple[Device, ...]:
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the devices file {file} cannot be read: {error}") from error
    return parse(text, str(file))


def parse(text: str, source: str) -> tuple[Device, ...]:
    """`source` is the file's name, for errors."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{source} is not TOML: {error}") from error
    for key in tables:
        if key != "device":
            raise _within(source, unknown("section", key, ["device"]))
    entries = tables.get("device")
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise UsageError(f"{source} has no device: write one [[device]] table for each, the master first")
    if len(entries) > MAX_DEVICES:
        raise UsageError(f"{source} has {len(entries)} devices; a lab holds at most {MAX_DEVICES}")
    devices = tuple(_device(entry, f"{source}, device {index + 1}") for index, entry in enumerate(entries))
    seen: dict[str, int] = {}
    for index, device in enumerate(devices):
        if device.name in seen:
            raise UsageError(
                f"{source}: devices {seen[device.name] + 1} and {index + 1} are both called {device.name!r}"
            )
        seen[device.name] = index
    return devices


def toml(devices: Sequence[Device]) -> str:
    """What `parse` makes these devices of."""
    tables = []
    for device in devices:
        # A preset also says how much of it one thread may use.
        worth = {"preset": device.preset} if device.preset else {"cpu": device.cpu}
        given = {
            "name": device.name,
            **worth,
            **{key: getattr(device, key) for key in (*_BOUNDS, "host") if key != "cpu"},
        }
        lines = [f"{key} = {json.dumps(value)}" for key, value in given.items() if value is not None]
        tables.append("\n".join(["[[device]]", *lines, ""]))
    return "\n".join(tables)


def _device(entry: dict[str, Any], where: str) -> Device:
    for key in entry:
        if key not in _KEYS:
            raise _within(where, unknown("key", key, _KEYS))
    name = _text(entry, "name", where)
    if name is None:
        raise UsageError(f"{where} has no name")
    try:
        checked_name("device", name)
    except UsageError as error:
        raise _within(where, error) from None
    where = f"{where} ({name})"
    if name == RESERVED:
        raise UsageError(f"{where}: {RESERVED!r} is the name of the network between the devices, choose another")
    numbers = {key: _number(entry, key, where) for key in _BOUNDS if key in entry}
    preset_name = _text(entry, "preset", where)
    preset = _preset(preset_name, where) if preset_name is not None else None
    if (preset is None) == ("cpu" not in numbers):
        have = "both preset and cpu" if preset is not None else "neither preset nor cpu"
        raise UsageError(f"{where} has {have}: give one of them (presets: {', '.join(PRESETS)})")
    if preset is not None:
        watts = {key: getattr(preset.watts, key) for key in ("idle_w", "busy_w", "nj_per_byte")}
        chosen = {"memory_mb": preset.memory_mb, "link_mbps": preset.link_mbps} | watts | numbers
        chosen |= {"cpu": preset.cores * preset.core_speed, "core_speed": preset.core_speed}
    else:
        for key in ("memory_mb", "link_mbps"):
            if key not in numbers:
                raise UsageError(f"{where} has no {key}: a device without a preset needs cpu, memory_mb and link_mbps")
        # Who gives a share means all of it, however many threads there are.
        chosen = numbers | {"core_speed": numbers["cpu"]}
    if chosen.get("idle_w", 0.0) > chosen.get("busy_w", math.inf):
        raise UsageError(f"{where}: idle_w {chosen['idle_w']:g} is more than busy_w {chosen['busy_w']:g}")
    return Device(name=name, host=_text(entry, "host", where), preset=preset_name, **chosen)


def _preset(name: str, where: str) -> Preset:
    if name not in PRESETS:
        raise _within(where, unknown("preset", name, PRESETS))
    return PRESETS[name]


def _text(entry: dict[str, Any], key: str, where: str) -> str | None:
    value = entry.get(key)
    if value is not None and (not isinstance(value, str) or not value):
        raise UsageError(f"{where}: {key} is {value!r}; it must be text")
    return value


def _number(entry: dict[str, Any], key: str, where: str) -> float:
    value = entry[key]
    least, most = _BOUNDS[key]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{where}: {key} is {value!r}; it must be a number")
    if not least <= value <= most:  # also not a number (nan)
        raise UsageError(f"{where}: {key} is {value:g}; it must be from {least:g} to {most:g}")
    return float(value)


def _within(where: str, error: UsageError) -> UsageError:
    return UsageError(f"{where}: {error}")
