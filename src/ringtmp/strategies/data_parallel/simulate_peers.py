"""Models sent from worker to worker on paper: each computes for some steps by itself, then what must be sent is sent.

With T_w to transmit a model and d models to send or receive through the busiest line, an exchange every tau steps:

    step   compute + U_w + d T_w / tau       where a worker waits for what it is sent
           max(compute + U_w, d T_w / tau)   where it does not: what comes late counts later
"""

from __future__ import annotations

from collections.abc import Sequence

from ringtmp.plan.devices import Device, Paths
from ringtmp.plan.simulated_step import Simulated, per_step
from ringtmp.strategies.data_parallel.simulated_workers import SimulatedWorkers, Workload

#: Rounds of exchanges that nobody waits for; the first only warms up.
ROUNDS = 4


def simulate_peers(
    load: Workload, devices: Sequence[Device], paths: Paths | None, sends: Sequence[tuple[int, int]],
    *, every: int = 1, waits: bool = True, servers: int = 0,
) -> Simulated:  # fmt: skip
    """`sends`: (from, to), in every exchange and in this order; `every`: steps between two; the first `servers` devices only
    keep a model."""
    count, size = len(devices), load.exchanged_bytes
    table, microbatches = load.share(count - servers)
    crew = SimulatedWorkers(devices, paths)
    compute_s = microbatches * (table.forward_s[-1] + table.backward_s[-1])
    ready = [0.0] * count
    begin, before = 0.0, dict[tuple[int, int], float]()
    for number in range(ROUNDS):
        for _ in range(every):
            for node in range(servers, count):
                done = crew.work(node, ready[node], compute_s, 0.0, "compute")
                ready[node] = crew.work(node, done, load.update_s, 0.0, "update")
        late = list(ready)
        for source, target in sends:
            sent = crew.work(source, late[source], 0.0, crew.message_s(source, size), "send")
            arrived = crew.lines.arrive(crew.lines.depart(sent, source, target, size), source, target, size)
            late[target] = max(
                late[target], crew.work(target, arrived, load.add_s, crew.message_s(target, size), "reduce")
            )
        if waits:
            ready = late
        if number == 0:
            begin, before = max(late), dict(crew.lines.carried)
    steps = (ROUNDS - 1) * every
    memory = [0.0] * servers + [table.stored[-1]] * (count - servers)
    carried = per_step(crew.lines.carried, before, steps)
    return crew.result(begin, max(late), steps, carried, memory_bytes=memory, servers=servers)
