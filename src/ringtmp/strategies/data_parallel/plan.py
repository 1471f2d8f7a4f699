"""The plan of a data-parallel strategy: who serves, who works, which keys lie where."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ringtmp.errors import UsageError
from ringtmp.model.parameters_changed_in_forward import refuse_written
from ringtmp.model.portable_layer import Layer
from ringtmp.model.running_statistics import changes_statistics, refuse_statistics
from ringtmp.plan.when_to_rebalance import Balance
from ringtmp.runtime.base_leader import Start
from ringtmp.runtime.clipping import parameter_order
from ringtmp.runtime.losses import LOSSES
from ringtmp.strategies import registry
from ringtmp.strategies.base import PlanRequest, Roles, Share, Strategy, drifts
from ringtmp.strategies.data_parallel import parameter_keys
from ringtmp.strategies.data_parallel.leader import DataParallelLeader
from ringtmp.strategies.data_parallel.loss import exported
from ringtmp.strategies.data_parallel.parameter_keys import Key
from ringtmp.strategies.data_parallel.replica import layer_flat
from ringtmp.wire.formats import PLAIN
from ringtmp.wire.messages import Enlist


@dataclass(frozen=True)
class Pace:
    """How steps follow one another."""

    ahead: int = 1  # steps of work a worker may have before it
    mixed: bool = False  # steps overlap: one is a batch's worth of samples, whichever they are
    quorum: int | None = None  # gradients a step needs; None: those of all workers
    replicas: bool = False  # every key is kept by the next server too
    enough: float = 1.0  # of the samples since the last pause: when so many are done, the rest is given up
    warm_start: int = 0  # steps that the first worker makes alone
    own_samples: bool = False  # a worker has the same part of the data in every epoch
    alike: bool = True  # every worker ends a step with the same parameters; else the model is the mean of theirs


STEADY = Pace()
#: Steps of work a worker may have before it, where it need not wait for the others.
MOST_AHEAD = 16
#: Workers whose models differ, and that wait for nobody.
ON_THEIR_OWN = Pace(ahead=MOST_AHEAD, mixed=True, alike=False)


def between_means(tau: int) -> Pace:
    """Workers make `tau` steps of their own, then all go on from one mean."""
    return Pace(ahead=min(tau, MOST_AHEAD), alike=False)


@dataclass(frozen=True)
class ParallelPlan:
    request: PlanRequest
    strategy: Strategy
    pace: Pace
    enlist: Enlist
    roles: Roles
    table: tuple[Key, ...]
    owners: tuple[int, ...]  # the node that serves each key; empty where nobody serves
    warnings: tuple[str, ...]
    facts: dict[str, Any]
    shares: tuple[Share, ...]
    loss: tuple[Layer, list[torch.Tensor]] | None  # one of the user's own, which every worker needs
    lines: tuple[str, ...] = ()
    left_out: bool = False
    leader: Callable[[Start, ParallelPlan], DataParallelLeader] = DataParallelLeader

    def balance(self, not_before: float) -> Balance | None:
        return None

    def lead(self, start: Start) -> DataParallelLeader:
        return self.leader(start, self)


def refuse_unshared(layers: Sequence[Layer], strategy: str) -> None:
    """UsageError for a layer that several nodes cannot hold."""
    refuse_written(layers, strategy)
    for layer in layers:
        for each in layer.tensors:
            if each.trainable and each.dtype != PLAIN.name:
                raise UsageError(
                    f"{layer.full_name(each)} is {each.dtype}: {strategy} exchanges {PLAIN.name} parameters only"
                )


def plan(
    request: PlanRequest, strategy: Strategy, settings: dict[str, Any] | None = None, pace: Pace = STEADY,
    *, warnings: tuple[str, ...] = (), linear: tuple[tuple[int, ...], ...] = (), lines: tuple[str, ...] = (),
    facts: Mapping[str, Any] | None = None, rows: tuple[float, ...] = (),
    leader: Callable[[Start, ParallelPlan], DataParallelLeader] = DataParallelLeader,
) -> ParallelPlan:  # fmt: skip
    """`settings`: where they are not those of the run, which were given for more nodes. `linear`: layers whose gradients may
    travel as factors, and their `rows`, as `Enlist` has them. `lines` and `facts`: what there is to say besides. `leader`:
    where the plain one does not do."""
    config, name, nodes = request.config, strategy.name, request.config.ring.nodes
    settings = config.ring.strategy_settings if settings is None else settings
    refuse_unshared(request.layers, name)
    loss = None
    if request.loss_name not in LOSSES:
        loss = exported(request.loss, request.layers[-1], request.index.outputs[-1], request.targets)
    read = strategy.read(settings)
    roles = strategy.roles(read, nodes)
    told = {"servers": len(roles.servers), "workers": len(roles.workers), **(facts or {})}
    if _own_statistics(strategy, read, roles) and changes_statistics(request.layers):
        warnings += (
            f"each of the {len(roles.workers)} workers has running statistics of its own (BatchNorm?): their mean is tested "
            "and saved, which is not what one process would have. Use LayerNorm or GroupNorm, or --strategy ring",
        )
        told["drifts"] = True
    sizes = tuple(layer_flat(layer).size for layer in request.layers)
    slots: tuple[tuple[int, ...], ...] = ()
    order: tuple[int, ...] = ()
    if request.recipe.sum_tree > 1:
        if (count := len(roles.workers)) > 1:
            refuse_statistics(request.layers, f"with {name} {count} workers share them", "one node, or --strategy ring")
        slots = tuple(tuple(slot.stop - slot.start for slot in layer_flat(each).slots) for each in request.layers)
        order = parameter_order(request.layers)
    table: tuple[Key, ...] = ()
    owners: tuple[int, ...] = ()
    if roles.servers:
        table = parameter_keys.table(sizes, slots, len(roles.servers))
        if len(table) < len(roles.servers):
            raise UsageError(
                f"servers={settings.get('servers')}: {len(roles.servers)} servers are too many, {len(table)} keys can be "
                f"spread over at most {len(table)}"
            )
        owners = tuple(roles.servers[server] for server in parameter_keys.deal(table, len(roles.servers)))
    enlist = Enlist(
        name, settings, nodes, request.recipe,
        wire=config.training.wire, loss=request.loss_name, sizes=sizes, step=request.step, addresses=request.addresses,
        detailed_steps=config.keep.detailed_steps, package=registry.package_of(name), slots=slots, order=order,
        linear=linear, rows=rows,
    )  # fmt: skip
    shares = tuple(
        _share(node, roles, table, owners, sum(layer.parameters for layer in request.layers)) for node in range(nodes)
    )
    return ParallelPlan(
        request, strategy, pace, enlist,
        roles=roles, table=table, owners=owners, warnings=warnings, facts=told, shares=shares, loss=loss,
        lines=lines, leader=leader,
    )  # fmt: skip


def _own_statistics(strategy: Strategy, settings: Any, roles: Roles) -> bool:
    """Whether several workers each see a part of every batch, and what comes out should be that of one process."""
    return len(roles.workers) > 1 and strategy.shares_batches and not drifts(strategy, settings)


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
