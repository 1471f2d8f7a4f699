"""Networks as far as traffic goes, and what each strategy sends for them per epoch. Pure arithmetic, no run: `model`,
`settings` and `data` say which of the zoo a network is, for those who measure it.

n nodes, P parameters, W values per sample over all cuts, b samples per step over all nodes, S samples per epoch:

    ring                2 W S                     whatever b is: a sample's activations go round once, gradients back
    ps, k=1             2 P (n-1) S / b           every worker pushes and pulls the model once a step
    ps, servers=workers 2 P (n-1) S / b           each node keeps 1/n of it at home
    all-reduce          2 P (n-1) S / b

Busiest device, the fuller direction, per step: ring b (w_in + w_out); one server P (n-1); servers=workers and all-reduce
2 P (n-1) / n. So the ring sends less while b < P (n-1) / W, and more from there on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise

import msgspec

from ringtmp.bench.training_runs.strategy_variants import parse
from ringtmp.strategies.base import Sizes, Traffic

#: One server, and servers on all workers.
SERVERS = ("ps", "ps:servers=workers")
FAMILIES = ("ring", *SERVERS, "allreduce")


class Net(msgspec.Struct, frozen=True):
    """Layer by layer: parameters, and values per sample that leave it."""

    name: str
    text: str
    parameters: tuple[int, ...]
    outputs: tuple[int, ...]
    model: str = "mlp"
    settings: dict[str, int] = {}
    data: str = "random:784x10"

    @property
    def size(self) -> int:
        return sum(self.parameters)

    @property
    def inside(self) -> float:
        """Values per sample that are added up where layers are cut inside: a chain of columns and rows, whose rows give a sum
        forward, and whose columns, but for the first, one backward."""
        sums = self.outputs[1::2]
        return float(sum(sums) + sum(sums[: (len(self.outputs) - 1) // 2]))


def dense(name: str, text: str, widths: tuple[int, ...]) -> Net:
    settings: dict[str, int] = {"depth": len(widths) - 2, "width": widths[1]}
    return Net(name, text, tuple(a * b + b for a, b in pairwise(widths)), widths[1:], settings=settings)


def convolutional() -> Net:
    """3x3 kernels with BatchNorm on 3x32x32 pictures: 32, 32, 64, 64, 128, 128 channels, halved after every second."""
    parameters, outputs, channels, side = [], [], 3, 32
    for index, out in enumerate((32, 32, 64, 64, 128, 128)):
        parameters.append(9 * channels * out + 2 * out)
        side //= 2 if index % 2 else 1
        outputs.append(out * side * side)
        channels = out
    return Net(
        "convolutional", "six 3x3 convolutions on 3x32x32", (*parameters, 128 * 10 + 10), (*outputs, 10),
        "convnet", {"depth": 6, "width": 32}, "random:3x32x32x10",
    )  # fmt: skip


NETS = (
    dense("narrow and deep", "784-64x32-10", (784, *[64] * 32, 10)),
    dense("wide", "784-4096x5-10", (784, *[4096] * 5, 10)),
    convolutional(),
)
#: 784-50-50-10 with the loss alone on the master's tail: front, two workers, three cuts.
PROTOTYPE = dense("prototype", "784-50-50-10", (784, 50, 50, 10))
PROTOTYPE_SAMPLES = 60_000
PROTOTYPE_NODES = 3
#: What it reported for an epoch at batch size 1.
PROTOTYPE_RING = 1.32e7
PROTOTYPE_SERVER = 5.0772e9


def even_ends(net: Net, nodes: int) -> list[int]:
    """Where each visit of a ring ends: nodes + 1 of them, of as many layers each, as nearly as it goes."""
    count, visits = len(net.outputs), nodes + 1
    return list(accumulate(count // visits + (index < count % visits) for index in range(visits)))


def can_cut(net: Net, nodes: int) -> bool:
    """Whether every node has a layer; the master's second visit may be the loss alone."""
    return len(net.outputs) >= nodes


def even_cuts(net: Net, nodes: int) -> tuple[int, ...]:
    """Values per sample at every cut of such a ring."""
    return tuple(net.outputs[end - 1] for end in even_ends(net, nodes)[:-1] if end)


def cuts_text(net: Net, nodes: int) -> str:
    """The same for `--cuts`."""
    ends = even_ends(net, nodes)
    return ",".join(f"{start}-{end - 1}" if end > start else "-" for start, end in pairwise([0, *ends]))


def epoch_values(net: Net, family: str, nodes: int, batch_size: int, samples: int, cuts: tuple[int, ...] = ()) -> float:
    """All nodes together."""
    return _traffic(net, family, nodes, batch_size, cuts).total * samples / batch_size


def busiest_values(net: Net, family: str, nodes: int, batch_size: int) -> float:
    """Per step, what the busiest device sends (or receives: the two are alike)."""
    return _traffic(net, family, nodes, batch_size, ()).busiest


def busiest_sent(holders: Sequence[int], cuts: Sequence[int]) -> int:
    """Values per sample that the busiest node of a pipeline sends; `holders` has the node of each stage in order, `cuts` the
    values between it and the next."""
    sent: Counter[int] = Counter()
    for (before, after), values in zip(pairwise(holders), cuts, strict=True):
        if before != after:
            sent[before] += values  # activations
            sent[after] += values  # gradients
    return max(sent.values(), default=0)


def exchanged_values(parameters: int, nodes: int, one_server: bool) -> float:
    """Per step, through the busiest device, where workers exchange the model: by one server, or spread over all."""
    return float(parameters * (nodes - 1)) if one_server else 2.0 * parameters * (nodes - 1) / nodes


def _traffic(net: Net, family: str, nodes: int, batch_size: int, cuts: tuple[int, ...]) -> Traffic:
    way = parse(family)
    split = (cuts or even_cuts(net, nodes)) if way.splits_layers else ()
    return way.traffic(Sizes(net.size, split, batch_size, net.inside), nodes)


def break_even(net: Net, nodes: int) -> float:
    """Samples per step at which ring and parameter server send as much in all."""
    return net.size * (nodes - 1) / sum(even_cuts(net, nodes))


def prototype_ring() -> float:
    """Cuts after 50, 50 and 10 values, each crossed twice by every sample."""
    return epoch_values(PROTOTYPE, FAMILIES[0], PROTOTYPE_NODES, 1, PROTOTYPE_SAMPLES, PROTOTYPE.outputs)


def prototype_server() -> float:
    """Every sample is a worker's whole batch: the model is pulled and its gradient pushed once for each."""
    return 2.0 * PROTOTYPE.size * PROTOTYPE_SAMPLES
