"""A sum over all workers on paper: each ends with the sum of all vectors, after one step of its own or several.

With T_w to transmit a model, R_w to add one, U_w to update, n equal workers and free latency:

    ring    2 (n-1)/n T_w + (n-1)/n R_w + U_w       n chunks travel n-1 hops to be summed and n-1 to be known
    tree    2 ceil(log2 n) T_w + ceil(log2 n) R_w + U_w       binomial: sums go to rank 0, the total comes back
    halving as the ring, in log2 n hops and one, where n is a power of two (plan/sum_tree.py)

Messages depend on each other in one fixed order, so no event queue is needed: O(n**2) for the ring, O(n) for the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ringtmp.plan.devices import Device, Paths
from ringtmp.plan.simulated_step import Simulated, per_step
from ringtmp.plan.sum_tree import ROOT, one_part_each
from ringtmp.strategies.data_parallel.simulated_workers import SimulatedWorkers, Workload

#: From when each worker's vector is there to when it has the sum.
Way = Callable[[SimulatedWorkers, Workload, list[float]], list[float]]


def around_ring(workers: SimulatedWorkers, load: Workload, ready: list[float]) -> list[float]:
    count = len(ready)
    chunk, add_s = load.exchanged_bytes / count, load.add_s / count
    for phase in range(2 * (count - 1)):
        arrived = [0.0] * count
        for node in range(count):
            after = (node + 1) % count
            arrived[after] = _hop(workers, ready[node], node, after, chunk)
        for node in range(count):
            # The second half only passes on what is summed already.
            own_s, kind = workers.message_s(node, chunk), "reduce" if phase < count - 1 else "receive"
            ready[node] = workers.work(node, arrived[node], add_s if phase < count - 1 else 0.0, own_s, kind)
    return ready


def up_and_down_tree(workers: SimulatedWorkers, load: Workload, ready: list[float]) -> list[float]:
    count, size = len(ready), load.exchanged_bytes
    reach = 1
    while reach < count:
        for child in range(reach, count, 2 * reach):
            arrived = _hop(workers, ready[child], child, child - reach, size)
            parent = child - reach
            ready[parent] = workers.work(
                parent, max(arrived, ready[parent]), load.add_s, workers.message_s(parent, size), "reduce"
            )
        reach *= 2
    while reach > 1:
        reach //= 2
        for child in range(reach, count, 2 * reach):
            arrived = _hop(workers, ready[child - reach], child - reach, child, size)
            ready[child] = workers.work(child, arrived, 0.0, workers.message_s(child, size), "receive")
    return ready


def by_halving(workers: SimulatedWorkers, load: Workload, ready: list[float]) -> list[float]:
    adding = one_part_each(len(ready))
    chunk, add_s = load.exchanged_bytes / adding.chunks, load.add_s / adding.chunks
    for node in adding.split():  # the deepest first, and pairs of one depth at the same time
        arrived = [
            (there, _hop(workers, ready[here], here, there, chunk))
            for child, _, here, there in adding.hops()
            if child >> 1 == node
        ]
        for there, at in arrived:
            ready[there] = workers.work(there, max(at, ready[there]), add_s, workers.message_s(there, chunk), "reduce")
    totals = []
    for number in range(adding.chunks):
        here = adding.owner(ROOT, number)
        totals += [
            (there, _hop(workers, ready[here], here, there, chunk)) for there in range(len(ready)) if there != here
        ]
    for there, at in sorted(totals, key=lambda each: each[1]):
        ready[there] = workers.work(there, max(at, ready[there]), 0.0, workers.message_s(there, chunk), "receive")
    return ready


def _hop(workers: SimulatedWorkers, now: float, source: int, target: int, size: float) -> float:
    sent = workers.work(source, now, 0.0, workers.message_s(source, size), "send")
    return workers.lines.arrive(workers.lines.depart(sent, source, target, size), source, target, size)


def simulate_sums(
    load: Workload, devices: Sequence[Device], paths: Paths | None = None, *, way: Way = around_ring, every: int = 1
) -> Simulated:  # fmt: skip
    """`every`: steps that each worker makes by itself before there is a sum."""
    count = len(devices)
    table, microbatches = load.share(count)
    workers = SimulatedWorkers(devices, paths)
    compute_s = microbatches * (table.forward_s[-1] + table.backward_s[-1])
    ready = [0.0] * count
    for step in range(every):
        ready = [workers.work(node, ready[node], compute_s, 0.0, "compute") for node in range(count)]
        if count > 1 and step == every - 1:
            ready = way(workers, load, ready)
        ready = [workers.work(node, ready[node], load.update_s, 0.0, "update") for node in range(count)]
    carried = per_step(workers.lines.carried, {}, every)
    return workers.result(0.0, max(ready), every, carried, memory_bytes=[table.stored[-1]] * count)


#: Rounds of sums that are on their way while workers compute; the first only warms up.
ROUNDS = 4


def simulate_overlapped_sums(
    load: Workload, devices: Sequence[Device], paths: Paths | None = None,
    *, way: Way = around_ring, every: int = 1, under_way: int = 0,
) -> Simulated:  # fmt: skip
    """The sum after `every` steps is on its way while each worker makes `under_way` more and must be there then. What messages
    cost a processor delays the messages, not the computing beside them."""
    count = len(devices)
    table, microbatches = load.share(count)
    computing, sending = SimulatedWorkers(devices, paths), SimulatedWorkers(devices, paths)
    step_s = microbatches * (table.forward_s[-1] + table.backward_s[-1])
    ready, summed = [0.0] * count, [0.0] * count
    begin, before = 0.0, dict[tuple[int, int], float]()
    for number in range(ROUNDS):
        for step in range(every):
            if step == under_way:
                ready = [max(pair) for pair in zip(ready, summed, strict=True)]
            done = [computing.work(node, ready[node], step_s, 0.0, "compute") for node in range(count)]
            ready = [computing.work(node, done[node], load.update_s, 0.0, "update") for node in range(count)]
        summed = way(sending, load, list(ready)) if count > 1 else summed
        if number == 0:
            begin, before = max(ready), dict(sending.lines.carried)
    steps = (ROUNDS - 1) * every
    carried = per_step(sending.lines.carried, before, steps)
    return computing.result(begin, max(ready), steps, carried, memory_bytes=[table.stored[-1]] * count)
