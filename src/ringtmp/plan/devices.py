"""What a plan knows of devices, links and layers: plain descriptions in seconds, bytes and watts.

Pure. Times are those of the machine the layers were profiled on; a device is `speed` times as fast while it runs, and
runs only as long as its quota lets it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from ringtmp.errors import UsageError

#: One message through node, codec and link at one end: Python's work, whatever the size.
MESSAGE_CPU_S = 250e-6
#: The same between devices: ZeroMQ's thread, the kernel's network and a packet that acknowledges are the device's work too.
NETWORK_MESSAGE_CPU_S = 600e-6
#: Copying, encrypting and the kernel's part, per byte and end, likewise.
CURVE_BYTE_CPU_S = 1.6e-9
PLAIN_BYTE_CPU_S = 0.2e-9
#: Of freed memory so much stays with a process, for use again, on a device with at least this much for it: what
#: `resources.set_threads` asks of the C library, as seen.
KEPT_BYTES = 48 * 2**20
ROOMY_BYTES = 742 * 2**20


@dataclass(frozen=True, slots=True)
class Quota:
    """A CPU quota as the kernel keeps it: in every period the threads run at full speed until `run_s` is used up, then
    stand still until the next period. Nothing is saved for later."""

    run_s: float
    period_s: float

    @property
    def share(self) -> float:
        return self.run_s / self.period_s


def quota_of(cores: float | None, period_s: float | None, threads: int) -> Quota | None:
    """All threads run until what they may use together in a period is used up. None: they may run all the time."""
    if cores is None or period_s is None or cores >= threads:
        return None
    return Quota(cores / threads * period_s, period_s)


@dataclass(frozen=True, slots=True)
class Link:
    """How a device hangs on the network: full duplex, and what serialising and encrypting cost the device itself."""

    up_bytes_per_s: float = math.inf
    down_bytes_per_s: float = math.inf
    latency_s: float = 0.0  # one way; those of both ends add up
    message_cpu_s: float = 0.0  # per message sent or received
    byte_cpu_s: float = 0.0  # per byte sent or received

    def cpu_s(self, size: float) -> float:
        return self.message_cpu_s + size * self.byte_cpu_s


@dataclass(frozen=True, slots=True)
class Device:
    name: str
    speed: float = 1.0  # of its threads together, while they run
    quota: Quota | None = None
    cores: int = 1
    memory_bytes: float = math.inf  # free for all that a node needs here
    extra_bytes: float = 0.0  # of it, besides the node's own process: an agent; the master's data and model builder
    idle_w: float | None = None
    busy_w: float | None = None
    link: Link = Link()
    busy_share: float = 1.0  # of busy_w - idle_w: of its cores, those that compute
    nj_per_byte: float = 0.0
    takes_turns: bool = False  # has no cores of its own: when it runs is the system's choice, not a matter of its speed
    identity: str = ""  # who it is, where a name may be given to another later

    @property
    def pace(self) -> float:
        """Profiled seconds of work per second, in the long run."""
        return self.speed * (self.quota.share if self.quota is not None else 1.0)

    @property
    def kept_bytes(self) -> float:
        """Freed memory that its process keeps, at most."""
        return KEPT_BYTES if self.memory_bytes >= ROOMY_BYTES else 0.0

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for devices that may stand in for each other."""
        return (
            self.speed, self.quota, self.cores, self.memory_bytes, self.extra_bytes, self.idle_w, self.busy_w, self.link,
            self.busy_share, self.nj_per_byte, self.takes_turns,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Path:
    """What was measured from one device to another: the slower of this and the two links counts."""

    bytes_per_s: float
    latency_s: float
    tried: bool = True  # else nobody knows better


#: (from, to) by device name; pairs that are not here have what their two links give.
Paths = Mapping[tuple[str, str], Path]


def rate_between(source: Device, target: Device, paths: Paths) -> float:
    """Bytes per second from one to the other while nothing else is on its way."""
    path = paths.get((source.name, target.name))
    rate = min(source.link.up_bytes_per_s, target.link.down_bytes_per_s)
    return rate if path is None else min(rate, path.bytes_per_s)


def latency_between(source: Device, target: Device, paths: Paths) -> float:
    path = paths.get((source.name, target.name))
    return source.link.latency_s + target.link.latency_s if path is None else path.latency_s


@dataclass(frozen=True, slots=True)
class Measured:
    """One layer at one microbatch size, on the profiled machine."""

    samples: float
    forward_s: float
    backward_s: float
    stored_bytes: float  # kept from forward to backward: saved tensors and outputs, without parameters and inputs
    output_bytes: float  # what crosses a cut behind this layer
    weights_s: float = 0.0  # of backward_s: gradients of its weights, which may wait


@dataclass(frozen=True, slots=True)
class LayerCost:
    """`measured` by growing size, at least one."""

    name: str
    measured: tuple[Measured, ...]
    weight_bytes: int  # parameters and buffers
    gradient_bytes: int
    optimizer_bytes: int
    update_s: float = 0.0  # one optimizer step
    has_parameters: bool = True
    waiting_bytes: float = 0.0  # gradients of weights it shares, which wait for deeper layers', in every microbatch
    largest_bytes: int | None = None  # of the gradient of its largest parameter; None: as of all of them
    converted_bytes: int = 0  # of the largest weight that is kept small and is float32 while it is used
    factor_values: float = (
        0.0  # of a sample's gradient as activations and errors (model/sufficient_factors.py); 0: it has none
    )

    @property
    def largest_s(self) -> float:
        """Forward and backward of the largest microbatch that was measured."""
        return self.measured[-1].forward_s + self.measured[-1].backward_s

    def only_at(self, sizes: Collection[int]) -> LayerCost:
        """As if it had been measured at these sizes and no others."""
        return replace(self, measured=tuple(each for each in self.measured if each.samples in sizes))

    def at(self, samples: float) -> Measured:
        """At any microbatch size: a straight line through the two nearest sizes, or through nothing with one."""
        points = self.measured
        if len(points) == 1:
            factor = samples / points[0].samples
            return _mix(samples, points[0], points[0], 1.0 - factor, scale=True)
        place = next((i for i in range(1, len(points)) if samples <= points[i].samples), len(points) - 1)
        low, high = points[place - 1], points[place]
        return _mix(samples, low, high, (samples - low.samples) / (high.samples - low.samples))


def _mix(samples: float, low: Measured, high: Measured, weight: float, scale: bool = False) -> Measured:
    def line(a: float, b: float) -> float:
        return a * (1.0 - weight) if scale else max(a + (b - a) * weight, 0.0)

    return Measured(
        samples,
        line(low.forward_s, high.forward_s),
        line(low.backward_s, high.backward_s),
        line(low.stored_bytes, high.stored_bytes),
        line(low.output_bytes, high.output_bytes),
        line(low.weights_s, high.weights_s),
    )


def check_devices(devices: tuple[Device, ...]) -> None:
    """Refuse numbers no device has, and names that stand for two."""
    if not devices:
        raise UsageError("a plan needs at least one device, the master")
    seen: set[str] = set()
    for device in devices:
        if device.name in seen:
            raise UsageError(f"two devices are called {device.name!r}: give each its own name")
        seen.add(device.name)
        link = device.link
        for what, value, least in (
            ("speed", device.speed, 0.0), ("memory", device.memory_bytes, 0.0), ("link up", link.up_bytes_per_s, 0.0),
            ("link down", link.down_bytes_per_s, 0.0),
        ):  # fmt: skip
            if not value > least:  # also not a number
                raise UsageError(f"device {device.name}: {what} is {value:g}; it must be above {least:g}")
        for what, value in (
            ("latency", link.latency_s),
            ("message cost", link.message_cpu_s),
            ("byte cost", link.byte_cpu_s),
        ):
            if not (value >= 0 and math.isfinite(value)):
                raise UsageError(f"device {device.name}: {what} is {value:g}; it must be at least 0")
        if device.quota is not None and not 0 < device.quota.run_s <= device.quota.period_s:
            raise UsageError(
                f"device {device.name}: a quota of {device.quota.share:g} of its time must be above 0 and at most 1"
            )
