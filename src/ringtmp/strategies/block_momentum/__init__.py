"""Block momentum: averaging, with the mean change of every block of steps smoothed by those of the blocks before.

K. Chen, Q. Huo, Scalable Training of Deep Learning Machines by Incremental Block Training with Intra-Block Parallel
Optimization and Blockwise Model-Update Filtering, ICASSP 2016 (CNTK's BlockMomentumSGD).

    W(0) <- W_g(0) <- the model;  D(0) <- 0
    for t in 1, 2, ...                          a block of tau batches
      every worker i:  W_i <- tau steps of descent from W_g(t-1), on its own share
      Wbar(t) <- mean over i of W_i             all-reduce
      G(t)    <- Wbar(t) - W_g(t-1)
      D(t)    <- eta D(t-1) + zeta G(t)
      W(t)    <- W(t-1) + D(t)
      W_g(t)  <- W(t)                           classical block momentum
                 W(t) + eta D(t)                nesterov

    symbol   here                                        symbol   here
    N        the number of workers                       eta      the setting momentum; 1 - 1/N as the paper has it
    tau      the setting tau: batches of a block         zeta     the setting rate: 1
    W_g      where all workers begin a block             D        the filtered change, the same on every worker

Departures. The optimizer of the run takes the place of plain descent inside a block, and what it remembers is kept (CNTK
forgets it at the end of a block unless told otherwise). Checkpoints hold where the workers stand (W_g at the end of a block);
D begins at 0 after a resumption and after a loss. With momentum=0 and rate=1 it is `averaging`, to the bit.

Lost worker: as under `averaging`, the others go on from the end of the last block and do the steps since again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

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
from ringtmp.strategies.data_parallel.checked_settings import refuse_too_short

if TYPE_CHECKING:
    from ringtmp.runtime.mailbox import Endpoint
    from ringtmp.strategies.data_parallel.member import WorkerMember
    from ringtmp.wire.messages import Enlist


class BlockMomentumSettings(Settings, frozen=True):
    tau: Annotated[int, described("1 or more", "steps of a block, which each worker makes by itself")] = 8
    momentum: Annotated[float | None, described(
        "0 up to, not including, 1", "eta: how much of the last block's change goes on",
        "Chen and Huo, CNTK: 1 - 1/workers", "1 - 1/workers")] = None  # fmt: skip
    rate: Annotated[float, described("above 0", "zeta: how much of the mean change counts", "CNTK: 1")] = 1.0
    nesterov: Annotated[bool, described(
        "true | false", "begin a block where momentum will carry it", "CNTK: true")] = True  # fmt: skip

    def __post_init__(self) -> None:
        refuse_too_short("tau", self.tau)
        if self.momentum is not None and not 0 <= self.momentum < 1:
            raise UsageError(f"momentum={self.momentum} must be at least 0 and below 1")
        if not 0 < self.rate < float("inf"):
            raise UsageError(f"rate={self.rate} must be a finite number above 0")

    def eta(self, workers: int) -> float:
        return 1 - 1 / workers if self.momentum is None else self.momentum


class BlockMomentum(Strategy):
    name = "block-momentum"
    about = About(
        "Block momentum: averaging, with the mean change of every block smoothed by those of the blocks before",
        "data", "decentralised, one replica each", "synchronous every tau steps", "parameters, as changes",
        "ring of workers", "Chen and Huo 2016 (CNTK)",
    )  # fmt: skip
    runs = (Runs("CNTK, block momentum", "block-momentum"),)
    Settings = BlockMomentumSettings
    short = "tau"
    own_method = True
    short_number = "8 for blocks of 8 steps"
    state_from = "survivors"

    def delayed(self, settings: BlockMomentumSettings) -> bool:
        return settings.tau > 1

    def plan(self, request: PlanRequest) -> Plan:
        from ringtmp.strategies.data_parallel.plan import between_means, plan

        return plan(request, self, pace=between_means(self.read(request.config.ring.strategy_settings).tau))

    def worker(self, endpoint: Endpoint, plan: Enlist, settings: BlockMomentumSettings, roles: Roles) -> WorkerMember:
        from ringtmp.strategies.block_momentum.model_update_filter import UpdateFilter
        from ringtmp.strategies.data_parallel.member import WorkerMember
        from ringtmp.strategies.data_parallel.rounds_of_own_steps import EverySoManySteps, rounds

        workers = len(roles.workers)
        merge = UpdateFilter(settings.eta(workers), settings.rate, settings.nesterov)
        rank = roles.workers.index(endpoint.node)
        exchange = rounds(rank, workers, merge, EverySoManySteps(settings.tau))
        return WorkerMember(endpoint, plan, roles, exchange, hands_over=True)

    def simulate(self, settings: BlockMomentumSettings, task: Task) -> OnPaper:
        from ringtmp.strategies.data_parallel.simulate_sum_over_workers import simulate_sums
        from ringtmp.strategies.data_parallel.simulated_workers import Workload

        load = Workload.of(task)
        step = simulate_sums(load, task.devices, task.paths, every=settings.tau)
        return OnPaper(step, load.memory(task, vectors=2, keeps=True))

    def traffic(self, settings: BlockMomentumSettings, sizes: Sizes, nodes: int) -> Traffic:
        """An all-reduce around a ring every tau steps."""
        total = 2 * sizes.parameters * (nodes - 1) / settings.tau
        return Traffic(total, total / nodes, exchange_bounds.around_a_ring(nodes).apart(settings.tau))


STRATEGY = BlockMomentum()
