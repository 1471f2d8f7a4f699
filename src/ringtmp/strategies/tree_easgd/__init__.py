"""Tree EASGD: workers form a tree, and neighbours in it pull each other's models together; nobody ever waits.

S. Zhang, Distributed Stochastic Optimization for Deep Learning, thesis, NYU 2016 (EASGD Tree), in the form of the survey of
Langer et al. 2020, in which every node of the tree works. The role is in elastic_tree.py.
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
from ringtmp.strategies.data_parallel.checked_settings import refuse_outside, refuse_rounding, refuse_too_short

if TYPE_CHECKING:
    from ringtmp.runtime.mailbox import Endpoint
    from ringtmp.strategies.data_parallel.peers import PeerMember
    from ringtmp.wire.messages import Enlist


class TreeEasgdSettings(Settings, frozen=True):
    tau_up: Annotated[int, described("1 or more", "steps after which a worker sends its model to the one above")] = 4
    tau_down: Annotated[int, described("1 or more", "steps after which a worker sends its model to all below it")] = 4
    alpha: Annotated[float, described(
        "0 to 0.5", "how far a worker moves towards a model it gets", "Zhang 2016: 0.9 / (1 + children)")] = 0.3  # fmt: skip
    tree: Annotated[str, described(
        "binary | edges such as 0-1+0-2+1-3", "who is above whom; node 0 is the root")] = "binary"  # fmt: skip

    def __post_init__(self) -> None:
        refuse_too_short("tau_up", self.tau_up)
        refuse_too_short("tau_down", self.tau_down)
        refuse_outside("alpha", self.alpha, 0.0, 0.5)

    def parents(self, nodes: int) -> dict[int, int]:
        """Refuses what is not a tree of so many nodes."""
        if self.tree == "binary":
            return worker_topologies.binary_tree(nodes)
        return worker_topologies.parents_in_tree("tree", self.tree, nodes)

    def check(self, nodes: int, wire: str) -> None:
        refuse_rounding("tree-easgd", wire)
        self.parents(nodes)


class TreeEasgd(Strategy):
    name = "tree-easgd"
    about = About(
        "Tree EASGD: workers form a tree, and neighbours in it pull each other's models together",
        "data", "decentralised, one replica each", "asynchronous, bounded by tau up and down", "parameters", "tree of workers",
        "Zhang 2016; Langer et al. 2020",
    )  # fmt: skip
    runs = (Runs("TreeEASGD", "tree-easgd"),)
    Settings = TreeEasgdSettings
    short = "tau_up"

    def parse_short(self, text: str) -> dict[str, Any]:
        """`4`: both ways; `8:4`: up, then down."""
        words = text.split(":")
        if len(words) > 2 or not all(word.isdigit() for word in words):
            raise UsageError(
                f"{self.name}:{text}: write {self.name}:4, or {self.name}:8:4 for every 8 steps up and 4 down"
            )
        return {"tau_up": int(words[0]), "tau_down": int(words[-1])}

    def exactness(self, settings: TreeEasgdSettings) -> str:
        return "steps"

    def delayed(self, settings: TreeEasgdSettings) -> bool:
        return True

    def plan(self, request: PlanRequest) -> Plan:
        from ringtmp.strategies.data_parallel.plan import ON_THEIR_OWN, plan

        given, warnings = dict(request.config.ring.strategy_settings), tuple[str, ...]()
        try:
            self.read(given).parents(request.config.ring.nodes)
        except UsageError as misfit:  # checked before the start: fewer or more are there than it was written for
            given, warnings = {**given, "tree": "binary"}, (f"{misfit}; the nodes that are there form a binary tree",)
        return plan(request, self, given, ON_THEIR_OWN, warnings=warnings)

    def worker(self, endpoint: Endpoint, plan: Enlist, settings: TreeEasgdSettings, roles: Roles) -> PeerMember:
        from ringtmp.strategies.data_parallel.peers import PeerMember
        from ringtmp.strategies.tree_easgd.elastic_tree import elastic_tree

        return PeerMember(endpoint, plan, roles, elastic_tree(endpoint.node, settings, settings.parents(plan.nodes)))

    def can_lose(self, settings: Any, roles: Roles, node: int, bare: Collection[int], nodes: int) -> bool:
        return len(roles.workers) > 1

    def simulate(self, settings: TreeEasgdSettings, task: Task) -> OnPaper:
        from ringtmp.strategies.data_parallel.simulate_peers import simulate_peers
        from ringtmp.strategies.data_parallel.simulated_workers import Workload

        load, every = Workload.of(task), max(settings.tau_up, settings.tau_down)
        sends: list[tuple[int, int]] = []
        for child, parent in settings.parents(len(task.devices)).items():
            sends += [(child, parent)] * (every // settings.tau_up) + [(parent, child)] * (every // settings.tau_down)
        step = simulate_peers(load, task.devices, task.paths, sends, every=every, waits=False)
        return OnPaper(step, load.memory(task, vectors=1))

    def traffic(self, settings: TreeEasgdSettings, sizes: Sizes, nodes: int) -> Traffic:
        """Every edge carries a model up every tau_up steps, and one down every tau_down."""
        parents = list(settings.parents(nodes).values())
        sent = [(node > 0) / settings.tau_up + parents.count(node) / settings.tau_down for node in range(nodes)]
        exchange = exchange_bounds.to_neighbours(max(sent)) if nodes > 1 else None
        return Traffic(sizes.parameters * sum(sent), sizes.parameters * max(sent), exchange)


STRATEGY = TreeEasgd()
