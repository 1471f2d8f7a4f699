"""GADMM: workers in a chain each solve their own problem, in two groups by turns, and duals make neighbours agree.

A. Elgabli, J. Park, A. S. Bedi, M. Bennis, V. Aggarwal, GADMM: Fast and Communication Efficient Framework for Distributed
Machine Learning, Journal of Machine Learning Research 21 (2020). The role is in heads_and_tails.py.
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
from ringtmp.strategies.data_parallel.checked_settings import refuse_rounding

if TYPE_CHECKING:
    from ringtmp.runtime.mailbox import Endpoint
    from ringtmp.strategies.data_parallel.peers import PeerMember
    from ringtmp.wire.messages import Enlist

MOST_PASSES = 1000


class GadmmSettings(Settings, frozen=True):
    rho: Annotated[float, described(
        "above 0", "how hard neighbours pull at each other: rho / 2 times their squared distance joins the objective; best "
        "about as large as the curvature of one worker's part of the objective")] = 0.2  # fmt: skip
    passes: Annotated[int, described(
        f"1 to {MOST_PASSES}", "the most gradients of its samples that a worker takes to solve its problem in one step",
    )] = 20  # fmt: skip
    tolerance: Annotated[float, described(
        "above 0, below 1", "a problem is solved when its gradient has fallen to this part of the first of the step",
    )] = 1e-3  # fmt: skip

    def __post_init__(self) -> None:
        if not 0 < self.rho < math.inf:
            raise UsageError(f"rho={self.rho:g} must be a finite number above 0")
        if not 1 <= self.passes <= MOST_PASSES:
            raise UsageError(f"passes={self.passes} must be from 1 to {MOST_PASSES}")
        if not 0 < self.tolerance < 1:
            raise UsageError(f"tolerance={self.tolerance:g} must be above 0 and below 1")

    def check(self, nodes: int, wire: str) -> None:
        refuse_rounding("gadmm", wire)


class Gadmm(Strategy):
    name = "gadmm"
    about = About(
        "GADMM: workers in a chain solve their own problems, in two groups by turns, and duals make neighbours agree",
        "data", "decentralised, one replica each", "synchronous, two groups by turns", "parameters",
        "chain: everyone talks to two neighbours", "Elgabli et al. 2020",
    )  # fmt: skip
    runs = (Runs("GADMM", "gadmm", lacks="a chain that is formed anew as devices move (D-GADMM)"),)
    Settings = GadmmSettings
    short = "rho"
    full_batch = True

    def parse_short(self, text: str) -> dict[str, Any]:
        try:
            return {self.short: float(text)}
        except ValueError:
            raise UsageError(f"{self.name}:{text}: write {self.name}:0.2 for rho = 0.2") from None

    def plan(self, request: PlanRequest) -> Plan:
        from ringtmp.strategies.data_parallel.plan import Pace, plan

        if request.config.training.clip_norm is not None:
            raise UsageError("--clip-norm bends the gradients that gadmm solves its problems with: leave it out")
        unused = "gadmm solves each worker's problem to its end: --optimizer and --lr play no part"
        return plan(request, self, pace=Pace(alike=False, own_samples=True), warnings=(unused,))

    def worker(self, endpoint: Endpoint, plan: Enlist, settings: GadmmSettings, roles: Roles) -> PeerMember:
        from ringtmp.strategies.data_parallel.peers import PeerMember
        from ringtmp.strategies.gadmm.heads_and_tails import heads_and_tails

        return PeerMember(endpoint, plan, roles, heads_and_tails(endpoint.node, roles.workers, settings))

    def simulate(self, settings: GadmmSettings, task: Task) -> OnPaper:
        """With all the passes that are allowed; the vectors of a worker are in the role's last sentence on memory."""
        from ringtmp.strategies.data_parallel.simulated_workers import Workload
        from ringtmp.strategies.gadmm.simulate_turns import simulate_turns

        load = Workload.of(task)
        step = simulate_turns(load, task.devices, task.paths, passes=settings.passes)
        return OnPaper(step, load.memory(task, vectors=VECTORS))

    def traffic(self, settings: GadmmSettings, sizes: Sizes, nodes: int) -> Traffic:
        """A model each way between neighbours in every step."""
        most = min(nodes - 1, 2)
        exchange = exchange_bounds.to_neighbours(most)
        return Traffic(2 * (nodes - 1) * sizes.parameters, most * sizes.parameters, exchange)


#: Of the model's size in float32 at a worker: two neighbours' models, two duals, and in float64 ten pairs of steps and gradient
#: changes and six vectors more.
VECTORS = 2 + 2 + 2 * (2 * 10 + 6)

STRATEGY = Gadmm()
