"""All-reduce: every node has the whole model and ends every step with the same sum of gradients."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

from ringtmp.errors import unknown
from ringtmp.strategies.base import About, OnPaper, Roles, Runs, Settings, Sizes, Strategy, Task, Traffic, described

if TYPE_CHECKING:
    from ringtmp.runtime.mailbox import Endpoint
    from ringtmp.strategies.data_parallel.member import WorkerMember
    from ringtmp.wire.messages import Enlist

ALGORITHMS = ("ring", "tree")


class AllReduceSettings(Settings, frozen=True):
    algorithm: Annotated[str, described(
        "ring | tree", "chunks around a ring, or whole gradients up and down a binomial tree",
        "ring: Baidu, Horovod; tree: FireCaffe")] = "ring"  # fmt: skip

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise unknown("algorithm", self.algorithm, ALGORITHMS)

    @property
    def tree(self) -> bool:
        return self.algorithm == "tree"


class AllReduce(Strategy):
    name = "allreduce"
    about = About(
        "All-reduce: every node has the whole model and ends every step with the same sum of gradients",
        "data", "centralised, replicated in every worker", "synchronous", "gradients",
        "ring or tree of workers", "Patarasuk and Yuan 2009; Iandola et al. 2016",
    )  # fmt: skip
    Settings = AllReduceSettings
    short = "algorithm"
    state_from = "survivors"
    sums_gradients = True
    runs = (
        Runs("FireCaffe", "allreduce:tree"),
        Runs("PyTorch", "allreduce:ring"),
        Runs("Baidu AllReduce", "allreduce:ring"),
        Runs("Horovod", "allreduce:ring"),
        Runs("Caffe2", "allreduce:ring", lacks="halving and doubling"),
        Runs("CNTK, 1-bit SGD", "allreduce:ring:wire=1bit"),
    )

    def worker(self, endpoint: Endpoint, plan: Enlist, settings: AllReduceSettings, roles: Roles) -> WorkerMember:
        from ringtmp.strategies.allreduce.gradients import Gradients
        from ringtmp.strategies.data_parallel.member import WorkerMember
        from ringtmp.strategies.data_parallel.sum_over_workers import RingReduce, TreeReduce

        algorithm = TreeReduce if settings.tree else RingReduce
        return WorkerMember(endpoint, plan, roles, Gradients, algorithm=algorithm, hands_over=True)

    def simulate(self, settings: AllReduceSettings, task: Task) -> OnPaper:
        from ringtmp.strategies.data_parallel.simulate_sum_over_workers import simulate_sums
        from ringtmp.strategies.data_parallel.simulated_workers import Workload

        load = Workload.of(task)
        return OnPaper(simulate_sums(load, task.devices, task.paths, tree=settings.tree), load.memory(task))

    def traffic(self, settings: AllReduceSettings, sizes: Sizes, nodes: int) -> Traffic:
        """A tree's root sends the total to every child."""
        most = math.ceil(math.log2(nodes)) if settings.tree else 2 * (nodes - 1) / nodes
        return Traffic(2 * sizes.parameters * (nodes - 1), sizes.parameters * most)


STRATEGY = AllReduce()
