"""L-BFGS over the whole data: workers hold shards of the history, and scalars alone decide the direction."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from ringtmp.errors import UsageError
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
from ringtmp.wire.formats import wire_format

if TYPE_CHECKING:
    from ringtmp.runtime.mailbox import Endpoint
    from ringtmp.strategies.data_parallel.member import WorkerMember
    from ringtmp.wire.messages import Enlist

MOST_PAIRS = 50


class LbfgsSettings(Settings, frozen=True):
    memory: Annotated[int, described(
        "1..50", "pairs of steps and gradient changes that are kept, a shard of each on every worker")] = 10  # fmt: skip
    curvature: Annotated[float, described(
        "above 0, below 1", "a step along the direction is good where the slope is below this part of the first; small "
        "values make the line search exact")] = 0.5  # fmt: skip

    def __post_init__(self) -> None:
        if not 1 <= self.memory <= MOST_PAIRS:
            raise UsageError(f"memory={self.memory} must be from 1 to {MOST_PAIRS}")
        if not 0 < self.curvature < 1:
            raise UsageError(f"curvature={self.curvature} must be above 0 and below 1")

    def check(self, nodes: int, wire: str) -> None:
        if not wire_format(wire).exact:
            raise UsageError(f"lbfgs sends differences of gradients, which {wire} would drown: use --wire float32")

    def products(self, workers: int) -> int:
        """Values of one exchange of inner products: of 2 memory + 3 vectors with each other, from every worker, in two
        float32 each."""
        return 2 * workers * (2 * self.memory + 3) ** 2


class Lbfgs(Strategy):
    name = "lbfgs"
    about = About(
        "L-BFGS: every step takes the whole data, and inner products over shards of the history decide the direction",
        "data, with sharded state", "centralised, replicated in every worker", "synchronous",
        "gradients, inner products, parameters", "ring of workers", "Dean et al. 2012 (Sandblaster); Chen et al. 2014",
    )  # fmt: skip
    Settings = LbfgsSettings
    short = "memory"
    full_batch = True
    runs = (
        Runs("Sandblaster L-BFGS", "lbfgs", lacks="small pieces of the data for those who are done early"),
    )  # fmt: skip

    def parse_short(self, text: str) -> dict[str, int]:
        if not text.isdigit():
            raise UsageError(f"{self.name}:{text}: {text!r} is not a number of pairs to keep, 1 to {MOST_PAIRS}")
        return {self.short: int(text)}

    def plan(self, request: PlanRequest) -> Plan:
        from ringtmp.strategies.data_parallel.plan import plan

        if request.config.training.clip_norm is not None:
            raise UsageError("--clip-norm bends the gradients that lbfgs takes differences of: leave it out")
        unused = "the line search of lbfgs decides how far a step goes: --optimizer and --lr play no part"
        return plan(request, self, warnings=(unused,))

    def worker(self, endpoint: Endpoint, plan: Enlist, settings: LbfgsSettings, roles: Roles) -> WorkerMember:
        from functools import partial

        from ringtmp.strategies.data_parallel.member import WorkerMember
        from ringtmp.strategies.lbfgs.exchange import Descent, bucket_sizes

        rank, n = roles.workers.index(endpoint.node), len(roles.workers)
        make = partial(Descent, settings=settings, rank=rank, workers=n)
        return WorkerMember(endpoint, plan, roles, make, sizes=bucket_sizes(plan.sizes, settings.products(n)))

    def simulate(self, settings: LbfgsSettings, task: Task) -> OnPaper:
        """As two sums over all workers, of the gradient and of the parameters."""
        from ringtmp.strategies.data_parallel.simulate_sum_over_workers import simulate_sums
        from ringtmp.strategies.data_parallel.simulated_workers import Workload

        load = Workload.of(task)
        twice = replace(load, wire_ratio=2 * load.wire_ratio)
        return OnPaper(simulate_sums(twice, task.devices, task.paths), load.memory(task))

    def traffic(self, settings: LbfgsSettings, sizes: Sizes, nodes: int) -> Traffic:
        total = 2 * (nodes - 1) * (2 * sizes.parameters + settings.products(nodes))
        return Traffic(total, total / nodes)


STRATEGY = Lbfgs()
