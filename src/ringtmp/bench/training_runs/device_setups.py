"""Where jobs run: on nodes of this machine, or on emulated devices, whose file is written here. Pure."""

from __future__ import annotations

import msgspec

from ringtmp.bench.measuring.jobs import PYTHON
from ringtmp.lab.devices_file import Device

#: The name of the devices file beside a job's command.
DEVICES = "devices.toml"
#: -P: nothing in the folder it runs in can be imported by accident.
RINGTMP = (PYTHON, "-P", "-m", "ringtmp")


class Setting(msgspec.Struct, frozen=True):
    """Equal nodes, as `speed` has them."""

    name: str
    nodes: int
    share: float  # of a core, per node
    link_mbps: float | None  # None: no link between machines
    emulated: bool
    memory_mb: int = 2000

    @property
    def cores(self) -> float:
        return self.nodes * self.share

    @property
    def link_bytes_per_s(self) -> float:
        return float("inf") if self.link_mbps is None else self.link_mbps * 1e6 / 8

    @property
    def devices(self) -> tuple[Device, ...]:
        return equal_devices(self.nodes, self.share, self.link_mbps or 1000.0, self.memory_mb)

    @property
    def text(self) -> str:
        if not self.emulated:
            return f"{self.nodes} nodes, {self.share:g} core each, one machine"
        return f"{self.nodes} emulated devices x {self.share:g} core, {self.link_mbps:g} Mbit/s"


SETTINGS = {
    each.name: each
    for each in (
        Setting("two", 2, 1.0, None, emulated=False),
        Setting("lab-fast", 4, 0.45, 1000.0, emulated=True),
        Setting("lab-100", 4, 0.45, 100.0, emulated=True),
        Setting("lab-10", 4, 0.45, 10.0, emulated=True),
        Setting("lab-8", 8, 0.22, 1000.0, emulated=True),
        Setting("lab-8-100", 8, 0.22, 100.0, emulated=True),
    )
}


def equal_devices(count: int, cpu: float, link_mbps: float, memory_mb: float) -> tuple[Device, ...]:
    return tuple(Device(f"n{index}", cpu, cpu, memory_mb, link_mbps) for index in range(count))


def program(module: str, argument: msgspec.Struct, *words: str) -> tuple[str, ...]:
    """A program of the bench, which is told what to do as JSON."""
    return (PYTHON, "-P", "-m", f"ringtmp.bench.{module}", msgspec.json.encode(argument).decode(), *words)


def lab(isolated: bool = True, scale: bool = False, execute: bool = False) -> list[str]:
    """`execute`: any command on the devices of the file; otherwise a verb of ringtmp."""
    words = ["exec"] * execute + ["--no-isolation"] * (not isolated) + ["--scale"] * scale
    return [*RINGTMP, "lab", *words, "--devices", DEVICES, "--"]
