"""EASGD: workers train by themselves and every tau steps each pulls its model and a centre towards each other.

S. Zhang, A. Choromanska, Y. LeCun, Deep Learning with Elastic Averaging SGD, NIPS 2015. The roles are in elastic_averaging.py.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated

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
from ringtmp.strategies.data_parallel.checked_settings import refuse_outside, refuse_rounding, refuse_too_short

if TYPE_CHECKING:
    from ringtmp.runtime.mailbox import Endpoint
    from ringtmp.strategies.data_parallel.member import ParallelMember
    from ringtmp.wire.messages import Enlist

#: alpha = BETA / workers, as the paper has it.
BETA = 0.9


class EasgdSettings(Settings, frozen=True):
    tau: Annotated[int, described(
        "1 or more", "steps of its own that a worker makes between two exchanges",
        "Zhang et al. 2015: 4 to 64")] = 4  # fmt: skip
    alpha: Annotated[float | None, described(
        "0 to 0.5", "how far worker and centre move towards each other in an exchange", "Zhang et al. 2015: 0.9 / workers",
        "0.9 / workers, at most 0.5")] = None  # fmt: skip

    def __post_init__(self) -> None:
        refuse_too_short("tau", self.tau)
        if self.alpha is not None:
            refuse_outside("alpha", self.alpha, 0.0, 0.5)

    def moving_rate(self, workers: int) -> float:
        return min(0.5, BETA / workers) if self.alpha is None else self.alpha

    def check(self, nodes: int, wire: str) -> None:
        refuse_rounding("easgd", wire)


class Easgd(Strategy):
    name = "easgd"
    about = About(
        "EASGD: workers train by themselves and every tau steps each pulls its model and a centre towards each other",
        "data", "decentralised, one replica each and a centre", "asynchronous",
        "parameters down, elastic differences up", "1 centre : n workers", "Zhang et al. 2015",
    )  # fmt: skip
    runs = (Runs("EASGD", "easgd:tau=10"),)
    Settings = EasgdSettings
    short = "tau"
    short_number = "4 for an exchange every 4 steps"

    def roles(self, settings: EasgdSettings, nodes: int) -> Roles:
        return Roles((0,), tuple(range(1, nodes)) or (0,))

    def exactness(self, settings: EasgdSettings) -> str:
        return "steps"

    def delayed(self, settings: EasgdSettings) -> bool:
        return True

    def plan(self, request: PlanRequest) -> Plan:
        from ringtmp.strategies.data_parallel.plan import ON_THEIR_OWN, plan

        return plan(request, self, pace=ON_THEIR_OWN)

    def worker(self, endpoint: Endpoint, plan: Enlist, settings: EasgdSettings, roles: Roles) -> ParallelMember:
        from ringtmp.strategies.easgd.elastic_averaging import EasgdMember

        return EasgdMember(endpoint, plan, roles, settings.tau, settings.moving_rate(len(roles.workers)))

    def can_lose(self, settings: EasgdSettings, roles: Roles, node: int, bare: Collection[int], nodes: int) -> bool:
        return node not in roles.servers and roles.workers != (node,)

    def simulate(self, settings: EasgdSettings, task: Task) -> OnPaper:
        from ringtmp.strategies.data_parallel.simulate_peers import simulate_peers
        from ringtmp.strategies.data_parallel.simulated_workers import Workload

        load, workers = Workload.of(task), range(1, len(task.devices))
        sends = [each for worker in workers for each in ((0, worker), (worker, 0))]
        servers = 1 if workers else 0
        step = simulate_peers(load, task.devices, task.paths, sends, every=settings.tau, servers=servers)
        return OnPaper(step, load.memory(task, servers, vectors=1))

    def traffic(self, settings: EasgdSettings, sizes: Sizes, nodes: int) -> Traffic:
        """The centre to a worker and its difference back, every tau steps."""
        one_way = sizes.parameters * (nodes - 1) / settings.tau
        exchange = exchange_bounds.asynchronous(nodes - 1).apart(settings.tau) if nodes > 1 else None
        return Traffic(2 * one_way, one_way, exchange)


STRATEGY = Easgd()
