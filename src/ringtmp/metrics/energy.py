"""Joules: the model for devices without a meter, whose joules are whose, and how far a comparison depends on the model.

Pure. One formula, for runs and for plans:

    joules = idle_w * seconds  +  (busy_w - idle_w) * busy seconds * share  +  nanojoules per byte * bytes

`share` is the part of the device's cores that its threads keep busy; the meter behind `busy_w` was read with all of them
busy. Bytes are those sent and received, at each end. Every joule says where it comes from:

    measured     a meter of the device, on which the node was alone
    estimated    a meter of a machine that several nodes shared, by the time each was busy
    modelled     the formula. It restates time and bytes in other units: see `sensitivity`
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

Source = Literal["measured", "estimated", "modelled"]
#: Half a watt more for a gigabit port at full rate, over 125 MB/s [assumed]; read like the sources of lab/devices_file.py.
ETHERNET_NJ_PER_BYTE = 4.0
#: One watt more for a 2.4 GHz radio that carries 5 MB/s [assumed].
WIFI_NJ_PER_BYTE = 200.0


class Watts(msgspec.Struct, frozen=True):
    idle_w: float
    busy_w: float
    nj_per_byte: float = 0.0


# Where the numbers come from:
#   [hpl]     https://github.com/geerlingguy/top500-benchmark, results table: watts at the wall under Linpack.
#   [dramble] Pi Dramble, "Power Consumption Benchmarks": idle, and `stress --cpu 4`.
#   [maker]   the maker's product page.
#   [assumed] no measurement found; say what yours needs if energy matters to you.
PRESETS = {
    # 120 mA at 5 V idle (cnx-software.com, 2021-12-09); busy [hpl]; Wi-Fi
    "pi-zero-2w": Watts(0.6, 2.1, WIFI_NJ_PER_BYTE),
    "pi-3b": Watts(1.4, 3.7, ETHERNET_NJ_PER_BYTE),  # [dramble]
    "pi-4b": Watts(2.7, 6.4, ETHERNET_NJ_PER_BYTE),  # [dramble]
    "pi-5": Watts(3.0, 11.0, ETHERNET_NJ_PER_BYTE),  # idle [assumed]; busy [hpl]
    "jetson-nano": Watts(2.0, 10.0, ETHERNET_NJ_PER_BYTE),  # idle [assumed]; its 10 W mode [maker]
    "laptop": Watts(8.0, 41.0, ETHERNET_NJ_PER_BYTE),  # idle [assumed]; an i5-7400T [hpl]
}


class Power(msgspec.Struct, frozen=True):
    """What a node knows of its device."""

    name: str  # the preset, "given", or a preset with "(assumed)"
    watts: Watts
    share: float
    host: str  # equal for nodes on one machine
    meter: str = ""  # its reader; none: there is no meter, or the device is emulated


class Load(msgspec.Struct, frozen=True):
    """What the formula is applied to: one node of one run."""

    watts: Watts
    seconds: float
    busy_s: float
    bytes: float = 0.0
    share: float = 1.0
    #: Of a machine's idle watts, where several nodes share it.
    idle_part: float = 1.0

    @property
    def idle_j(self) -> float:
        return self.watts.idle_w * self.idle_part * self.seconds

    @property
    def work_j(self) -> float:
        return (self.watts.busy_w - self.watts.idle_w) * self.busy_s * self.share

    @property
    def bytes_j(self) -> float:
        return self.watts.nj_per_byte * self.bytes * 1e-9

    @property
    def joules(self) -> float:
        return self.idle_j + self.work_j + self.bytes_j


class Spent(msgspec.Struct, frozen=True):
    """What a node did, and what a meter said meanwhile."""

    power: Power | None
    seconds: float
    busy_s: float
    bytes: float
    metered_j: float | None = None


class Energy(msgspec.Struct, frozen=True):
    joules: float
    source: Source


def loads(spent: Mapping[int, Spent], scale: float = 1.0) -> dict[int, Load]:
    """Of the nodes whose device is known. `scale`: emulated devices that ran at half their speed took twice the time."""
    hosts = [each.power.host for each in spent.values() if each.power is not None]
    return {
        node: Load(
            each.power.watts, each.seconds * scale, each.busy_s * scale, each.bytes, each.power.share,
            1.0 / hosts.count(each.power.host),
        )
        for node, each in spent.items()
        if each.power is not None
    }  # fmt: skip


def attribute(spent: Mapping[int, Spent], scale: float = 1.0) -> dict[int, Energy]:
    """Each node's joules. A meter that several nodes saw is theirs together: it tells what the machine needed."""
    hosts: dict[str, list[int]] = {}
    for node, each in spent.items():
        if each.power is not None:
            hosts.setdefault(each.power.host, []).append(node)
    found: dict[int, Energy] = {}
    modelled = loads(spent, scale)
    for nodes in hosts.values():
        read = [spent[node].metered_j for node in nodes]
        known = [each for each in read if each is not None]
        busy_s = sum(spent[node].busy_s for node in nodes)
        for node in nodes:
            if len(nodes) == 1 and known:
                found[node] = Energy(known[0], "measured")
            elif known and busy_s:
                found[node] = Energy(max(known) * spent[node].busy_s / busy_s, "estimated")
            else:
                found[node] = Energy(modelled[node].joules, "modelled")
    return found


# -- how much of a conclusion is the model ------------------------------------------------------------------------------


class Case(msgspec.Struct, frozen=True):
    idle: float  # factors on the numbers of the model
    busy: float
    byte: float
    ratio: float


class Sensitivity(msgspec.Struct, frozen=True):
    """Joules of one run over those of another, as the model says and as its numbers vary."""

    ratio: float
    low: float
    high: float
    by: float
    cases: tuple[Case, ...]

    @property
    def changes(self) -> bool:
        """Whether the other run needs less under some of the numbers."""
        return any((each.ratio - 1) * (self.ratio - 1) < 0 for each in self.cases)

    @property
    def sentence(self) -> str:
        range_text = f"{self.ratio:.2f} times the joules, {self.low:.2f} to {self.high:.2f}"
        vary = f"as the model's watts and nanojoules per byte vary by {self.by:.0%} either way"
        end = "the comparison changes sign" if self.changes else "the comparison keeps its sign"
        return f"{range_text} {vary}: {end}"


def sensitivity(one: Sequence[Load], other: Sequence[Load], by: float = 0.5) -> Sensitivity:
    """Every combination of less, same and more of idle watts, busy watts and nanojoules per byte, on all devices of both
    runs alike. Busy watts never fall below idle watts."""
    factors = (1 - by, 1.0, 1 + by)
    cases = tuple(
        Case(idle, busy, byte, _total(one, idle, busy, byte) / _total(other, idle, busy, byte))
        for idle, busy, byte in itertools.product(factors, repeat=3)
    )
    middle = next(each.ratio for each in cases if each.idle == each.busy == each.byte == 1.0)
    ratios = [each.ratio for each in cases]
    return Sensitivity(middle, min(ratios), max(ratios), by, cases)


def _total(run: Sequence[Load], idle: float, busy: float, byte: float) -> float:
    def varied(watts: Watts) -> Watts:
        idle_w = watts.idle_w * idle
        return Watts(idle_w, max(idle_w, watts.busy_w * busy), watts.nj_per_byte * byte)

    return sum(msgspec.structs.replace(each, watts=varied(each.watts)).joules for each in run)
