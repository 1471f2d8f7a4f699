"""What a bench of experiments was asked for, and what is trained in it. Pure.

quick   small sizes, one repeat unless told otherwise: does everything work, and which way does it point?
full    what the question deserves
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from ringtmp.bench.experiment_registry import CATALOG
from ringtmp.bench.training_runs import strategy_variants
from ringtmp.bench.training_runs.strategy_variants import RING, Way
from ringtmp.bench.training_runs.workloads import WORKLOADS, Workload
from ringtmp.lab.devices_file import Device
from ringtmp.metrics.energy import PRESETS

FULL_WAYS = (
    "ring,ring:staleness=1,ring:wire=bfloat16,ps:bsp,ps:bsp:servers=workers,ps:async,ps:ssp:3,"
    "ps:bsp:servers=workers:wire=int8,allreduce:ring"
)
QUICK_WAYS = "ring,ring:staleness=1,ps:bsp,allreduce:ring"
#: One device alone; every other way is held against it.
ALONE = Way("one device", RING)
#: Watts of the emulated devices, unless a file says otherwise.
WATTS = PRESETS["pi-4b"]
#: Of every core, for the devices; the rest is for whoever watches.
USED_CORES = 0.9
LINK_MBPS = 100.0
MEMORY_MB = 1000.0

#: The task with an accuracy: the bundled digits.
DIGITS = Workload("digits", "mlp", {}, "digits", 64, 8, lr=0.002, optimizer="adam")
DIGITS_SAMPLES = 1438
EPOCHS = {True: 2, False: 6}
SIZES = {True: {"depth": 4, "width": 256}, False: {"depth": 8, "width": 256}}
#: For scaling: enough to compute that more devices could help.
SCALED = Workload("gpt-small", "gpt", {"depth": 8, "width": 128, "heads": 4, "context": 64}, "pysource", 32, 8, steps=8)


class Choices(msgspec.Struct, frozen=True):
    names: tuple[str, ...]
    ways: tuple[Way, ...]
    devices: tuple[Device, ...]  # of --devices; empty: those described here
    isolated: bool  # devices of their own may be emulated, with root; else plain processes
    repeats: int | None  # None: as often as each experiment is by itself
    seed: int
    quick: bool
    cores: int
    rates: dict[str, float] = {}  # way's label -> the learning rate of its sweep
    listen: str = ""  # where devices of their own wait to be used; empty: the bench starts its own
    joined: int = 0  # how many, the master included
    # Of speed, and the first two of plan:
    steps: int = 10  # that count
    warm_up: int = 2  # before them
    cases: str = "*"
    workloads: str = "gpt,mlp"
    settings: str = "two,lab-fast,lab-100"
    microbatches: str = ""
    # Of plan:
    beds: str = ""
    # Of messages:
    size_bytes: int = 1024
    count: int = 1000
    rounds: int = 7

    @property
    def nodes(self) -> int:
        """How many devices there are where their number is not what is asked."""
        return self.joined or len(self.devices) or (3 if self.quick else 4)

    @property
    def emulated(self) -> bool:
        """A small bench has no time to start devices at a share of a core; it emulates them only where a cap is asked."""
        return self.isolated and not self.quick and not self.listen

    @property
    def slowed(self) -> bool:
        """A file may describe more than this machine has; then all of it is slowed by one factor, and the run says so."""
        return self.emulated and bool(self.devices)

    @property
    def comparisons(self) -> tuple[str, ...]:
        return tuple(name for name in self.names if CATALOG[name].compares)

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """For idle time, beside that of the task."""
        return (256,) if self.quick else (16, 256)

    @property
    def node_counts(self) -> tuple[int, ...]:
        """For scaling."""
        counts = (1, 2, 3) if self.quick else (1, 2, 3, 4, 6, 8)
        most = self.joined or len(self.devices)
        return tuple(n for n in counts if n <= most) if most else counts

    @property
    def anchors(self) -> tuple[Workload, ...]:
        return () if self.quick else (WORKLOADS["gpt"], WORKLOADS["mlp"])

    def some_of(self, usual: Sequence[str]) -> list[Way]:
        """Where a way is dear, only the usual ones of those nobody chose by name."""
        if self.ways != default_ways(self.quick):
            return list(self.ways)
        return [way for way in self.ways if way.label in usual]

    def task(self) -> Workload:
        steps = EPOCHS[self.quick] * (DIGITS_SAMPLES // DIGITS.batch_size + 1)
        return msgspec.structs.replace(DIGITS, settings=SIZES[self.quick], seed=self.seed, steps=steps)

    def scaled(self) -> Workload:
        """What more and more devices do. In a small bench the task: its runs are there already."""
        return self.task() if self.quick else msgspec.structs.replace(SCALED, seed=self.seed)

    def rate(self, way: Way, otherwise: float) -> float:
        return self.rates.get(way.label, otherwise)

    def place(self, nodes: int, link_mbps: float | None = None, most: int | None = None) -> tuple[Device, ...]:
        """The first `nodes` devices; `most` is how many share this machine at the largest size of a sweep."""
        found: Sequence[Device] = self.devices[:nodes]
        if not self.devices:
            # A device with less than a core stays on one of them.
            neighbours = math.ceil(max(nodes, most or self.nodes) / self.cores)
            share = round(USED_CORES / neighbours, 3)
            found = [
                Device(f"n{index}", share, share, MEMORY_MB, LINK_MBPS, idle_w=WATTS.idle_w, busy_w=WATTS.busy_w)
                for index in range(nodes)
            ]
        if link_mbps is not None:
            found = [msgspec.structs.replace(device, link_mbps=link_mbps) for device in found]
        return tuple(found)


def default_ways(quick: bool) -> tuple[Way, ...]:
    return strategy_variants.parse_all(QUICK_WAYS if quick else FULL_WAYS)
