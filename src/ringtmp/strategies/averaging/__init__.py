"""Averaging: workers make tau steps of their own, then all go on from the mean of their parameters.

P. Moritz, R. Nishihara, I. Stoica, M. Jordan, SparkNet: Training Deep Networks in Spark, ICLR 2016; R. McDonald et al.,
Distributed Training Strategies for the Structured Perceptron, 2010; S. Stich, Local SGD Converges Fast, 2019.

    master: w <- mean over i of w_i, given to all          worker i
                                                           w_i <- w
                                                           for u in t + 1, ..., t + tau
                                                             x <- share i of batch u
                                                             w_i <- w_i - rate(u) gradient of the mean loss of x at w_i
                                                           send w_i;  t <- t + tau

    symbol    here                       symbol    here
    w         the mean, on every worker  tau       the setting tau
    w_i       worker i's replica         eta       the learning rate of the run and its schedule

Departures. The mean is summed around a ring or up and down a tree of all workers, the master among them, not collected by a
driver. What travels is each worker's change since the last mean. The optimizer of the run takes the place of plain descent,
and what it remembers stays each worker's own. Workers draw their samples from the run's batches, not from a partition of
their own. Between two means a checkpoint, and an evaluation, are of the mean of what the workers have then.

tau=auto: how often there is a mean follows the loss (Wang and Joshi 2019), in adaptive_tau.py.

With tau = 1, plain descent and equal shares it is all-reduce: mean of (w - rate g_i) = w - rate mean of g_i; to the bit where
nothing is rounded, otherwise to rounding.

Lost worker: every worker keeps what all had at the last mean. The others go on from there, with or without a replacement,
and do the steps since again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from ringtmp.errors import UsageError, unknown
from ringtmp.plan import exchange_bounds
from ringtmp.plan.exchange_bounds import Exchange
from ringtmp.strategies.averaging.adaptive_tau import AdaptiveTau, read_budget
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
from ringtmp.strategies.data_parallel.checked_settings import refuse_too_short
from ringtmp.wire.formats import wire_format

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from ringtmp.config import RunConfig
    from ringtmp.runtime.mailbox import Endpoint
    from ringtmp.strategies.data_parallel.member import WorkerMember
    from ringtmp.wire.messages import Enlist

ALGORITHMS = ("ring", "tree")
AUTO = "auto"


class AveragingSettings(Settings, frozen=True):
    tau: Annotated[int | str, described(
        "1 or more | auto", "steps of its own that a worker makes between two means; auto: fewer as the loss falls",
        "SparkNet: 50; at most 10 learns best. auto: Wang and Joshi 2019")] = 8  # fmt: skip
    algorithm: Annotated[str, described("ring | tree", "how changes are summed, as in allreduce")] = "ring"
    budget: Annotated[str, described(
        "such as 30s or 4MiB", "with auto: tau is chosen anew whenever so many seconds have passed, or bytes were sent by all",
        "Wang and Joshi 2019: 60s", "none; auto needs one")] = ""  # fmt: skip
    first: Annotated[int, described("1 or more", "with auto: tau to begin with", "Wang and Joshi 2019: 10 to 100")] = 16

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise unknown("algorithm", self.algorithm, ALGORITHMS)
        if self.tau == AUTO:
            read_budget(self.budget)
        elif not isinstance(self.tau, int) or self.tau < 1:
            raise UsageError(f"tau={self.tau} must be a whole number of at least 1, or {AUTO}")
        elif self.budget or self.first != 16:
            raise UsageError(
                f"budget and first say how tau={AUTO} is chosen, and tau={self.tau} is fixed: leave them out"
            )
        refuse_too_short("first", self.first)

    @property
    def first_tau(self) -> int:
        return self.tau if isinstance(self.tau, int) else self.first


class Averaging(Strategy):
    name = "averaging"
    about = About(
        "Averaging: workers make tau steps of their own, then all go on from the mean of their parameters",
        "data", "decentralised, one replica each", "synchronous every tau steps", "parameters, as changes",
        "ring or tree of workers", "Moritz et al. 2016 (SparkNet); McDonald et al. 2010; Stich 2019",
    )  # fmt: skip
    runs = (Runs("SparkNet", "averaging:tau=50:algorithm=tree"),)
    Settings = AveragingSettings
    short = "tau"
    state_from = "survivors"
    own_method = own_among_several = True  # with tau=1, too: each worker has an optimizer of its own

    def parse_short(self, text: str) -> dict[str, Any]:
        if not text.isdigit() and text != AUTO:
            raise UsageError(f"{self.name}:{text}: write {self.name}:8 for a mean every 8 steps, or {self.name}:{AUTO}")
        return {self.short: text if text == AUTO else int(text)}

    def exactness(self, settings: AveragingSettings) -> str:
        timed = settings.tau == AUTO and not read_budget(settings.budget).in_bytes
        return "steps" if timed else "replay"

    def delayed(self, settings: AveragingSettings) -> bool:
        return settings.first_tau > 1

    def ways(self, config: RunConfig) -> Sequence[RunConfig]:
        return [config]

    def plan(self, request: PlanRequest) -> Plan:
        from ringtmp.strategies.data_parallel.plan import between_means, plan

        return plan(request, self, pace=between_means(self.read(request.config.ring.strategy_settings).first_tau))

    def worker(self, endpoint: Endpoint, plan: Enlist, settings: AveragingSettings, roles: Roles) -> WorkerMember:
        from ringtmp.strategies.data_parallel.member import WorkerMember, around_a_ring, up_and_down_a_tree
        from ringtmp.strategies.data_parallel.rounds_of_own_steps import (
            EverySoManySteps,
            RoundLength,
            rounds,
            summed_sizes,
        )

        count, rank = len(roles.workers), roles.workers.index(endpoint.node)
        length: RoundLength = EverySoManySteps(settings.first_tau)
        if settings.tau == AUTO:
            round_bytes = 2 * (count - 1) * wire_format(plan.wire).payload_bytes(sum(plan.sizes))
            budget = read_budget(settings.budget)
            length = AdaptiveTau(settings.first, budget, round_bytes, plan.step, endpoint.clock)
        algorithm = around_a_ring if settings.algorithm == "ring" else up_and_down_a_tree
        return WorkerMember(
            endpoint, plan, roles, rounds(rank, count, to_the_mean, length),
            algorithm=algorithm, hands_over=True, sizes=summed_sizes(plan.sizes, count, length),
        )  # fmt: skip

    def simulate(self, settings: AveragingSettings, task: Task) -> OnPaper:
        from ringtmp.strategies.data_parallel.simulate_sum_over_workers import (
            around_ring,
            simulate_sums,
            up_and_down_tree,
        )
        from ringtmp.strategies.data_parallel.simulated_workers import Workload

        load, way = Workload.of(task), up_and_down_tree if settings.algorithm == "tree" else around_ring
        step = simulate_sums(load, task.devices, task.paths, way=way, every=settings.first_tau)
        return OnPaper(step, load.memory(task, vectors=1, keeps=True))

    def traffic(self, settings: AveragingSettings, sizes: Sizes, nodes: int) -> Traffic:
        """An all-reduce every tau steps. A tree's root sends the total to every child. With auto it is what the first steps
        send; the longer the run, the more."""
        tau = settings.first_tau
        most = (nodes - 1).bit_length() if settings.algorithm == "tree" else 2 * (nodes - 1) / nodes
        total = 2 * sizes.parameters * (nodes - 1)
        return Traffic(total / tau, sizes.parameters * most / tau, self._exchange(settings, nodes))

    def _exchange(self, settings: AveragingSettings, nodes: int) -> Exchange | None:
        if settings.tau == AUTO:
            return None
        kind = exchange_bounds.up_a_tree if settings.algorithm == "tree" else exchange_bounds.around_a_ring
        return kind(nodes).apart(settings.first_tau)


def to_the_mean(layer: int, begun: torch.Tensor, change: torch.Tensor) -> None:
    """w <- mean of w_i = w + mean of (w_i - w)"""
    begun.add_(change)


STRATEGY = Averaging()
