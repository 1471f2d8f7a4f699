"""The parameter server: servers hold the parameters as keys, workers push gradients and pull parameters."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from ringtmp.errors import UsageError
from ringtmp.plan import exchange_bounds
from ringtmp.plan.exchange_bounds import Exchange
from ringtmp.strategies.base import About, OnPaper, Plan, PlanRequest, Roles, Runs, Sizes, Strategy, Task, Traffic
from ringtmp.strategies.ps.settings import BOUNDS, PsSettings, fitted
from ringtmp.strategies.ps.teams import Teams

if TYPE_CHECKING:
    from ringtmp.config import RunConfig
    from ringtmp.plan.devices import LayerCost
    from ringtmp.runtime.mailbox import Endpoint
    from ringtmp.strategies.data_parallel.member import ParallelMember
    from ringtmp.wire.messages import Enlist

#: Steps of work a worker may have before it where nobody waits for the others.
AHEAD_ASYNC = 16
#: Models that the head of a team keeps for those who ask late (proxy.py), and the sum.
HELD_BY_HEADS = 4
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
        Runs("MXNet", "ps:async:servers=workers"),
        Runs("MXNet", "ps:async:teams=4/2"),
        Runs("Parameter Server", "ps:ssp:3:servers=2:replicas=1"),
        Runs("Petuum", "ps:ssp:3:servers=2:eager=true"),
        Runs(
            "Project Adam",
            "ps:async:servers=2:replicas=1:factors=true:enough=0.75",
        ),
        Runs("TensorFlow", "ps:bsp:quorum=2", lacks="placement of single operators"),
        Runs("DIANNE", "ps:async:servers=2:n_push=2:n_fetch=2"),
        Runs("DMTK (Multiverso)", "ps:async:servers=2"),
        Runs("MXNet-MPI", "ps:async:teams=2:team_sum=all-reduce"),
    )

    def sums_by_tree(self, settings: PsSettings) -> bool:
        plain = settings.n_push == settings.n_fetch == 1 and not settings.warm_start
        return (
            plain
            and settings.teams is None
            and not settings.factors
            and settings.deterministic
            and not settings.significant
        )

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
        return not settings.gathered or settings.significant > 0

    def ways(self, config: RunConfig) -> Sequence[RunConfig]:
        from ringtmp.config import replaced

        return [replaced(config, {"strategy_settings": each}) for each in CHOICES]

    def plan(self, request: PlanRequest) -> Plan:
        from ringtmp.model.recompute import refuse_unrepeatable
        from ringtmp.strategies.data_parallel.linear_gradients import linear_of
        from ringtmp.strategies.data_parallel.plan import Pace, plan

        given, nodes = request.config.ring.strategy_settings, request.config.ring.nodes
        fit = fitted(given, nodes)
        settings = self.read(fit)
        if settings.fetch == "layerwise":
            refuse_unrepeatable(request.layers)
        warnings = (
            ("with one server left there are no replicas",) if given.get("replicas") and not settings.replicas else ()
        )
        clip = request.config.training.clip_norm is not None and not settings.gathered
        if settings.factors and clip:
            raise UsageError(
                f"--clip-norm with consistency={settings.consistency} clips each worker's own gradient, and with factors=true "
                "workers compute none: use consistency=bsp, or leave one of them out"
            )
        linear = tuple(map(linear_of, request.layers)) if settings.factors else ()
        ways = _ways(request, linear, nodes - settings.dedicated(nodes)) if settings.factors else {}
        ahead = 1 if settings.gathered else int(min(settings.bound + 1, AHEAD_ASYNC))
        pace = Pace(
            ahead,
            not settings.gathered,
            settings.quorum,
            bool(settings.replicas),
            warm_start=settings.warm_start,
            enough=settings.enough,
        )
        return plan(
            request, self, fit, pace, warnings=warnings, linear=linear, facts={"layer_ways": ways} if ways else {}
        )

    def worker(self, endpoint: Endpoint, plan: Enlist, settings: PsSettings, roles: Roles) -> ParallelMember:
        from ringtmp.strategies.ps.member import PsMember

        return PsMember(endpoint, plan, settings, roles)

    def can_lose(self, settings: PsSettings, roles: Roles, node: int, bare: Collection[int], nodes: int) -> bool:
        """A worker that is not the last, nor a head, nor in a team that sums by all-reduce; a server with a replica."""
        served = node not in roles.servers or (settings.replicas and node not in bare)
        teams = self._teams(settings, nodes)
        needed = settings.teams is not None and (
            node in teams.top or node in teams.heads or settings.ring_of(teams.team(node))
        )
        return bool(served) and roles.workers != (node,) and not needed

    def _teams(self, settings: PsSettings, nodes: int) -> Teams:
        return Teams.of(self.roles(settings, nodes).workers, settings.team_counts)

    def simulate(self, settings: PsSettings, task: Task) -> OnPaper:
        from ringtmp.strategies.data_parallel.simulated_workers import Workload
        from ringtmp.strategies.ps.simulate import Mode, ServerOptions, simulate_ps

        servers = settings.dedicated(len(task.devices))
        mode: Mode = "bsp" if settings.gathered else "async" if math.isinf(settings.bound) else "ssp"
        load = Workload.of(task)
        rows = load.batch_size / (len(task.devices) - servers)
        pushed = [_pushed_bytes(layer, rows if settings.factors else 0) for layer in task.layers]
        part = sum(pushed) / max(1, sum(layer.gradient_bytes for layer in task.layers))
        slack = 0 if mode == "async" else int(settings.bound)
        teams = self._teams(settings, len(task.devices))
        chosen = ServerOptions(servers, mode, slack, pushed=part, teams=teams, rings=settings.team_sum == "all-reduce")
        memory = tuple(
            each.with_more(HELD_BY_HEADS * (node in teams.heads), False)
            for node, each in enumerate(load.memory(task, servers))
        )
        return OnPaper(simulate_ps(load, task.devices, chosen, task.paths), memory)

    def traffic(self, settings: PsSettings, sizes: Sizes, nodes: int) -> Traffic:
        """Every worker pushes and pulls the model once a step, or once in n_push and n_fetch steps, but for what it serves
        itself; `layerwise` pulls it twice; a replica gets every update. Under `asp` it is the most there may be: what is
        withheld depends on the data."""
        servers = settings.dedicated(nodes)
        workers = nodes - servers
        away = (workers if servers else workers - 1) * sizes.parameters  # one way
        pushed = self._pushed(settings, sizes, servers or nodes, workers) * away
        updates = (1 if settings.gathered else workers / settings.n_push) * sizes.parameters * settings.replicas
        if settings.teams is not None:
            return self._of_teams(settings, sizes, nodes)
        up, down = pushed / settings.n_push, away / settings.n_fetch * (2 if settings.fetch == "layerwise" else 1)
        each = (down + updates) / (servers or nodes)
        busiest = max(each, up / workers) if servers else each + up / nodes
        return Traffic(up + down + updates, busiest, self._exchange(settings, nodes))

    def _of_teams(self, settings: PsSettings, sizes: Sizes, nodes: int) -> Traffic:
        """As much in all as without, but every worker talks to whoever is above and below it alone. All-reduce takes more:
        in a ring of m each worker sends 2 (m - 1) / m models, and only the head pushes."""
        teams = self._teams(settings, nodes)
        models = []
        for worker in teams.workers:
            m = len(settings.ring_of(teams.team(worker)))
            up = 2 * (m - 1) / m + (teams.team(worker)[0] == worker) if m else 1
            models.append(up + len(teams.below(worker)))
        each = len(teams.top) / settings.dedicated(nodes)
        return Traffic((sum(models) + len(teams.top)) * sizes.parameters, max(each, *models) * sizes.parameters)

    def _exchange(self, settings: PsSettings, nodes: int) -> Exchange | None:
        """With a bound below which nothing is sent, and where factors are smaller, less than a model travels."""
        if settings.significant or settings.factors or settings.quorum is not None:
            return None
        servers = settings.dedicated(nodes)
        if not servers:
            return exchange_bounds.on_all_workers(nodes)
        kind = exchange_bounds.synchronous if settings.gathered else exchange_bounds.asynchronous
        return kind(nodes - servers, servers).apart(min(settings.n_push, settings.n_fetch))

    def _pushed(self, settings: PsSettings, sizes: Sizes, servers: int, workers: int) -> float:
        """Of the model: with factors, what a worker pushes where its rows take less than the gradient."""
        if not (settings.factors and sizes.linear):
            return 1.0
        from ringtmp.strategies.data_parallel import parameter_keys
        from ringtmp.strategies.data_parallel.linear_gradients import Linear

        rest = int(sizes.parameters) - sum(size for size, _, _ in sizes.linear)
        total = 0.0
        for key in parameter_keys.cut([*(size for size, _, _ in sizes.linear), rest], servers):
            least = float(key.size)
            if key.layer < len(sizes.linear):
                size, inputs, outputs = sizes.linear[key.layer]
                bias = outputs * inputs + -outputs * inputs % parameter_keys.GRAIN
                linear = Linear(outputs, inputs, 0, bias if size > bias else -1)
                low, high = linear.columns(key.start, key.stop)
                least = min(least, sizes.samples / workers * (inputs + high - low))
            total += least
        return total / sizes.parameters


def _pushed_bytes(layer: LayerCost, rows: float) -> float:
    """What a worker with so many samples pushes of a layer, as if it were one key; no rows: the gradient."""
    factors = 4 * rows * layer.factor_values
    return min(factors, layer.gradient_bytes) if factors else layer.gradient_bytes


def _ways(request: PlanRequest, linear: Sequence[tuple[int, ...]], workers: int) -> dict[str, str]:
    """By layer with parameters: how its gradient travels from a worker with an equal share of a whole batch."""
    found: dict[str, str] = {}
    for layer, cost, known in zip(request.layers, request.index.costs, linear, strict=True):
        if not any(each.trainable for each in layer.tensors):
            continue
        fewer = _pushed_bytes(cost, request.batch_size / workers) < cost.gradient_bytes
        plain = "as factors, to the server" if fewer else "as a gradient, which is less"
        found[layer.name] = plain if known else "as a gradient, no plain linear layer"
    return found


STRATEGY = ParameterServer()
