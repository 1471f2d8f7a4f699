"""A step on paper: workers compute a part of every layer and add up what two layers, columns and rows, come to.

What is inside a layer is not known on paper, so every layer is taken as cut, and every other one ends in a sum forward and
has one backward: as many as in a chain of linear layers. The plan of a run counts what its own graph needs.
"""

from __future__ import annotations

from dataclasses import replace

from ringtmp.plan.memory_forecast import MemoryForecast
from ringtmp.strategies.base import OnPaper, Task
from ringtmp.strategies.data_parallel.simulated_workers import SimulatedWorkers, Workload


def simulate_parts(task: Task) -> OnPaper:
    load, count = Workload.of(task), len(task.devices)
    table, microbatches = load.share(1)
    workers = SimulatedWorkers(task.devices, task.paths)
    ready = [0.0] * count
    for backward in (False, True):
        order = range(len(load.layers))
        for index in reversed(order) if backward else order:
            ends = table.backward_s if backward else table.forward_s
            compute_s = microbatches * (ends[index + 1] - ends[index]) / count
            ready = [workers.work(node, ready[node], compute_s, 0.0, "compute") for node in range(count)]
            if index % 2 and count > 1:
                size = microbatches * table.crossing_bytes[index + 1]
                ready = _added_up(workers, size, ready, load.add_bytes_per_s)
    ready = [workers.work(node, ready[node], load.update_s / count, 0.0, "update") for node in range(count)]
    stored = table.stored[-1] * microbatches / count
    step = workers.result(0.0, max(ready), 1, workers.lines.carried, memory_bytes=[stored] * count)
    return OnPaper(step, tuple(_shared(each, count, stored) for each in load.memory(task)))


def _added_up(workers: SimulatedWorkers, size: float, ready: list[float], add_bytes_per_s: float) -> list[float]:
    """A vector of so many bytes around the ring, in chunks: summed on the first half of the way, passed on in the second."""
    count = len(ready)
    chunk = size / count
    for phase in range(2 * (count - 1)):
        add_s = chunk / add_bytes_per_s if phase < count - 1 else 0.0
        arrived = [0.0] * count
        for node in range(count):
            after = (node + 1) % count
            sent = workers.work(node, ready[node], 0.0, workers.message_s(node, chunk), "send")
            arrived[after] = workers.lines.arrive(workers.lines.depart(sent, node, after, chunk), node, after, chunk)
        own = [workers.message_s(node, chunk) for node in range(count)]
        ready = [workers.work(node, arrived[node], add_s, own[node], "reduce") for node in range(count)]
    return ready


def _shared(whole: MemoryForecast, count: int, stored: float) -> MemoryForecast:
    """A worker of so many, each of which has a part of everything."""
    return replace(
        whole, weight_bytes=whole.weight_bytes / count, gradient_bytes=whole.gradient_bytes / count,
        optimizer_bytes=whole.optimizer_bytes / count, stored_bytes=stored,
    )  # fmt: skip
