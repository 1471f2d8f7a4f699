"""The plan of a data-parallel strategy: who serves, who works, which keys lie where."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ringtmp.errors import UsageError
from ringtmp.metrics.events import EventLog
from ringtmp.model.portable_layer import Layer
from ringtmp.model.recompute import refuse_unrepeatable
from ringtmp.plan.route import MASTER
from ringtmp.runtime.checkpoint import Checkpoint
from ringtmp.runtime.endpoint import Endpoint
from ringtmp.runtime.leader import NodePool
from ringtmp.runtime.losses import LOSSES
from ringtmp.strategies import registry
from ringtmp.strategies.base import Brief, Share
from ringtmp.strategies.data_parallel import parameter_keys
from ringtmp.strategies.data_parallel.leader import ParallelLead
from ringtmp.strategies.data_parallel.loss import exported
from ringtmp.strategies.data_parallel.parameter_keys import Key
from ringtmp.strategies.data_parallel.replica import layer_flat
from ringtmp.strategies.ps.settings import Roles, fitted
from ringtmp.wire.formats import PLAIN
from ringtmp.wire.messages import Enlist


@dataclass(frozen=True)
class ParallelPlan:
    brief: Brief
    enlist: Enlist
    roles: Roles
    table: tuple[Key, ...]
    owners: tuple[int, ...]  # the node that serves each key; empty where nobody serves
    warnings: tuple[str, ...]
    lines: tuple[str, ...]
    facts: dict[str, Any]
    shares: tuple[Share, ...]
    loss: tuple[Layer, list[torch.Tensor]] | None  # one of the user's own, which every worker needs

    def lead(self, endpoint: Endpoint, pool: NodePool, log: EventLog) -> ParallelLead:
        return ParallelLead(endpoint, pool, log, self)

    def start(self, leader: ParallelLead, checkpoint: Checkpoint, phase: Callable[[str], None]) -> None:
        phase("waiting for the nodes")
        leader.gather([node for node in range(self.enlist.nodes) if node != MASTER])
        phase("placing the layers")
        leader.lay_out(checkpoint)


def plan(brief: Brief) -> ParallelPlan:
    config, name = brief.config, brief.config.ring.strategy
    settings, nodes = config.ring.strategy_settings, config.ring.nodes
    loss = None
    if brief.loss_name not in LOSSES:
        loss = exported(brief.loss, brief.layers[-1], brief.index.outputs[-1], brief.targets)
    warnings: tuple[str, ...] = ()
    if name == "ps":
        given, settings = settings, fitted(settings, nodes)
        if given.get("replicas") and not settings["replicas"]:
            warnings = ("with one server left there are no replicas",)
    if settings.get("fetch") == "layerwise":
        refuse_unrepeatable(brief.layers)
    roles = registry.roles(name, settings, nodes)
    for layer in brief.layers:
        for each in layer.tensors:
            if each.trainable and each.dtype != PLAIN.name:
                raise UsageError(
                    f"{layer.name}.{each.name} is {each.dtype}: {name} exchanges {PLAIN.name} parameters only"
                )
    sizes = tuple(layer_flat(layer).size for layer in brief.layers)
    table: tuple[Key, ...] = ()
    owners: tuple[int, ...] = ()
    if roles.servers:
        table = parameter_keys.cut(sizes, len(roles.servers))
        if len(table) < len(roles.servers):
            raise UsageError(
                f"servers={settings.get('servers')}: {len(roles.servers)} servers for {len(table)} keys leaves some with "
                f"nothing: use at most {len(table)}"
            )
        owners = tuple(roles.servers[server] for server in parameter_keys.deal(table, len(roles.servers)))
    enlist = Enlist(
        name, settings, nodes, brief.recipe, config.training.wire, brief.loss_name, sizes, brief.step, brief.addresses,
        config.keep.detailed_steps,
    )  # fmt: skip
    facts = {"servers": len(roles.servers), "workers": len(roles.workers)}
    shares = tuple(
        _share(node, roles, table, owners, sum(layer.parameters for layer in brief.layers)) for node in range(nodes)
    )
    return ParallelPlan(brief, enlist, roles, table, owners, warnings, (), facts, shares, loss)


def _share(node: int, roles: Roles, table: Sequence[Key], owners: Sequence[int], parameters: int) -> Share:
    served = [key for key in table if owners[key.number] == node]
    both = node in roles.servers and node in roles.workers
    role = "server and worker" if both else ("server" if node in roles.servers else "worker")
    segments = []
    if served:
        segments.append(f"{len(served)} keys")
    if node in roles.workers:
        segments.append("whole model")
    return Share(node, role, tuple(segments), parameters if node in roles.workers else sum(key.size for key in served))
