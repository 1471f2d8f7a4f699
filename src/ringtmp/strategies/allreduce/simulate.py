"""All-reduce on paper: every worker ends with the sum of all gradients and updates its own copy.

With T_w to transmit a model, R_w to add one, U_w to update, n equal workers and free latency:

    ring    2 (n-1)/n T_w + (n-1)/n R_w + U_w       n chunks travel n-1 hops to be summed and n-1 to be known
    tree    2 ceil(log2 n) T_w + ceil(log2 n) R_w + U_w       binomial: sums go to rank 0, the total comes back

Messages depend on each other in one fixed order, so no event queue is needed: O(n**2) for the ring, O(n) for the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ringtmp.plan.devices import Device, Paths
from ringtmp.plan.simulation import Simulated
from ringtmp.strategies.data_parallel.simulated_workers import SimulatedWorkers, Workload

Shape = Literal["ring", "tree"]


def simulate_allreduce(
    load: Workload, devices: Sequence[Device], shape: Shape = "ring", paths: Paths | None = None
) -> Simulated:
    count = len(devices)
    table, microbatches = load.share(count)
    crew = SimulatedWorkers(devices, paths)
    compute_s = microbatches * (table.forward_s[-1] + table.backward_s[-1])
    ready = [crew.work(node, 0.0, compute_s, 0.0, "compute") for node in range(count)]
    if count > 1:
        ready = (_ring if shape == "ring" else _tree)(crew, load, ready)
    ends = [crew.work(node, ready[node], load.update_s, 0.0, "update") for node in range(count)]
    memory = [table.stored[-1]] * count
    return crew.result(f"allreduce:{shape}", 0.0, max(ends), 1, dict(crew.lines.carried), memory)


def _ring(crew: SimulatedWorkers, load: Workload, ready: list[float]) -> list[float]:
    count = len(ready)
    chunk, add_s = load.exchanged_bytes / count, load.add_s / count
    for phase in range(2 * (count - 1)):
        arrived = [0.0] * count
        for node in range(count):
            after = (node + 1) % count
            arrived[after] = _hop(crew, ready[node], node, after, chunk)
        for node in range(count):
            # The second half only passes on what is summed already.
            own_s, kind = crew.message_s(node, chunk), "reduce" if phase < count - 1 else "receive"
            ready[node] = crew.work(node, arrived[node], add_s if phase < count - 1 else 0.0, own_s, kind)
    return ready


def _tree(crew: SimulatedWorkers, load: Workload, ready: list[float]) -> list[float]:
    count, size = len(ready), load.exchanged_bytes
    reach = 1
    while reach < count:
        for child in range(reach, count, 2 * reach):
            arrived = _hop(crew, ready[child], child, child - reach, size)
            parent = child - reach
            ready[parent] = crew.work(
                parent, max(arrived, ready[parent]), load.add_s, crew.message_s(parent, size), "reduce"
            )
        reach *= 2
    while reach > 1:
        reach //= 2
        for child in range(reach, count, 2 * reach):
            arrived = _hop(crew, ready[child - reach], child - reach, child, size)
            ready[child] = crew.work(child, arrived, 0.0, crew.message_s(child, size), "receive")
    return ready


def _hop(crew: SimulatedWorkers, now: float, source: int, target: int, size: float) -> float:
    sent = crew.work(source, now, 0.0, crew.message_s(source, size), "send")
    return crew.lines.arrive(crew.lines.depart(sent, source, target, size), source, target, size)
