"""HybComm: each layer's gradient goes the way that sends less, through servers or from worker to worker as factors.

H. Zhang et al., Poseidon: An Efficient Communication Architecture for Distributed Deep Learning on GPU Clusters, USENIX ATC
2017; P. Xie et al., Lighter-Communication Distributed Machine Learning via Sufficient Factor Broadcasting, UAI 2016. The role
is in two_ways.py, the choice in choose_way.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from ringtmp.errors import unknown
from ringtmp.strategies.base import (
    About,
    OnPaper,
    Plan,
    PlanRequest,
    Roles,
    Runs,
    Settings,
    Sizes,
    Strategy,
    Task,
    Traffic,
    described,
)
from ringtmp.strategies.hybcomm.choose_way import by_factors, factor_values, with_samples

if TYPE_CHECKING:
    from ringtmp.plan.devices import LayerCost
    from ringtmp.runtime.mailbox import Endpoint
    from ringtmp.strategies.hybcomm.member import HybCommMember
    from ringtmp.wire.messages import Enlist

WAYS = ("auto", "factors", "server")


class HybCommSettings(Settings, frozen=True):
    way: Annotated[str, described(
        "auto | factors | server",
        "auto: each layer goes the way that sends less; factors: every linear layer as activations and errors, whatever that "
        "takes; server: every gradient through the servers",
        "auto: Poseidon; factors: sufficient factor broadcasting (Xie et al. 2016)")] = "auto"  # fmt: skip

    def __post_init__(self) -> None:
        if self.way not in WAYS:
            raise unknown("way", self.way, WAYS)


class HybComm(Strategy):
    name = "hybcomm"
    about = About(
        "HybComm: each layer's gradient goes through servers or as factors from worker to worker, whichever sends less",
        "data", "centralised, replicated in every worker", "synchronous", "gradients, or activations and errors",
        "n servers and workers; every worker to every other", "Xie et al. 2016; Zhang et al. 2017",
    )  # fmt: skip
    Settings = HybCommSettings
    short = "way"
    state_from = "survivors"
    runs = (Runs("Poseidon (HybComm)", "hybcomm"), Runs("Sufficient factor broadcasting", "hybcomm:factors"))

    def plan(self, request: PlanRequest) -> Plan:
        from ringtmp.strategies.data_parallel.linear_gradients import linear_of
        from ringtmp.strategies.data_parallel.plan import plan

        settings = self.read(request.config.ring.strategy_settings)
        linear = tuple(() if settings.way == "server" else linear_of(each) for each in request.layers)
        rows = tuple(map(_rows, request.index.costs, linear))
        ways = _ways(settings, request, linear, rows)
        names = {way: [name for name, found in ways.items() if found == way] for way in dict.fromkeys(ways.values())}
        lines = tuple(f"{way}: {', '.join(found)}" for way, found in names.items())
        return plan(request, self, linear=linear, rows=rows, lines=lines, facts={"layer_ways": ways})

    def worker(self, endpoint: Endpoint, plan: Enlist, settings: HybCommSettings, roles: Roles) -> HybCommMember:
        from ringtmp.strategies.hybcomm.member import HybCommMember

        return HybCommMember(endpoint, plan, roles, settings.way)

    def simulate(self, settings: HybCommSettings, task: Task) -> OnPaper:
        from ringtmp.strategies.data_parallel.simulate_sum_over_workers import simulate_sums
        from ringtmp.strategies.data_parallel.simulated_workers import Workload
        from ringtmp.strategies.hybcomm.simulate import in_two_ways

        load, count = Workload.of(task), len(task.devices)
        factored = [
            self._chosen(settings, layer.gradient_bytes / 4, layer.factor_values, load.batch_size, count)
            for layer in task.layers
        ]
        step = simulate_sums(load, task.devices, task.paths, way=in_two_ways(factored))
        return OnPaper(step, load.memory(task, vectors=VECTORS))

    def traffic(self, settings: HybCommSettings, sizes: Sizes, nodes: int) -> Traffic:
        """A layer that goes by factors sends those of every sample to all others, the rest goes up and down once."""
        widths = [(size, inputs + outputs) for size, inputs, outputs in sizes.linear]
        factored = [each for each in widths if self._chosen(settings, *each, sizes.samples, nodes)]
        through = sizes.parameters - sum(size for size, _ in factored)
        total = 2 * (nodes - 1) * through
        total += sum(factor_values(sizes.samples, width, nodes) for _, width in factored)
        return Traffic(total, total / nodes)

    def _chosen(self, settings: HybCommSettings, size: float, width: float, samples: float, workers: int) -> bool:
        """`width`: values in the factors of a sample."""
        everyone = tuple(range(workers))
        return width > 0 and by_factors(
            settings.way, round(samples * width), 1, round(size), workers=workers, senders=everyone
        )


#: Of the model's size, at a worker: the factors of all others, and the sums that are put together.
VECTORS = 2


def _rows(cost: LayerCost, linear: tuple[int, ...]) -> float:
    """That a sample makes of such a layer, one where nobody measured it; 0: it is not plain linear."""
    if not linear:
        return 0.0
    width = linear[0] + linear[1]
    return (cost.factor_values or width) / width


def _ways(
    settings: HybCommSettings, request: PlanRequest, linear: Sequence[tuple[int, ...]], rows: Sequence[float]
) -> dict[str, str]:
    """By layer with parameters: the way that its gradient of a whole batch takes, and why if that is no choice."""
    from ringtmp.strategies.data_parallel.replica import layer_flat

    workers, found = request.config.ring.nodes, dict[str, str]()
    for layer, known, of_sample in zip(request.layers, linear, rows, strict=True):
        size = layer_flat(layer).size
        if not size:
            continue
        if settings.way == "server":
            found[layer.name] = "through the servers, as asked for"
        elif not known:
            found[layer.name] = "through the servers, no plain linear layer"
        else:
            senders, total = with_samples(request.microbatches, workers), round(request.batch_size * of_sample)
            factored = by_factors(settings.way, total, known[0] + known[1], size, workers=workers, senders=senders)
            found[layer.name] = "as factors" if factored else "through the servers, which sends less"
    return found


STRATEGY = HybComm()
