"""What a step cannot be faster than. Pure arithmetic on one process's step and on bytes per step.

    ideal   max(c, T)   T = one process, one thread, whole batch / cores in all
                        c = b * w / rate: one cut's activations through a link of its own
    ceiling max(c, S)   S = all devices at once, each with its share of the layers, which do not talk: measured
    limit   max(c, T)   of the case itself: T over the nodes that compute, c what its busiest device sends or receives.
                        A device has one link, full duplex, for all its neighbours.

n nodes work, P parameters, b samples per step, w values per sample at a cut, four bytes each:

    ring, pipelining    2 b w (activations to the next, gradients to the one before), twice that with two stages each
    ps, one server      n P  through the server's link, each way
    ps, servers=workers 2 P (n-1)/n, as for a ring all-reduce and DistributedDataParallel
"""

from __future__ import annotations

import msgspec

from ringtmp.bench.analysis.traffic_formulas import busiest_sent, exchanged_values
from ringtmp.bench.training_runs.device_setups import Setting
from ringtmp.bench.training_runs.speed_cases import Case, stage_ranks, workers

VALUE_BYTES = 4


class Sizes(msgspec.Struct, frozen=True):
    """Of a workload, as the process alone reports them."""

    one_s: float
    parameters: int
    cut_values: int
    batch_size: int


def transfer_s(sizes: Sizes, setting: Setting) -> float:
    """c of the ideal: one cut's activations."""
    return sizes.batch_size * sizes.cut_values * VALUE_BYTES / setting.link_bytes_per_s


def ideal_s(sizes: Sizes, setting: Setting) -> float:
    return max(transfer_s(sizes, setting), sizes.one_s / setting.cores)


def ceiling_s(sizes: Sizes, setting: Setting, side_by_side_s: float) -> float:
    """The ideal with what the devices were measured to reach at the same time in the place of T."""
    return max(transfer_s(sizes, setting), side_by_side_s)


def limit_s(case: Case, sizes: Sizes, setting: Setting) -> float:
    compute_s = sizes.one_s / (workers(case, setting) * setting.share)
    return max(compute_s, busiest_values(case, sizes, setting.nodes) * VALUE_BYTES / setting.link_bytes_per_s)


def busiest_values(case: Case, sizes: Sizes, nodes: int) -> float:
    """Values per step that the busiest device sends, or receives: the two are alike in every case here."""
    if nodes == 1 or case.group == "base":
        return 0.0
    if case.splits_layers:
        # The ring's master holds the front and the tail.
        holders = [*range(nodes), 0] if case.group == "ours" else stage_ranks(case.layout, nodes)
        return float(busiest_sent(holders, [sizes.cut_values] * (len(holders) - 1)) * sizes.batch_size)
    return exchanged_values(sizes.parameters, nodes, case.servers == "one")
