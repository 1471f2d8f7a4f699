"""Gossip learning: models walk from worker to worker, learn where they are, and merge with those that were there before.

R. Ormandi, I. Hegedus, M. Jelasity, Gossip Learning with Linear Models on Fully Distributed Data, Concurrency and Computation:
Practice and Experience 25 (2013). The role is in walking_models.py.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated, Literal

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
from ringtmp.strategies.data_parallel.checked_settings import refuse_rounding, refuse_too_short

if TYPE_CHECKING:
    from ringtmp.runtime.mailbox import Endpoint
    from ringtmp.strategies.data_parallel.peers import PeerMember
    from ringtmp.wire.messages import Enlist

#: Every visitor in the cache is a whole model.
MOST_VISITORS = 100


class GossipLearningSettings(Settings, frozen=True):
    every: Annotated[int, described(
        "1 or more", "steps a model makes at a worker before it walks on", "Ormandi et al. 2013: 1")] = 1  # fmt: skip
    create: Annotated[Literal["mu", "rw"], described(
        "mu | rw", "mu: a visitor merges with those before it, then learns; rw: it walks at random and only learns",
        "Ormandi et al. 2013: both")] = "mu"  # fmt: skip
    cache: Annotated[int, described(
        f"1 to {MOST_VISITORS}", "visitors that are remembered, to merge the next one with", "Ormandi et al. 2013: 1",
    )] = 1  # fmt: skip

    def __post_init__(self) -> None:
        refuse_too_short("every", self.every)
        if not 1 <= self.cache <= MOST_VISITORS:
            raise UsageError(f"cache={self.cache} must be from 1 to {MOST_VISITORS}")
        if self.create == "rw" and self.cache > 1:
            raise UsageError(f"cache={self.cache} needs create=mu: with create=rw visitors do not merge")

    def check(self, nodes: int, wire: str) -> None:
        refuse_rounding("gossip-learning", wire)


class GossipLearning(Strategy):
    name = "gossip-learning"
    about = About(
        "Gossip learning: models walk from worker to worker, learn there and merge with earlier visitors",
        "data", "decentralised, one walking model each", "asynchronous", "parameters", "peers, by chance",
        "Ormandi et al. 2013",
    )  # fmt: skip
    runs = (Runs("Gossip learning", "gossip-learning"),)
    Settings = GossipLearningSettings
    short = "every"
    short_number = "2 for models that walk on after every second step"

    def exactness(self, settings: GossipLearningSettings) -> str:
        return "steps"

    def delayed(self, settings: GossipLearningSettings) -> bool:
        return True

    def plan(self, request: PlanRequest) -> Plan:
        from ringtmp.strategies.data_parallel.plan import ON_THEIR_OWN, plan

        return plan(request, self, pace=ON_THEIR_OWN)

    def worker(self, endpoint: Endpoint, plan: Enlist, settings: GossipLearningSettings, roles: Roles) -> PeerMember:
        from ringtmp.strategies.data_parallel.peers import PeerMember
        from ringtmp.strategies.gossip_learning.walking_models import walking_models

        return PeerMember(endpoint, plan, roles, walking_models(endpoint.node, roles.workers, settings))

    def can_lose(
        self, settings: GossipLearningSettings, roles: Roles, node: int, bare: Collection[int], nodes: int
    ) -> bool:
        return len(roles.workers) > 1

    def simulate(self, settings: GossipLearningSettings, task: Task) -> OnPaper:
        from ringtmp.strategies.data_parallel.simulate_peers import simulate_peers
        from ringtmp.strategies.data_parallel.simulated_workers import Workload

        load, count = Workload.of(task), len(task.devices)
        sends = [(node, (node + 1) % count) for node in range(count) if count > 1]
        step = simulate_peers(load, task.devices, task.paths, sends, every=settings.every, waits=False)
        return OnPaper(step, load.memory(task, vectors=settings.cache + 1))

    def traffic(self, settings: GossipLearningSettings, sizes: Sizes, nodes: int) -> Traffic:
        """One model from every worker every so many steps."""
        each = sizes.parameters / settings.every if nodes > 1 else 0.0
        exchange = exchange_bounds.one_of_all(1.0).apart(settings.every) if nodes > 1 else None
        return Traffic(each * nodes, each, exchange)


STRATEGY = GossipLearning()
