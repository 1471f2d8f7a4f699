"""A step of GADMM on paper: heads compute and send to their neighbours, then tails do.

With c the compute of one pass over a worker's samples, p passes, U_w to move the model and T_w to transmit it, which an inner
worker does twice:

    step   2 (p (c + U_w) + 2 T_w)       of two workers: 2 (p (c + U_w) + T_w)
"""

from __future__ import annotations

from collections.abc import Sequence

from ringtmp.plan.devices import Device, Paths
from ringtmp.plan.simulated_step import Simulated, per_step
from ringtmp.strategies.data_parallel.simulated_workers import SimulatedWorkers, Workload

ROUNDS = 3  # the first only warms up


def simulate_turns(load: Workload, devices: Sequence[Device], paths: Paths | None, *, passes: int) -> Simulated:
    count, size = len(devices), load.exchanged_bytes
    table, microbatches = load.share(count)
    crew = SimulatedWorkers(devices, paths)
    compute_s = microbatches * (table.forward_s[-1] + table.backward_s[-1])
    there = [0.0] * count  # when a worker has what its next turn needs
    begin, end, before = 0.0, 0.0, dict[tuple[int, int], float]()
    for number in range(ROUNDS):
        for first in (0, 1):
            group = range(first, count, 2)
            for node in group:
                done = crew.work(node, there[node], passes * compute_s, 0.0, "compute")
                there[node] = crew.work(node, done, passes * load.update_s, 0.0, "update")
            # Everyone sends to the left first, so that no two models meet on their way to one worker.
            for source, target in [
                (node, node + side) for side in (-1, 1) for node in group if 0 <= node + side < count
            ]:
                sent = crew.work(source, there[source], 0.0, crew.message_s(source, size), "send")
                arrived = crew.lines.arrive(crew.lines.depart(sent, source, target, size), source, target, size)
                got = crew.work(target, arrived, 0.0, crew.message_s(target, size), "receive")
                there[target] = max(there[target], got)
            end = max(there)
        if number == 0:
            begin, before = end, dict(crew.lines.carried)
    carried = per_step(crew.lines.carried, before, ROUNDS - 1)
    memory = [table.stored[-1]] * count
    return crew.result(begin, end, ROUNDS - 1, carried, memory_bytes=memory)
