"""The settings of strategies as values, and what is refused before anything starts. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from ringtmp.errors import UsageError, unknown
from ringtmp.wire.formats import wire_format


class Roles(msgspec.Struct, frozen=True):
    """Nodes by what they do; a node may do both."""

    servers: tuple[int, ...]
    workers: tuple[int, ...]

    def without(self, node: int) -> Roles:
        return Roles(*(tuple(each for each in group if each != node) for group in (self.servers, self.workers)))


class PsSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    servers: int | str = 1  # a number, or "workers"
    consistency: str = "bsp"
    quorum: int | None = None
    replicas: int = 0
    fetch: str = "all"

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


class AllReduceSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    algorithm: str = "ring"


def checked_ps(given: Mapping[str, Any], nodes: int, wire: str) -> None:
    servers = given.get("servers", 1)
    if not (servers == "workers" or (isinstance(servers, int) and not isinstance(servers, bool))):
        raise UsageError(f"servers={servers} must be a number from 1 to {max(1, nodes - 1)}, or 'workers'")
    if isinstance(servers, int) and nodes > 1 and not 1 <= servers < nodes:
        raise UsageError(
            f"servers={servers} of {nodes} nodes leaves no worker or no server: use 1 to {nodes - 1}, or servers=workers"
        )
    consistency = str(given.get("consistency", "bsp"))
    _check_consistency(consistency)
    settings = PsSettings(**{**given, "consistency": consistency})
    workers = nodes if servers == "workers" or nodes == 1 else nodes - int(servers)
    quorum = settings.quorum
    if quorum is not None and (not isinstance(quorum, int) or not 1 <= quorum <= workers):
        raise UsageError(f"quorum={quorum} must be from 1 to {workers}, the number of workers")
    if quorum is not None and not settings.gathered:
        raise UsageError(f"quorum={quorum} needs consistency=bsp: with {consistency} no step waits for the others")
    if settings.replicas not in (0, 1):
        raise UsageError(f"replicas={settings.replicas} must be 0 or 1")
    if settings.replicas and (nodes if servers == "workers" else int(servers)) < 2:
        raise UsageError(
            f"replicas=1 needs a second server to hold them: use servers=2 to servers={nodes - 1}, or servers=workers"
        )
    if settings.fetch not in ("all", "layerwise"):
        raise unknown("fetch", str(settings.fetch), ("all", "layerwise"))
    if settings.fetch == "layerwise" and not settings.deterministic:
        raise UsageError(
            "fetch=layerwise needs consistency=bsp without a quorum: a layer fetched again must still be the same"
        )
    if settings.fetch == "layerwise" and wire_format(wire).carries_error:
        raise UsageError(f"fetch=layerwise keeps no weights an {wire} change could be added to: use --wire bfloat16")


def fitted(given: Mapping[str, Any], nodes: int) -> dict[str, Any]:
    """The settings of a parameter server for the nodes that are left, which may be fewer than they were given for."""
    settings = PsSettings(**given)
    servers = nodes if settings.servers == "workers" or nodes == 1 else min(int(settings.servers), nodes - 1)
    workers = nodes if settings.servers == "workers" or nodes == 1 else nodes - servers
    fit = dict(given)
    if settings.servers != "workers":
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


def checked_allreduce(given: Mapping[str, Any], nodes: int) -> None:
    algorithm = given.get("algorithm", "ring")
    if algorithm not in ("ring", "tree"):
        raise unknown("algorithm", str(algorithm), ("ring", "tree"))
