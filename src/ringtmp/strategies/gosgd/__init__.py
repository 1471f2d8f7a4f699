"""GoSGD: after a step a worker may send its model to another one, chosen by chance; nobody ever waits.

M. Blot, D. Picard, M. Cord, N. Thome, Gossip Training for Deep Learning, 2016. The role is in gossip.py.
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
from ringtmp.strategies.data_parallel.checked_settings import refuse_outside, refuse_rounding

if TYPE_CHECKING:
    from ringtmp.runtime.mailbox import Endpoint
    from ringtmp.strategies.data_parallel.peers import PeerMember
    from ringtmp.wire.messages import Enlist


class GosgdSettings(Settings, frozen=True):
    p: Annotated[float, described(
        "0 to 1", "how likely a worker sends its model to another after a step",
        "Blot et al. 2016: 0.01 to 1")] = 0.25  # fmt: skip

    def __post_init__(self) -> None:
        refuse_outside("p", self.p, 0.0, 1.0)

    def check(self, nodes: int, wire: str) -> None:
        refuse_rounding("gosgd", wire)


class Gosgd(Strategy):
    name = "gosgd"
    about = About(
        "GoSGD: after a step a worker may send its model to another one, chosen by chance",
        "data", "decentralised, one replica each", "asynchronous", "parameters, with a weight", "peers, by chance",
        "Blot et al. 2016",
    )  # fmt: skip
    runs = (Runs("GoSGD", "gosgd:0.25"),)
    Settings = GosgdSettings
    short = "p"

    def parse_short(self, text: str) -> dict[str, Any]:
        try:
            return {self.short: float(text)}
        except ValueError:
            raise UsageError(
                f"{self.name}:{text}: write {self.name}:0.25 for a model sent after every fourth step"
            ) from None

    def exactness(self, settings: GosgdSettings) -> str:
        return "steps"

    def delayed(self, settings: GosgdSettings) -> bool:
        return True

    def plan(self, request: PlanRequest) -> Plan:
        from ringtmp.strategies.data_parallel.plan import ON_THEIR_OWN, plan

        return plan(request, self, pace=ON_THEIR_OWN)

    def worker(self, endpoint: Endpoint, plan: Enlist, settings: GosgdSettings, roles: Roles) -> PeerMember:
        from ringtmp.strategies.data_parallel.peers import PeerMember
        from ringtmp.strategies.gosgd.gossip import gossip

        return PeerMember(endpoint, plan, roles, gossip(endpoint.node, roles.workers, settings.p))

    def can_lose(self, settings: GosgdSettings, roles: Roles, node: int, bare: Collection[int], nodes: int) -> bool:
        return len(roles.workers) > 1

    def simulate(self, settings: GosgdSettings, task: Task) -> OnPaper:
        from ringtmp.strategies.data_parallel.simulate_peers import simulate_peers
        from ringtmp.strategies.data_parallel.simulated_workers import Workload

        load, count = Workload.of(task), len(task.devices)
        sends = [(node, (node + 1) % count) for node in range(count) if count > 1 and settings.p]
        every = max(1, round(1 / settings.p)) if settings.p else 1
        step = simulate_peers(load, task.devices, task.paths, sends, every=every, waits=False)
        return OnPaper(step, load.memory(task, vectors=1))

    def traffic(self, settings: GosgdSettings, sizes: Sizes, nodes: int) -> Traffic:
        """On average."""
        each = settings.p * sizes.parameters if nodes > 1 else 0.0
        return Traffic(each * nodes, each, exchange_bounds.one_of_all(settings.p) if nodes > 1 else None)


STRATEGY = Gosgd()
