"""The parameter server: servers hold the parameters as keys, workers push gradients and pull parameters."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from ringtmp.errors import UsageError
from ringtmp.strategies.base import About, OnPaper, Plan, PlanRequest, Roles, Runs, Sizes, Strategy, Task, Traffic
from ringtmp.strategies.ps.settings import BOUNDS, PsSettings, fitted

if TYPE_CHECKING:
    from ringtmp.config import RunConfig
    from ringtmp.runtime.mailbox import Endpoint
    from ringtmp.strategies.data_parallel.member import ParallelMember
    from ringtmp.wire.messages import Enlist

#: Steps of work a worker may have before it where nobody waits for the others.
AHEAD_ASYNC = 16
#: With which it takes part in a choice.
CHOICES = tuple(
    {"consistency": consistency, "servers": servers}
    for consistency in ("bsp", "ssp:3", "async")
    for servers in ("workers", 1)
)


class ParameterServer(Strategy):
    name = "ps"
    about = About(
        "Parameter server: servers hold the parameters as keys, workers push gradients and pull parameters",
        "data", "centralised", "synchronous, asynchronous or bounded", "gradients up, parameters down",
        "k servers : n workers", "Smola and Narayanamurthy 2010; Ho et al. 2013; Li et al. 2014",
    )  # fmt: skip
    Settings = PsSettings
    short = "consistency"
    tree_name = "ps:bsp"
    sums_gradients = True
    runs = (
        Runs("BigDL", "ps:bsp:servers=workers"),
        Runs("CaffeOnSpark", "ps:bsp:servers=workers"),
        Runs(
            "DistBelief",
            "ps:async:servers=2:n_push=2:n_fetch=2:warm_start=20 --optimizer adagrad",
            lacks="a model cut over several nodes within a worker",
        ),
        Runs("MXNet", "ps:async:servers=workers", lacks="servers in several stages"),
        Runs("Parameter Server", "ps:ssp:3:servers=2:replicas=1", lacks="groups of workers behind one that pushes"),
        Runs("Petuum", "ps:ssp:3:servers=2", lacks="parameters sent before they are asked for"),
        Runs(
            "Project Adam", "ps:async:servers=2:replicas=1", lacks="gradients of linear layers computed in the server"
        ),
        Runs("TensorFlow", "ps:bsp:quorum=2", lacks="placement of single operators"),
        Runs("DIANNE", "ps:async:servers=2:n_push=2:n_fetch=2"),
        Runs("DMTK (Multiverso)", "ps:async:servers=2"),
    )

    def sums_by_tree(self, settings: PsSettings) -> bool:
        plain = settings.n_push == settings.n_fetch == 1 and not settings.warm_start
        return plain and settings.deterministic and not settings.significant

    def parse_short(self, text: str) -> dict[str, Any]:
        """`ssp:3`, and behind it the servers: `ssp:3:2`, `bsp:workers`."""
        kind, *rest = text.split(":")
        found: dict[str, Any] = {}
        if BOUNDS.get(kind) and rest and rest[0] != "workers":
            kind = f"{kind}:{rest.pop(0)}"
        if rest:
            word = rest.pop(0)
            if word != "workers" and not (word.isdigit() and int(word)):
                raise UsageError(f"{self.name}:{text}: {word!r} is neither a number of servers nor 'workers'")
            found["servers"] = word if word == "workers" else int(word)
        if rest:
            raise UsageError(f"{self.name}:{text}: unexpected {rest[0]!r} at the end")
        return {self.short: kind, **found}

    def roles(self, settings: PsSettings, nodes: int) -> Roles:
        everyone = tuple(range(nodes))
        servers = settings.dedicated(nodes)
        return Roles(everyone[:servers], everyone[servers:]) if servers else Roles(everyone, everyone)

    def exactness(self, settings: PsSettings) -> str:
        return "replay" if settings.deterministic else "steps"

    def delayed(self, settings: PsSettings) -> bool:
        return not settings.gathered

    def ways(self, config: RunConfig) -> Sequence[RunConfig]:
        from ringtmp.config import replaced

        return [replaced(config, {"strategy_settings": each}) for each in CHOICES]

    def plan(self, request: PlanRequest) -> Plan:
        from ringtmp.model.recompute import refuse_unrepeatable
        from ringtmp.strategies.data_parallel.plan import Pace, plan

        given, nodes = request.config.ring.strategy_settings, request.config.ring.nodes
        fit = fitted(given, nodes)
        settings = self.read(fit)
        if settings.fetch == "layerwise":
            refuse_unrepeatable(request.layers)
        warnings = (
            ("with one server left there are no replicas",) if given.get("replicas") and not settings.replicas else ()
        )
        ahead = 1 if settings.gathered else int(min(settings.bound + 1, AHEAD_ASYNC))
        pace = Pace(
            ahead, not settings.gathered, settings.quorum, bool(settings.replicas), warm_start=settings.warm_start
        )
        return plan(request, self, fit, pace, warnings=warnings)

    def worker(self, endpoint: Endpoint, plan: Enlist, settings: PsSettings, roles: Roles) -> ParallelMember:
        from ringtmp.strategies.ps.member import PsMember

        return PsMember(endpoint, plan, settings, roles)

    def can_lose(self, settings: PsSettings, roles: Roles, node: int, bare: Collection[int], nodes: int) -> bool:
        """A worker that is not the last; a server with a replica."""
        served = node not in roles.servers or (settings.replicas and node not in bare)
        return bool(served) and roles.workers != (node,)

    def simulate(self, settings: PsSettings, task: Task) -> OnPaper:
        from ringtmp.strategies.data_parallel.simulated_workers import Workload
        from ringtmp.strategies.ps.simulate import Mode, ServerOptions, simulate_ps

        servers = settings.dedicated(len(task.devices))
        mode: Mode = "bsp" if settings.gathered else "async" if math.isinf(settings.bound) else "ssp"
        chosen = ServerOptions(servers, mode, 0 if mode == "async" else int(settings.bound))
        load = Workload.of(task)
        return OnPaper(simulate_ps(load, task.devices, chosen, task.paths), load.memory(task, servers))

    def traffic(self, settings: PsSettings, sizes: Sizes, nodes: int) -> Traffic:
        """Every worker pushes and pulls the model once a step, or once in n_push and n_fetch steps, but for what it serves
        itself; `layerwise` pulls it twice; a replica gets every update. Under `asp` it is the most there may be: what is
        withheld depends on the data."""
        servers = settings.dedicated(nodes)
        workers = nodes - servers
        away = (workers if servers else workers - 1) * sizes.parameters  # one way
        updates = (1 if settings.gathered else workers / settings.n_push) * sizes.parameters * settings.replicas
        up, down = away / settings.n_push, away / settings.n_fetch * (2 if settings.fetch == "layerwise" else 1)
        each = (down + updates) / (servers or nodes)
        return Traffic(up + down + updates, max(each, up / workers) if servers else each + up / nodes)


STRATEGY = ParameterServer()
