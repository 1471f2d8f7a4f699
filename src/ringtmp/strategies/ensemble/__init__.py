"""Ensemble: every worker trains a model of its own on a part of the data of its own, and predictions are combined.

L. Breiman, Bagging Predictors, Machine Learning 24 (1996); D. Wolpert, Stacked Generalization, Neural Networks 5 (1992);
N. Oza, S. Russell, Online Bagging and Boosting, AISTATS 2001. The roles are in own_training.py and combining_leader.py.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated, Literal

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
from ringtmp.wire.formats import PLAIN, wire_format

if TYPE_CHECKING:
    from ringtmp.runtime.mailbox import Endpoint
    from ringtmp.strategies.data_parallel.peers import PeerMember
    from ringtmp.wire.messages import Enlist


class EnsembleSettings(Settings, frozen=True):
    combine: Annotated[Literal["mean", "vote", "stacking"], described(
        "mean | vote | stacking", "mean of the members' probabilities; a vote each; or a weighted mean, weights fitted on "
        "samples that a member has not learned from", "bagging: vote and mean (Breiman 1996); stacking: Wolpert 1992",
    )] = "mean"  # fmt: skip
    sample: Annotated[Literal["shard", "bootstrap"], described(
        "shard | bootstrap", "shard: a member learns from 1/n of the samples, none of them another's; bootstrap: from as many "
        "as there are, drawn with replacement", "bootstrap: Breiman 1996")] = "shard"  # fmt: skip

    def check(self, nodes: int, wire: str) -> None:
        if not wire_format(wire).exact:
            raise UsageError(f"in an ensemble no parameters travel that {wire} could shrink: use --wire {PLAIN.name}")


class Ensemble(Strategy):
    name = "ensemble"
    about = About(
        "Ensemble: every worker trains a model of its own on its part of the data, and predictions are combined",
        "data", "decentralised, one model each", "none", "nothing in training, predictions in an evaluation",
        "1 master : n workers", "Breiman 1996; Wolpert 1992; Verbraeken et al. 2020, 3.3",
    )  # fmt: skip
    runs = (Runs("Ensembles", "ensemble:vote"),)
    Settings = EnsembleSettings
    short = "combine"
    own_method = True

    def plan(self, request: PlanRequest) -> Plan:
        from ringtmp.strategies.data_parallel.plan import MOST_AHEAD, Pace, plan
        from ringtmp.strategies.ensemble.combining_leader import CombiningLeader, refuse_uncombined

        settings = self.read(request.config.ring.strategy_settings)
        refuse_uncombined(request, settings.combine)
        return plan(request, self, pace=Pace(ahead=MOST_AHEAD, alike=False), leader=CombiningLeader)

    def worker(self, endpoint: Endpoint, plan: Enlist, settings: EnsembleSettings, roles: Roles) -> PeerMember:
        from ringtmp.strategies.data_parallel.peers import PeerMember
        from ringtmp.strategies.ensemble.own_training import OwnTraining

        return PeerMember(
            endpoint, plan, roles, lambda plan, replica, recorder, _: OwnTraining(plan, replica, recorder)
        )

    def can_lose(self, settings: EnsembleSettings, roles: Roles, node: int, bare: Collection[int], nodes: int) -> bool:
        return len(roles.workers) > 1

    def simulate(self, settings: EnsembleSettings, task: Task) -> OnPaper:
        from ringtmp.strategies.data_parallel.simulate_peers import simulate_peers
        from ringtmp.strategies.data_parallel.simulated_workers import Workload

        load = Workload.of(task)
        step = simulate_peers(load, task.devices, task.paths, (), waits=False)
        return OnPaper(step, load.memory(task))

    def carried(self, task: Task) -> str:
        return "nothing"

    def traffic(self, settings: EnsembleSettings, sizes: Sizes, nodes: int) -> Traffic:
        return Traffic(0.0, 0.0)


STRATEGY = Ensemble()
