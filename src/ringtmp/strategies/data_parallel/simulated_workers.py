"""What every data-parallel way to train shares on paper: each worker's compute, and processors that work in order.

The batch is split over the workers, so each holds the whole model and works through its share in microbatches of about
the size the ring would use. Adding up received values is charged at ADD_BYTES_PER_S of the profiled machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ringtmp.plan.devices import Device, LayerCost, Paths
from ringtmp.plan.layer_costs import CostTable
from ringtmp.plan.memory_forecast import MemoryForecast, replica_forecast
from ringtmp.plan.simulated_clocks import Lines, Processor
from ringtmp.plan.simulated_step import NodeStep, Simulated, Span, line_bytes
from ringtmp.strategies.base import Task

#: Reading two float32 arrays and writing their sum, one thread.
ADD_BYTES_PER_S = 4e9


@dataclass(frozen=True, slots=True)
class Workload:
    """One update of a model over all workers. `wire_ratio`: bytes that travel per byte of float32."""

    layers: Sequence[LayerCost]
    batch_size: int
    microbatches: int
    wire_ratio: float = 1.0
    add_bytes_per_s: float = ADD_BYTES_PER_S

    @classmethod
    def of(cls, task: Task) -> Workload:
        options = task.options
        return cls(task.layers, options.batch_size, options.ring.microbatches, options.wire_ratio)

    def memory(
        self, task: Task, servers: int = 0, vectors: float = 0, keeps: bool = False
    ) -> tuple[MemoryForecast, ...]:
        """Of every node; the first `servers` only serve. A worker has this many more `vectors` of the model's size, and
        `keeps` a copy of its weights and optimizer state."""
        table, _ = self.share(len(task.devices) - servers)
        return tuple(
            replica_forecast(table, device, node >= servers, task.options.process_bytes).with_more(
                vectors * (node >= servers), keeps and node >= servers
            )
            for node, device in enumerate(task.devices)
        )

    def share(self, workers: int) -> tuple[CostTable, int]:
        """A worker's cost table and how many microbatches it has."""
        count = max(1, round(self.microbatches / workers))
        return CostTable(self.layers, self.batch_size / workers / count), count

    @property
    def exchanged_bytes(self) -> float:
        """T_w = exchanged_bytes / rate."""
        return sum(layer.gradient_bytes for layer in self.layers) * self.wire_ratio

    @property
    def add_s(self) -> float:
        """R_w: adding one worker's gradients to a sum."""
        return sum(layer.gradient_bytes for layer in self.layers) / self.add_bytes_per_s

    @property
    def update_s(self) -> float:
        """U_w."""
        return sum(layer.update_s for layer in self.layers)


class SimulatedWorkers:
    """Processors that do one thing after another, and the lines between them."""

    def __init__(self, devices: Sequence[Device], paths: Paths | None) -> None:
        self.devices = devices
        self.lines = Lines(devices, paths)
        self._processors = [Processor(device.quota, device.speed) for device in devices]
        self._free = [0.0] * len(devices)
        self._busy: list[list[tuple[float, float, str]]] = [[] for _ in devices]

    def work(self, node: int, now: float, profiled_s: float, own_s: float, kind: str) -> float:
        """When it is done; it waits behind what the node has to do already."""
        start = max(now, self._free[node])
        end = self._free[node] = self._processors[node].finish(start, profiled_s, own_s)
        if end > start:
            self._busy[node].append((start, end, kind))
        return end

    def message_s(self, node: int, size: float) -> float:
        return self.devices[node].link.cpu_s(size)

    def result(
        self, begin: float, end: float, steps: float, link_bytes: dict[tuple[int, int], float],
        *, memory_bytes: Sequence[float], servers: int = 0, waits: Sequence[float] | None = None,
    ) -> Simulated:  # fmt: skip
        """Nodes below `servers` are dedicated. `waits`: seconds each node waited for the slowest."""
        step_s = (end - begin) / steps
        sent, received = line_bytes(link_bytes, len(self.devices))
        nodes = []
        for node, device in enumerate(self.devices):
            busy = sum(max(0.0, min(b, end) - max(a, begin)) for a, b, _ in self._busy[node]) / steps
            idle = max(step_s - busy, 0.0)
            held_back = min(waits[node] / steps if waits else 0.0, idle)
            causes = {"gradients" if node < servers else "parameters": idle - held_back, "slowest worker": held_back}
            nodes.append(
                NodeStep.of(
                    device, busy, step_s, {cause: length for cause, length in causes.items() if length > 0},
                    sent_bytes=sent[node], received_bytes=received[node], memory_bytes=memory_bytes[node],
                    server=node < servers,
                )
            )  # fmt: skip
        spans = tuple(
            Span(node, kind, -1, -1, a - begin, b - begin)
            for node, busy_spans in enumerate(self._busy)
            for a, b, kind in busy_spans
            if a >= begin and b <= end + 1e-12
        )
        return Simulated(step_s, tuple(nodes), dict(sorted(link_bytes.items())), spans)
