"""Where `speed` measures: two nodes of this machine, or emulated devices behind links of a rate."""

from __future__ import annotations

import msgspec


class Setting(msgspec.Struct, frozen=True):
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
    )
}


def devices_file(setting: Setting) -> str:
    """For `ringtmp lab`; the first device is the master."""
    tables = [
        f'[[device]]\nname = "n{index}"\ncpu = {setting.share}\nmemory_mb = {setting.memory_mb}\n'
        f"link_mbps = {setting.link_mbps or 1000.0}\n"
        for index in range(setting.nodes)
    ]
    return "\n".join(tables)
