"""All-reduce: every node has the whole model and ends every step with the same sum of gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from ringtmp.errors import UsageError, unknown
from ringtmp.plan import exchange_bounds
from ringtmp.plan.exchange_bounds import Exchange
from ringtmp.strategies.base import (
    About,
    OfRanks,
    OnPaper,
    Roles,
    Runs,
    Settings,
    Sizes,
    Strategy,
    Task,
    Traffic,
    described,
)
from ringtmp.wire.formats import PLAIN

if TYPE_CHECKING:
    from ringtmp.config import RunConfig
    from ringtmp.runtime.mailbox import Endpoint
    from ringtmp.strategies.base import Plan, PlanRequest
    from ringtmp.strategies.data_parallel.member import WorkerMember
    from ringtmp.wire.messages import Enlist

#: Made by torch.distributed itself.
TORCH = "torch"
ALGORITHMS = ("ring", "tree", "halving", TORCH)
#: Weights are gathered twice and gradients summed into parts; to sum them and have all of them everywhere is two such journeys.
SHARDED_TRAFFIC = 1.5


class AllReduceSettings(Settings, frozen=True):
    algorithm: Annotated[str, described(
        "ring | tree | halving | torch",
        "chunks around a ring, whole gradients up and down a binomial tree, halves at distance 1, 2, 4, …, or by torchrun's "
        "ranks as torch.distributed does it",
        "ring: Baidu, Horovod; tree: FireCaffe; halving: MPICH; torch: DDP")] = "ring"  # fmt: skip
    shard: Annotated[bool, described(
        "false | true",
        "true: every rank keeps a part of the weights and the optimizer's state, and gathers a layer when it runs",
        "true: FSDP, ZeRO stage 3")] = False  # fmt: skip

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise unknown("algorithm", self.algorithm, ALGORITHMS)
        if self.shard and not self.by_torch:
            raise UsageError(
                f"shard=true lets torch.distributed cut the model over the ranks, which goes with allreduce:{TORCH} only, not "
                f"with algorithm={self.algorithm}"
            )

    def check(self, nodes: int, wire: str) -> None:
        if self.by_torch and wire != PLAIN.name:
            raise UsageError(
                f"--wire {wire} does not go with allreduce:{TORCH}: torch.distributed sums {PLAIN.name}; use allreduce:ring"
            )

    @property
    def by_torch(self) -> bool:
        return self.algorithm == TORCH

    @property
    def tree(self) -> bool:
        return self.algorithm == "tree"

    @property
    def halving(self) -> bool:
        return self.algorithm == "halving"


def refuse_unsharded(request: PlanRequest) -> None:
    """UsageError for what cannot be cut over ranks by rows."""
    from ringtmp.runtime.optimizers import OPTIMIZERS

    instead = "leave out shard=true, or cut the model by layers with --strategy ring"
    training = request.config.training
    if training.compile:
        raise UsageError(f"--compile does not go with shard=true, untried: a layer's memory comes and goes; {instead}")
    if OPTIMIZERS[training.optimizer].matrices is not None:
        raise UsageError(
            f"{training.optimizer} needs whole matrices, of which shard=true leaves a rank some rows; {instead}"
        )
    for layer in request.layers:
        for each in layer.tensors:
            if each.trainable and not each.shape:
                raise UsageError(f"{layer.full_name(each)} is a single number, which shard=true cannot cut; {instead}")


class AllReduce(Strategy):
    name = "allreduce"
    about = About(
        "All-reduce: every node has the whole model and ends every step with the same sum of gradients",
        "data", "centralised, replicated in every worker", "synchronous", "gradients",
        "ring, tree or pairs of workers", "Patarasuk and Yuan 2009; Iandola et al. 2016",
    )  # fmt: skip
    Settings = AllReduceSettings
    short = "algorithm"
    state_from = "survivors"
    order_of_sums = frozenset({"algorithm", "shard"})
    tree_name = "allreduce:halving"
    sums_gradients = True
    runs = (
        Runs("FireCaffe", "allreduce:tree"),
        Runs("PyTorch", "allreduce:ring"),
        Runs("Baidu AllReduce", "allreduce:ring"),
        Runs("Horovod", "allreduce:ring"),
        Runs("Caffe2", "allreduce:halving"),
        Runs("CNTK, 1-bit SGD", "allreduce:ring:wire=1bit"),
    )

    def sums_by_tree(self, settings: AllReduceSettings) -> bool:
        return settings.halving

    def ways(self, config: RunConfig) -> Sequence[RunConfig]:
        from ringtmp.config import replaced

        return [replaced(config, {"strategy_settings": {self.short: each}}) for each in ALGORITHMS if each != TORCH]

    def needs_ranks(self, settings: AllReduceSettings) -> OfRanks:
        return OfRanks.MESH if settings.shard else OfRanks.SUMS if settings.by_torch else OfRanks.NOTHING

    def plan(self, request: PlanRequest) -> Plan:
        if self.read(request.config.ring.strategy_settings).shard:
            refuse_unsharded(request)
        return super().plan(request)

    def worker(self, endpoint: Endpoint, plan: Enlist, settings: AllReduceSettings, roles: Roles) -> WorkerMember:
        if settings.by_torch:
            from ringtmp.strategies.allreduce.torch_sums import RankMember

            return RankMember(endpoint, plan, roles, settings.shard)
        from ringtmp.strategies.allreduce.gradients import Gradients, by_halving
        from ringtmp.strategies.data_parallel.member import WorkerMember, around_a_ring, up_and_down_a_tree

        if settings.halving:
            make, algorithm = by_halving(plan, roles, endpoint.node)
            return WorkerMember(endpoint, plan, roles, make, algorithm=algorithm, hands_over=True)
        if settings.tree:
            return WorkerMember(endpoint, plan, roles, Gradients, algorithm=up_and_down_a_tree, hands_over=True)
        return WorkerMember(endpoint, plan, roles, Gradients, algorithm=around_a_ring, hands_over=True)

    def simulate(self, settings: AllReduceSettings, task: Task) -> OnPaper:
        from ringtmp.strategies.data_parallel import simulate_sum_over_workers as on_paper
        from ringtmp.strategies.data_parallel.simulated_workers import Workload

        ways = (on_paper.around_ring, on_paper.up_and_down_tree, on_paper.by_halving, on_paper.around_ring)
        way = dict(zip(ALGORITHMS, ways, strict=True))[settings.algorithm]
        load = Workload.of(task)
        if settings.shard:
            load = replace(load, wire_ratio=load.wire_ratio * SHARDED_TRAFFIC)
        step, memory = on_paper.simulate_sums(load, task.devices, task.paths, way=way), load.memory(task)
        if settings.shard:
            largest = max(layer.gradient_bytes for layer in task.layers)
            memory = tuple(each.in_shares(len(task.devices), largest) for each in memory)
        return OnPaper(step, memory)

    def traffic(self, settings: AllReduceSettings, sizes: Sizes, nodes: int) -> Traffic:
        """A tree's root sends the total to every child."""
        most = math.ceil(math.log2(nodes)) if settings.tree else 2 * (nodes - 1) / nodes
        if settings.halving:
            from ringtmp.plan.sum_tree import one_part_each

            most = one_part_each(nodes).most_sent()
        total = 2 * sizes.parameters * (nodes - 1)
        if settings.shard:
            total, most = total * SHARDED_TRAFFIC, most * SHARDED_TRAFFIC
        return Traffic(total, sizes.parameters * most, self._exchange(settings, nodes))

    def _exchange(self, settings: AllReduceSettings, nodes: int) -> Exchange | None:
        kind = exchange_bounds.between_pairs if settings.halving else exchange_bounds.around_a_ring
        return exchange_bounds.up_a_tree(nodes) if settings.tree else kind(nodes)


STRATEGY = AllReduce()
