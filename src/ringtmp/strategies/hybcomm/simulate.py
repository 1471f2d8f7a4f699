"""HybComm on paper. With T_l to transmit layer l's gradient and F_l its factors of a whole batch, n equal workers:

    through the servers   2 (n - 1)/n T_l + (n - 1)/n R_l      every node serves 1/n of what goes this way
    as factors            (n - 1)/n F_l + (n - 1) W_l          W_l: one worker's share of the layer's weight gradient

Everything goes out when the backward pass is over; the run itself sends layer after layer meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

from ringtmp.strategies.data_parallel.simulate_sum_over_workers import Way
from ringtmp.strategies.data_parallel.simulated_workers import SimulatedWorkers, Workload


def in_two_ways(factored: Sequence[bool]) -> Way:
    """`factored`: which layers go by factors."""

    def way(workers: SimulatedWorkers, load: Workload, ready: list[float]) -> list[float]:
        count, share = len(ready), load.batch_size / len(ready)
        by_factors = [layer for layer, yes in zip(load.layers, factored, strict=True) if yes]
        through = [layer for layer, yes in zip(load.layers, factored, strict=True) if not yes]
        factors = 4 * load.wire_ratio * share * sum(layer.factor_values for layer in by_factors)
        gradients = sum(layer.gradient_bytes for layer in through)
        chunk, add_s = load.wire_ratio * gradients / count, gradients / count / load.add_bytes_per_s
        again_s = sum(layer.at(share).weights_s for layer in by_factors)
        if factors:
            ready = _to_all_others(workers, ready, factors, again_s, "receive")
        if chunk:
            ready = _to_all_others(workers, ready, chunk, add_s, "reduce")
            ready = _to_all_others(workers, ready, chunk, 0.0, "receive")
        return ready

    return way


def _to_all_others(workers: SimulatedWorkers, ready: list[float], size: float, each_s: float, kind: str) -> list[float]:
    """`each_s`: what a node does with each that comes. A node begins with the next, so that not all stand before the first."""
    count, arriving = len(ready), []
    for ahead in range(1, count):
        for source in range(count):
            target = (source + ahead) % count
            sent = workers.work(source, ready[source], 0.0, workers.message_s(source, size), "send")
            arriving.append((workers.lines.depart(sent, source, target, size), source, target))
    for departed, source, target in sorted(arriving):
        arrived = workers.lines.arrive(departed, source, target, size)
        ready[target] = workers.work(target, max(arrived, ready[target]), each_s, workers.message_s(target, size), kind)
    return ready
