"""The settings of a parameter server, and what is refused of them before anything starts. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any

from ringtmp.errors import UsageError, unknown
from ringtmp.strategies.base import Settings, described
from ringtmp.wire.formats import wire_format

#: Steps between two exchanges of a worker.
MOST_STEPS_APART = 1000


class PsSettings(Settings, frozen=True):
    servers: Annotated[int | str, described(
        "1..nodes-1 | workers", "dedicated shards, or every node serves 1/n of the keys and works",
        "dedicated: DistBelief, Project Adam, Petuum; workers: BigDL, CaffeOnSpark, TensorFlow, MXNet")] = 1  # fmt: skip
    consistency: Annotated[str, described(
        "bsp | async | ssp:S | value:D | asp:S",
        "who waits: everyone; nobody; any worker more than S steps ahead; any whose update would move a parameter by more "
        "than D from what another is computing with; everyone, but what has changed by less than S of itself is not sent",
        "bsp: Spark MLlib; async: Downpour SGD, MXNet KVStore; ssp: Petuum, SINGA; value: Langer et al. 2020; "
        "asp: Gaia (Hsieh et al. 2017)")] = "bsp"  # fmt: skip
    quorum: Annotated[int | None, described(
        "1..workers", "gradients a step needs; late ones are dropped and counted",
        "backup workers: Chen et al. 2016, TensorFlow", "all workers")] = None  # fmt: skip
    replicas: Annotated[int, described(
        "0 | 1", "1: every shard is also kept by the next server, so that a server may die",
        "Li et al. 2014, Project Adam")] = 0  # fmt: skip
    fetch: Annotated[str, described(
        "all | layerwise", "layerwise: a worker holds the layer it works on and the one ahead")] = "all"  # fmt: skip
    n_push: Annotated[int, described(
        "1..1000", "steps whose gradients a worker adds up before it pushes them; above 1 with async only",
        "Downpour SGD")] = 1  # fmt: skip
    n_fetch: Annotated[int, described(
        "1..1000", "steps a worker makes with its own updates before it fetches parameters; above 1 with async only",
        "Downpour SGD")] = 1  # fmt: skip
    warm_start: Annotated[int, described(
        "0..steps", "the first worker makes so many steps alone before the others begin", "DistBelief")] = 0  # fmt: skip
    enough: Annotated[float, described(
        "above 0, at most 1", "with async, an epoch ends when this part of its samples has been processed; what slower workers "
        "have not begun is given up", "Project Adam: 0.75")] = 1.0  # fmt: skip
    factors: Annotated[bool, described(
        "false | true", "true: of a linear layer workers push activations and errors where that is less than the gradient, and "
        "the server computes it", "Project Adam")] = False  # fmt: skip
    teams: Annotated[int | str | None, described(
        "1..workers, or in stages T/U/…", "teams of workers: each adds up its gradients and pushes and pulls once, through its "
        "first worker. 4/2: the first workers of four teams form two teams again",
        "MXNet-MPI; in stages: MXNet", "every worker by itself")] = None  # fmt: skip
    team_sum: Annotated[str, described(
        "head | all-reduce", "how a team adds up: its first worker, or all of them by all-reduce around a ring",
        "all-reduce: MXNet-MPI")] = "head"  # fmt: skip
    eager: Annotated[bool, described(
        "false | true", "true: with bsp and ssp:S, servers send parameters whenever the slowest worker has come a step "
        "further, unasked", "Petuum")] = False  # fmt: skip

    @property
    def _kind(self) -> str:
        return self.consistency.partition(":")[0]

    @property
    def _number(self) -> float:
        return float(self.consistency.partition(":")[2])

    @property
    def bound(self) -> float:
        """Steps a worker may be ahead of the slowest."""
        if self._kind in ("bsp", "asp") or (self._kind == "value" and not self._number):
            return 0
        return self._number if self._kind == "ssp" else math.inf

    @property
    def change(self) -> float | None:
        """By how much a parameter may change while a worker computes with what it has read; None: by any amount."""
        return self._number if self._kind == "value" and self._number else None

    @property
    def significant(self) -> float:
        """The part of itself by which a parameter must have changed to be sent again; 0: everything is sent."""
        return self._number if self._kind == "asp" else 0.0

    @property
    def gathered(self) -> bool:
        """Gradients of one step are summed up and applied as one update. With a bound of 0, of steps or of change, nobody
        may read between two of them, so nothing is lost by it and the bits are those of bsp; above it every gradient is
        applied as it comes."""
        return self.bound == 0

    @property
    def shared(self) -> bool:
        """Every worker gets every version of a key, and the same of it."""
        return self.deterministic and not self.significant

    @property
    def deterministic(self) -> bool:
        return self.gathered and self.quorum is None

    @property
    def lag(self) -> int:
        """Steps a worker computes with parameters that lack its own newest gradient: the exchange of one step runs
        while the next is computed."""
        return 0 if self.bound == 0 or self.change is not None else 1

    @property
    def on_workers(self) -> bool:
        """Every node serves and works."""
        return self.servers == "workers"

    @property
    def team_counts(self) -> tuple[int, ...]:
        """Teams of workers, then of their heads, and so on; none: every worker is by itself."""
        if self.teams is None:
            return ()
        return tuple(int(each) for each in str(self.teams).split("/"))

    def ring_of(self, team: Sequence[int]) -> tuple[int, ...]:
        """The team, where it sums by all-reduce and is one."""
        return tuple(team) if self.team_sum == "all-reduce" and len(team) > 1 else ()

    def dedicated(self, nodes: int) -> int:
        """Nodes that serve and do not work."""
        return 0 if self.on_workers or nodes == 1 else int(self.servers)

    def __post_init__(self) -> None:
        _check_consistency(self.consistency)
        if self.replicas not in (0, 1):
            raise UsageError(f"replicas={self.replicas} must be 0 or 1")
        if self.fetch not in ("all", "layerwise"):
            raise unknown("fetch", self.fetch, ("all", "layerwise"))
        for name in ("n_push", "n_fetch"):
            every = getattr(self, name)
            if not 1 <= every <= MOST_STEPS_APART:
                raise UsageError(f"{name}={every} must be from 1 to {MOST_STEPS_APART}")
            if every > 1 and self._kind != "async":
                raise UsageError(
                    f"{name}={every} needs consistency=async: with {self.consistency} others wait for every gradient"
                )
        if self.factors and (self.n_push > 1 or self.n_fetch > 1):
            raise UsageError(
                f"factors=true needs n_push=1 and n_fetch=1, not {self.n_push} and {self.n_fetch}: a worker that adds "
                "gradients up or moves its own copy must compute them itself"
            )
        if self.eager and (math.isinf(self.bound) or self.significant or self.fetch != "all"):
            raise UsageError(
                f"eager=true needs consistency=bsp or ssp:S with fetch=all, not {self.consistency} with fetch={self.fetch}: "
                "parameters are sent to everybody when the slowest worker has come a step further"
            )
        if not 0 < self.enough <= 1:
            raise UsageError(f"enough={self.enough:g} must be above 0 and at most 1")
        if self.enough < 1 and self._kind != "async":
            raise UsageError(
                f"enough={self.enough:g} needs consistency=async: with {self.consistency} steps wait for each other"
            )
        self._check_teams()
        if self.warm_start < 0:
            raise UsageError(f"warm_start={self.warm_start} must be 0 or a number of steps")
        if self.quorum is not None and not self.gathered:
            raise UsageError(
                f"quorum={self.quorum} needs consistency=bsp: with {self.consistency} no step waits for the others"
            )
        if self.fetch == "layerwise" and not self.deterministic:
            raise UsageError(
                "fetch=layerwise needs consistency=bsp without a quorum: a layer fetched again must still be the same"
            )

    def _check_teams(self) -> None:
        if self.team_sum not in ("head", "all-reduce"):
            raise unknown("team_sum", self.team_sum, ("head", "all-reduce"))
        if self.teams is None:
            if self.team_sum != "head":
                raise UsageError(f"team_sum={self.team_sum} needs teams=T, the number of teams")
            return
        if not re.fullmatch(r"-?\d+(/\d+)*", str(self.teams)):
            raise UsageError(f"teams={self.teams} must be a number of teams, or one for each stage as in 4/2")
        counts = self.team_counts
        if min(counts) < 1:
            raise UsageError(f"teams={self.teams} must be from 1 to the number of workers")
        if any(later > before for before, later in pairwise(counts)):
            raise UsageError(f"teams={self.teams}: a stage has at most as many teams as the one before it, as in 4/2")
        if self.on_workers:
            raise UsageError("teams need servers that do nothing else: use servers=1 or more, not servers=workers")
        if self._kind in ("value", "asp"):
            raise UsageError(
                f"teams need consistency=bsp, ssp:S or async: {self.consistency} keeps what each worker has read"
            )
        taken = {
            "quorum": self.quorum is not None, "replicas": bool(self.replicas), "fetch": self.fetch != "all",
            "n_push": self.n_push > 1, "n_fetch": self.n_fetch > 1, "factors": self.factors, "eager": self.eager,
            "warm_start": self.warm_start > 0, "enough": self.enough < 1,
        }  # fmt: skip
        if found := [name for name, given in taken.items() if given]:
            raise UsageError(f"teams={self.teams} and {' and '.join(found)} do not go together: leave one of them out")

    def check(self, nodes: int, wire: str) -> None:
        if not (self.on_workers or isinstance(self.servers, int)):
            raise UsageError(f"servers={self.servers} must be a number from 1 to {max(1, nodes - 1)}, or 'workers'")
        if isinstance(self.servers, int) and nodes > 1 and not 1 <= self.servers < nodes:
            raise UsageError(
                f"servers={self.servers} of {nodes} nodes leaves no {'worker' if self.servers > 0 else 'server'}: use "
                f"servers={_up_to(1, nodes - 1)}, servers=workers"
                + (f", or --nodes {self.servers + 1} or more" if self.servers > 0 else "")
            )
        workers = nodes - self.dedicated(nodes)
        if self.quorum is not None and not 1 <= self.quorum <= workers:
            raise self._too_many("quorum", self.quorum, self.quorum, nodes)
        if any(count > workers for count in self.team_counts[:1]):
            raise self._too_many("teams", self.teams, self.team_counts[0], nodes)
        if self.teams is not None and wire_format(wire).carries_error:
            raise UsageError(
                f"in a team sums would be rounded by {wire} twice, and what was lost be made up for once: use --wire float32, "
                "bfloat16 or float16"
            )
        if self.replicas and (nodes if self.on_workers else int(self.servers)) < 2:
            raise UsageError(
                "replicas=1 needs a second server to hold them: use servers=workers, or "
                + (f"servers={_up_to(2, nodes - 1)}" if nodes > 2 else "servers=2 with --nodes 3 or more")
            )
        if self.significant and not wire_format(wire).exact:
            raise UsageError(
                f"consistency={self.consistency} sends parameters as they are, or not at all: use --wire float32, not {wire}"
            )
        if self.factors and wire_format(wire).carries_error:
            raise UsageError(
                f"factors=true sends activations and errors, for whose rounding by {wire} nothing makes up: use --wire "
                "float32, bfloat16 or float16"
            )
        if self.n_fetch > 1 and wire_format(wire).carries_error:
            raise UsageError(
                f"n_fetch={self.n_fetch} lets a worker move its own copy, to which no {wire} change could be added: "
                "use --wire float32 or bfloat16"
            )
        if self.fetch == "layerwise" and wire_format(wire).carries_error:
            raise UsageError(
                f"fetch=layerwise keeps no weights an {wire} change could be added to: use --wire bfloat16"
            )

    def _too_many(self, name: str, value: object, wanted: int, nodes: int) -> UsageError:
        """Of what every worker can have one of."""
        servers = self.dedicated(nodes)
        more = f": use --nodes {wanted + servers} or more" if wanted > 0 else ""
        return UsageError(f"{name}={value} must be from 1 to {nodes - servers}, the number of workers{more}")


def fitted(given: Mapping[str, Any], nodes: int) -> dict[str, Any]:
    """The settings of a parameter server for the nodes that are left, which may be fewer than they were given for."""
    settings = PsSettings(**given)
    together = settings.on_workers or nodes == 1
    servers = nodes if together else min(int(settings.servers), nodes - 1)
    workers = nodes if together else nodes - servers
    fit = dict(given)
    if not settings.on_workers:
        fit["servers"] = servers
    if settings.replicas and servers < 2:
        fit["replicas"] = 0
    if settings.teams is not None:
        counts = [min(count, workers) for count in settings.team_counts]
        fit["teams"] = counts[0] if len(counts) == 1 else "/".join(map(str, counts))
    if settings.quorum is not None:
        fit["quorum"] = min(settings.quorum, workers)
    return fit


def _up_to(least: int, most: int) -> str:
    return f"{least} to {most}" if most > least else str(least)


#: Kinds of consistency, and what their number is; None: they have none.
BOUNDS = {
    "bsp": None,
    "async": None,
    "ssp": "the bound of ssp must be a whole number of at least 0, or inf, as in ps:ssp:3",
    "value": "the bound of value must be a number of at least 0, as in ps:value:0.01",
    "asp": "the threshold of asp must be a number of at least 0 and below 1, as in ps:asp:0.01",
}


def _check_consistency(text: str) -> None:
    kind, colon, number = text.partition(":")
    if kind not in BOUNDS:
        raise unknown("consistency", text, ("bsp", "async", "ssp:S", "value:D", "asp:S"))
    rule = BOUNDS[kind]
    if rule is None:
        if colon:
            raise UsageError(f"consistency={text}: {kind} has no bound; write consistency={kind}, or ssp:S")
        return
    if kind == "ssp":
        good = number == "inf" or number.isdigit()
    else:
        good = bool(re.fullmatch(r"\d+(\.\d*)?([eE][-+]?\d+)?|\.\d+", number)) and float(number) < (
            1 if kind == "asp" else math.inf
        )
    if not good:
        raise UsageError(f"consistency={text}: {rule}")
