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

With tau = 1, plain descent and equal shares it is all-reduce: mean of (w - rate g_i) = w - rate mean of g_i; to the bit where
nothing is rounded, otherwise to rounding.

Lost worker: every worker keeps what all had at the last mean. The others go on from there, with or without a replacement,
and do the steps since again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from ringtmp.errors import UsageError, unknown
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

if TYPE_CHECKING:
    import torch

    from ringtmp.runtime.mailbox import Endpoint
    from ringtmp.strategies.data_parallel.member import WorkerMember
    from ringtmp.wire.messages import Enlist

ALGORITHMS = ("ring", "tree")


class AveragingSettings(Settings, frozen=True):
    tau: Annotated[int, described(
        "1 or more", "steps of its own that a worker makes between two means",
        "SparkNet: 50; at most 10 learns best")] = 8  # fmt: skip
    algorithm: Annotated[str, described("ring | tree", "how changes are summed, as in allreduce")] = "ring"

    def __post_init__(self) -> None:
        if self.tau < 1:
            raise UsageError(f"tau={self.tau} must be a whole number of at least 1")
        if self.algorithm not in ALGORITHMS:
            raise unknown("algorithm", self.algorithm, ALGORITHMS)


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

    def parse_short(self, text: str) -> dict[str, Any]:
        if not text.isdigit():
            raise UsageError(f"{self.name}:{text}: write {self.name}:8 for a mean every 8 steps")
        return {self.short: int(text)}

    def delayed(self, settings: AveragingSettings) -> bool:
        return settings.tau > 1

    def plan(self, request: PlanRequest) -> Plan:
        from ringtmp.strategies.data_parallel.plan import between_means, plan

        return plan(request, self, pace=between_means(self.read(request.config.ring.strategy_settings).tau))

    def worker(self, endpoint: Endpoint, plan: Enlist, settings: AveragingSettings, roles: Roles) -> WorkerMember:
        from ringtmp.strategies.data_parallel.member import WorkerMember, around_a_ring, up_and_down_a_tree
        from ringtmp.strategies.data_parallel.rounds_of_own_steps import EverySoManySteps, rounds

        exchange = rounds(len(roles.workers), to_the_mean, EverySoManySteps(settings.tau))
        algorithm = around_a_ring if settings.algorithm == "ring" else up_and_down_a_tree
        return WorkerMember(endpoint, plan, roles, exchange, algorithm=algorithm, hands_over=True)

    def simulate(self, settings: AveragingSettings, task: Task) -> OnPaper:
        from ringtmp.strategies.data_parallel.simulate_sum_over_workers import (
            around_ring,
            simulate_sums,
            up_and_down_tree,
        )
        from ringtmp.strategies.data_parallel.simulated_workers import Workload

        load, way = Workload.of(task), up_and_down_tree if settings.algorithm == "tree" else around_ring
        step = simulate_sums(load, task.devices, task.paths, way=way, every=settings.tau)
        return OnPaper(step, load.memory(task, vectors=1, keeps=True))

    def traffic(self, settings: AveragingSettings, sizes: Sizes, nodes: int) -> Traffic:
        """An all-reduce every tau steps. A tree's root sends the total to every child."""
        most = (nodes - 1).bit_length() if settings.algorithm == "tree" else 2 * (nodes - 1) / nodes
        return Traffic(2 * sizes.parameters * (nodes - 1) / settings.tau, sizes.parameters * most / settings.tau)


def to_the_mean(layer: int, begun: torch.Tensor, change: torch.Tensor) -> None:
    """w <- mean of w_i = w + mean of (w_i - w)"""
    begun.add_(change)


STRATEGY = Averaging()
