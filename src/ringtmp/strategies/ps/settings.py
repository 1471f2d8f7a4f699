"""The settings of a parameter server, and what is refused of them before anything starts. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

from ringtmp.errors import UsageError, unknown
from ringtmp.strategies.base import Settings, described
from ringtmp.wire.formats import wire_format


class PsSettings(Settings, frozen=True):
    servers: Annotated[int | str, described(
        "1..nodes-1 | workers", "dedicated shards, or every node serves 1/n of the keys and works",
        "dedicated: DistBelief, Project Adam, Petuum; workers: BigDL, CaffeOnSpark, TensorFlow, MXNet")] = 1  # fmt: skip
    consistency: Annotated[str, described(
        "bsp | async | ssp:S", "who waits: everyone, nobody, or any worker more than S steps ahead",
        "bsp: Spark MLlib; async: Downpour SGD, MXNet KVStore; ssp: Petuum, SINGA")] = "bsp"  # fmt: skip
    quorum: Annotated[int | None, described(
        "1..workers", "gradients a step needs; late ones are dropped and counted",
        "backup workers: Chen et al. 2016, TensorFlow", "all workers")] = None  # fmt: skip
    replicas: Annotated[int, described(
        "0 | 1", "1: every shard is also kept by the next server, so that a server may die",
        "Li et al. 2014, Project Adam")] = 0  # fmt: skip
    fetch: Annotated[str, described(
        "all | layerwise", "layerwise: a worker holds the layer it works on and the one ahead")] = "all"  # fmt: skip

    @property
    def bound(self) -> float:
        """Steps a worker may be ahead of the slowest."""
        if self.consistency == "bsp":
            return 0
        return math.inf if self.consistency == "async" else float(self.consistency.removeprefix("ssp:"))

    @property
    def gathered(self) -> bool:
        """Gradients of one step are summed up and applied as one update. With a bound of 0 nobody may read between two
        of them, so nothing is lost by it and the bits are those of bsp; above it every gradient is applied as it comes."""
        return self.bound == 0

    @property
    def deterministic(self) -> bool:
        return self.gathered and self.quorum is None

    @property
    def lag(self) -> int:
        """Steps a worker computes with parameters that lack its own newest gradient: the exchange of one step runs
        while the next is computed."""
        return 0 if self.bound == 0 else 1

    @property
    def on_workers(self) -> bool:
        """Every node serves and works."""
        return self.servers == "workers"

    def dedicated(self, nodes: int) -> int:
        """Nodes that serve and do not work."""
        return 0 if self.on_workers or nodes == 1 else int(self.servers)

    def __post_init__(self) -> None:
        _check_consistency(self.consistency)
        if self.replicas not in (0, 1):
            raise UsageError(f"replicas={self.replicas} must be 0 or 1")
        if self.fetch not in ("all", "layerwise"):
            raise unknown("fetch", self.fetch, ("all", "layerwise"))
        if self.quorum is not None and not self.gathered:
            raise UsageError(
                f"quorum={self.quorum} needs consistency=bsp: with {self.consistency} no step waits for the others"
            )
        if self.fetch == "layerwise" and not self.deterministic:
            raise UsageError(
                "fetch=layerwise needs consistency=bsp without a quorum: a layer fetched again must still be the same"
            )

    def check(self, nodes: int, wire: str) -> None:
        if not (self.on_workers or isinstance(self.servers, int)):
            raise UsageError(f"servers={self.servers} must be a number from 1 to {max(1, nodes - 1)}, or 'workers'")
        if isinstance(self.servers, int) and nodes > 1 and not 1 <= self.servers < nodes:
            raise UsageError(
                f"servers={self.servers} of {nodes} nodes leaves no worker or no server: use 1 to {nodes - 1}, or "
                "servers=workers"
            )
        workers = nodes - self.dedicated(nodes)
        if self.quorum is not None and not 1 <= self.quorum <= workers:
            raise UsageError(f"quorum={self.quorum} must be from 1 to {workers}, the number of workers")
        if self.replicas and (nodes if self.on_workers else int(self.servers)) < 2:
            raise UsageError(
                f"replicas=1 needs a second server to hold them: use servers=2 to servers={nodes - 1}, or servers=workers"
            )
        if self.fetch == "layerwise" and wire_format(wire).carries_error:
            raise UsageError(
                f"fetch=layerwise keeps no weights an {wire} change could be added to: use --wire bfloat16"
            )


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
    if settings.quorum is not None:
        fit["quorum"] = min(settings.quorum, workers)
    return fit


def _check_consistency(text: str) -> None:
    kind, colon, bound = text.partition(":")
    if kind not in ("bsp", "async", "ssp"):
        raise unknown("consistency", text, ("bsp", "async", "ssp:S"))
    if kind != "ssp":
        if colon:
            raise UsageError(f"consistency={text}: {kind} has no bound; write consistency={kind}, or ssp:S")
        return
    if bound != "inf" and not bound.isdigit():
        raise UsageError(f"consistency={text}: the bound of ssp must be a whole number of at least 0, or inf")
