"""D-PSGD: every worker mixes its model with those of its neighbours in every step, and nobody has them all.

X. Lian et al., Can Decentralized Algorithms Outperform Centralized Algorithms? A Case Study for Decentralized Parallel
Stochastic Gradient Descent, NIPS 2017. The role is in neighbours.py.
"""

from __future__ import annotations

from collections.abc import Collection
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
from ringtmp.strategies.data_parallel import worker_topologies
from ringtmp.strategies.data_parallel.checked_settings import refuse_rounding

if TYPE_CHECKING:
    from ringtmp.runtime.mailbox import Endpoint
    from ringtmp.strategies.data_parallel.peers import PeerMember
    from ringtmp.wire.messages import Enlist

NAMED = {"ring": worker_topologies.ring, "complete": worker_topologies.complete}


class DpsgdSettings(Settings, frozen=True):
    graph: Annotated[str, described(
        "ring | complete | edges such as 0-1+1-2+2-0", "who is whose neighbour",
        "ring: Lian et al. 2017")] = "ring"  # fmt: skip
    matrix: Annotated[str, described(
        "rows such as 0.5_0.5/0.5_0.5", "the mixing weights W, symmetric and doubly stochastic; replaces the graph",
        "Lian et al. 2017: 1/3 for a neighbour on a ring", "Metropolis weights of the graph")] = ""  # fmt: skip

    def __post_init__(self) -> None:
        if self.matrix and self.graph != "ring":
            raise UsageError(
                f"graph={self.graph} and a matrix contradict each other: the matrix says who is a neighbour"
            )

    def mixing(self, nodes: int) -> worker_topologies.Matrix:
        """W; refuses what does not fit so many nodes."""
        if self.matrix:
            found = worker_topologies.read_matrix(self.matrix, nodes)
            worker_topologies.refuse_divided("matrix", self.matrix, worker_topologies.graph_of(found))
            return found
        if self.graph in NAMED:
            return worker_topologies.metropolis(NAMED[self.graph](nodes))
        if "-" not in self.graph:
            raise UsageError(
                f"graph={self.graph}: choose {' or '.join(NAMED)}, or write edges as 0-1+1-2, with nodes from 0 to {nodes - 1}"
            )
        graph = worker_topologies.of_edges("graph", self.graph, nodes)
        worker_topologies.refuse_divided("graph", self.graph, graph)
        return worker_topologies.metropolis(graph)

    def check(self, nodes: int, wire: str) -> None:
        refuse_rounding("dpsgd", wire)
        self.mixing(nodes)


class Dpsgd(Strategy):
    name = "dpsgd"
    about = About(
        "D-PSGD: every worker mixes its model with those of its neighbours in every step",
        "data", "decentralised, one replica each", "synchronous between neighbours", "parameters",
        "closed ring, or a graph of one's own", "Lian et al. 2017",
    )  # fmt: skip
    runs = (Runs("D-PSGD", "dpsgd:ring"),)
    Settings = DpsgdSettings
    short = "graph"

    def delayed(self, settings: DpsgdSettings) -> bool:
        return True

    def plan(self, request: PlanRequest) -> Plan:
        from ringtmp.strategies.data_parallel.plan import Pace, plan

        given, warnings = request.config.ring.strategy_settings, tuple[str, ...]()
        try:
            self.read(given).mixing(request.config.ring.nodes)
        except UsageError as misfit:  # checked before the start: fewer or more are there than it was written for
            given, warnings = {}, (f"{misfit}; the {request.config.ring.nodes} nodes that are there form a ring",)
        return plan(request, self, given, Pace(alike=False), warnings=warnings)

    def worker(self, endpoint: Endpoint, plan: Enlist, settings: DpsgdSettings, roles: Roles) -> PeerMember:
        from ringtmp.strategies.data_parallel.peers import PeerMember
        from ringtmp.strategies.dpsgd.neighbours import neighbours

        return PeerMember(endpoint, plan, roles, neighbours(endpoint.node, settings.mixing(plan.nodes)[endpoint.node]))

    def can_lose(self, settings: Any, roles: Roles, node: int, bare: Collection[int], nodes: int) -> bool:
        """As long as those who are left still reach each other."""
        lost = [each for each in range(nodes) if each == node or each not in roles.workers]
        return worker_topologies.connected(worker_topologies.graph_of(settings.mixing(nodes)), lost)

    def simulate(self, settings: DpsgdSettings, task: Task) -> OnPaper:
        from ringtmp.strategies.data_parallel.simulate_peers import simulate_peers
        from ringtmp.strategies.data_parallel.simulated_workers import Workload

        load, graph = Workload.of(task), worker_topologies.graph_of(settings.mixing(len(task.devices)))
        sends = [(source, target) for source, others in graph.items() for target in sorted(others)]
        step = simulate_peers(load, task.devices, task.paths, sends)
        return OnPaper(step, load.memory(task, vectors=2 * max(len(each) for each in graph.values())))

    def traffic(self, settings: DpsgdSettings, sizes: Sizes, nodes: int) -> Traffic:
        """A model to every neighbour in every step."""
        degrees = [len(each) for each in worker_topologies.graph_of(settings.mixing(nodes)).values()]
        most = max(degrees)
        return Traffic(sizes.parameters * sum(degrees), sizes.parameters * most, exchange_bounds.to_neighbours(most))


STRATEGY = Dpsgd()
