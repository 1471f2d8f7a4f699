"""MPCA-SGD: means of all models are made while workers compute, and pull at each of them through a penalty in its loss.

M. Langer, A. Hall, Z. He, W. Rahayu, MPCA SGD: A Method for Distributed Training of Deep Learning Models on Spark, IEEE TPDS 29
(2018), as M. Langer et al. (2020) place it in their taxonomy. The role is in rounds_with_penalty_in_loss.py.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

from ringtmp.errors import UsageError
from ringtmp.plan import exchange_bounds
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
from ringtmp.strategies.data_parallel.checked_settings import refuse_outside, refuse_too_short

if TYPE_CHECKING:
    from ringtmp.runtime.mailbox import Endpoint
    from ringtmp.strategies.data_parallel.member import WorkerMember
    from ringtmp.wire.messages import Enlist


class MpcaSettings(Settings, frozen=True):
    tau: Annotated[int, described("1 or more", "steps from one mean of all models to the next")] = 8
    rho: Annotated[float, described(
        "0 or more", "the penalty: rho / 2 times the squared distance from the centre joins the loss")] = 0.1  # fmt: skip
    delay: Annotated[int | None, described(
        "0 to tau - 1", "steps that are made while a mean is on its way; it counts after them", "", "tau - 1"
    )] = None  # fmt: skip
    extrapolate: Annotated[float, described(
        "0 to 2", "how far the centre goes on as the means have moved, to make up for their age; 0: not at all"
    )] = 1.0  # fmt: skip

    def __post_init__(self) -> None:
        refuse_too_short("tau", self.tau)
        if not 0 <= self.rho < math.inf:
            raise UsageError(f"rho={self.rho:g} must be a finite number of at least 0")
        if self.delay is not None and not 0 <= self.delay < self.tau:
            raise UsageError(f"delay={self.delay} must be from 0 to tau - 1, which is {self.tau - 1}")
        refuse_outside("extrapolate", self.extrapolate, 0.0, 2.0)

    @property
    def steps_under_way(self) -> int:
        return self.tau - 1 if self.delay is None else self.delay


class Mpca(Strategy):
    name = "mpca"
    about = About(
        "MPCA-SGD: means are made while workers compute, and pull at each through a penalty in its loss",
        "data", "decentralised, one replica each", "soft-bounded asynchronous", "parameters, as changes",
        "binomial tree of workers", "Langer et al. 2018",
    )  # fmt: skip
    runs = (Runs("MPCA-SGD", "mpca:8"),)
    Settings = MpcaSettings
    short = "tau"
    state_from = "survivors"

    def parse_short(self, text: str) -> dict[str, Any]:
        if not text.isdigit():
            raise UsageError(f"{self.name}:{text}: write {self.name}:8 for a mean every 8 steps")
        return {self.short: int(text)}

    def delayed(self, settings: MpcaSettings) -> bool:
        return True

    def plan(self, request: PlanRequest) -> Plan:
        from ringtmp.strategies.data_parallel.plan import between_means, plan

        return plan(request, self, pace=between_means(self.read(request.config.ring.strategy_settings).tau))

    def worker(self, endpoint: Endpoint, plan: Enlist, settings: MpcaSettings, roles: Roles) -> WorkerMember:
        from ringtmp.strategies.data_parallel.member import WorkerMember, up_and_down_a_tree
        from ringtmp.strategies.mpca.rounds_with_penalty_in_loss import penalised_rounds

        exchange = penalised_rounds(len(roles.workers), settings)
        return WorkerMember(endpoint, plan, roles, exchange, algorithm=up_and_down_a_tree, hands_over=True)

    def simulate(self, settings: MpcaSettings, task: Task) -> OnPaper:
        """The mean must be there `delay` steps later: what it takes beyond them is waited for."""
        from ringtmp.strategies.data_parallel.simulate_sum_over_workers import (
            simulate_overlapped_sums,
            up_and_down_tree,
        )
        from ringtmp.strategies.data_parallel.simulated_workers import Workload

        load = Workload.of(task)
        step = simulate_overlapped_sums(
            load, task.devices, task.paths,
            way=up_and_down_tree, every=settings.tau, under_way=settings.steps_under_way,
        )  # fmt: skip
        return OnPaper(step, load.memory(task, vectors=4, keeps=True))

    def traffic(self, settings: MpcaSettings, sizes: Sizes, nodes: int) -> Traffic:
        """An all-reduce up and down a tree every tau steps. The root sends the total to every child."""
        most = (nodes - 1).bit_length()
        total, exchange = 2 * sizes.parameters * (nodes - 1), exchange_bounds.up_a_tree(nodes)
        return Traffic(total / settings.tau, sizes.parameters * most / settings.tau, exchange.apart(settings.tau))


STRATEGY = Mpca()
