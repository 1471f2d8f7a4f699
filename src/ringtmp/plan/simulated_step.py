"""What a simulation gives, and the simulation of a way to train by its name.

Pure and deterministic. `ring` runs the rule the nodes run; `ps` and `allreduce` run their exchanges. All share the same
processors and lines (clocks.py), so that a comparison compares the ways alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ringtmp.metrics.energy import Load, Watts
from ringtmp.plan.devices import Device


@dataclass(frozen=True, slots=True)
class Span:
    """One bar of the Gantt. Kinds: forward, backward, weights, update, compute, reduce, send."""

    node: int
    kind: str
    visit: int
    microbatch: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class NodeStep:
    """One node in one step. busy_s + idle_s = step_s."""

    device: str
    busy_s: float
    idle_s: float
    idle_causes: dict[str, float]
    sent_bytes: float
    received_bytes: float
    up_busy_s: float  # its line, outgoing
    down_busy_s: float
    memory_bytes: float  # activations and boundary tensors at their peak, without weights and process
    held: tuple[int, ...]  # microbatches held at the peak, by visit on this node
    joules: float | None
    server: bool = False  # a dedicated server: its idle time is listed apart

    @classmethod
    def of(
        cls, device: Device, busy_s: float, step_s: float, causes: dict[str, float], *,
        sent_bytes: float, received_bytes: float, memory_bytes: float, held: tuple[int, ...] = (), server: bool = False,
    ) -> NodeStep:  # fmt: skip
        """What follows from the device is filled in."""
        idle_s = max(step_s - busy_s, 0.0)
        return cls(
            device.name, busy_s, idle_s, causes, sent_bytes=sent_bytes, received_bytes=received_bytes,
            up_busy_s=sent_bytes / device.link.up_bytes_per_s, down_busy_s=received_bytes / device.link.down_bytes_per_s,
            memory_bytes=memory_bytes, held=held, joules=joules(device, busy_s, idle_s, sent_bytes + received_bytes),
            server=server,
        )  # fmt: skip

    @property
    def idle_fraction(self) -> float:
        return self.idle_s / (self.busy_s + self.idle_s) if self.busy_s + self.idle_s else 0.0


@dataclass(frozen=True, slots=True)
class Simulated:
    step_s: float
    nodes: tuple[NodeStep, ...]
    link_bytes: dict[tuple[int, int], float]  # per step, by (from, to)
    spans: tuple[Span, ...] = field(repr=False)

    @property
    def bytes_total(self) -> float:
        return sum(self.link_bytes.values())

    @property
    def joules(self) -> float | None:
        """None where a device's watts are unknown."""
        known = [node.joules for node in self.nodes]
        return None if any(each is None for each in known) else sum(each or 0.0 for each in known)

    @property
    def idle_fraction(self) -> float:
        """Of all workers' time; dedicated servers apart."""
        workers = [node for node in self.nodes if not node.server]
        return sum(node.idle_fraction for node in workers) / len(workers)


def joules(device: Device, busy_s: float, idle_s: float, bytes_moved: float) -> float | None:
    """Throttled time counts as busy: to the device the quota stands for, it is."""
    if device.idle_w is None or device.busy_w is None:
        return None
    watts = Watts(device.idle_w, device.busy_w, device.nj_per_byte)
    return Load(watts, busy_s + idle_s, busy_s, bytes_moved, device.busy_share).joules


def line_bytes(carried: dict[tuple[int, int], float], count: int) -> tuple[list[float], list[float]]:
    """Bytes sent and received by each node."""
    sent, received = [0.0] * count, [0.0] * count
    for (source, target), size in carried.items():
        sent[source] += size
        received[target] += size
    return sent, received


def per_step(
    carried: dict[tuple[int, int], float], before: dict[tuple[int, int], float], steps: int
) -> dict[tuple[int, int], float]:
    """Bytes per step of what was carried since `before`."""
    return {pair: (size - before.get(pair, 0.0)) / steps for pair, size in sorted(carried.items())}
