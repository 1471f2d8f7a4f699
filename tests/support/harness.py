"""Rings in memory for tests: a model is built once, then laid out and trained as often as a test likes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ringtmp.data.batches import Batch, split_batch
from ringtmp.launch.ring_in_one_process import InMemoryPool, Wrapper
from ringtmp.metrics.event_log import EventLog
from ringtmp.model.build import build_layers
from ringtmp.model.build_cells import Cutting
from ringtmp.model.layers import Model
from ringtmp.model.portable_layer import Layer
from ringtmp.plan.cuts_for_repeated_visits import bounds_for
from ringtmp.plan.node_groups import grouped, shared_parts
from ringtmp.plan.pipeline_schedules import schedule_named
from ringtmp.plan.route import holders_of, route_over
from ringtmp.runtime.base_leader import BaseLeader, Start
from ringtmp.runtime.checkpoint import Checkpoint, CheckpointWriter, Progress, update_digest
from ringtmp.strategies.ring.master import Master
from ringtmp.wire.messages import Recipe, Setup

CONSTANT = {"kind": "constant", "warmup": 0}


class Built:
    """A model as layers and a checkpoint of its first weights."""

    def __init__(
        self,
        folder: Path,
        model: Model,
        sample: Callable[[int], Any],
        sizes: Sequence[int],
        seed: int = 0,
        cutting: Cutting | None = None,
    ) -> None:
        writer = CheckpointWriter(folder / "checkpoints", "test", Progress(0))
        self.layers: list[Layer] = []
        self.state: tuple[tuple[str, str], ...] = ()
        for index, built in enumerate(build_layers(model, seed, sample, sizes, cutting=cutting)):
            writer.add(index, built.layer, list(built.tensors.values()), {})
            self.layers.append(built.layer)
            self.state = built.state
        self.checkpoint = Checkpoint(writer.commit())
        self.log = folder / "events.jsonl"


def recipe(optimizer: str = "sgd", settings: dict[str, Any] | None = None, **more: Any) -> Recipe:
    base = {"seed": 0, "threads": 1, "schedule": CONSTANT}
    return Recipe(optimizer=optimizer, optimizer_settings=settings or {"lr": 0.1}, **{**base, **more})


def ring_in_memory(
    built: Built,
    how: Recipe,
    batches: Sequence[tuple[Any, torch.Tensor]],
    microbatches: int,
    loss: Callable[[Any, torch.Tensor], torch.Tensor],
    nodes: int,
    schedule: str = "1f1b",
    bounds: list[tuple[int, int]] | None = None,
    window: int | None = None,
    seed: int = 0,
    wrap: Wrapper = lambda transport: transport,
    ahead: bool = True,
    holders: list[int] | None = None,
    recompute: str = "none",
    members: list[tuple[int, ...]] | None = None,
    shares_state: bool = False,
    late: int = 0,
    then: Callable[[Master], None] = lambda master: None,
) -> tuple[str, list[float]]:
    """weights_sha256 and the losses of training on `batches` with this ring; delayed steps overlap if `ahead`. `then` is
    called with the trained ring."""
    holders = holders or holders_of(len(members) - 1 if members else nodes)
    if bounds is None:
        bounds = bounds_for([1.0] * len(built.layers), [layer.parameters > 0 for layer in built.layers], holders)
    route = grouped(members, bounds) if members else route_over(holders, bounds)
    pool = InMemoryPool(nodes, seed, wrap)
    log = EventLog(built.log)
    start = Start(pool.start("test", 1), pool, log)
    try:
        gathering = BaseLeader(start)
        gathering.gather(range(1, nodes))
        admitted = window or schedule_named(schedule).default_window(len(route.visits), microbatches, how.staleness)
        setup = Setup(
            route, how, admitted, schedule, 0, pool.addresses(), 0, {}, recompute, shares_state=shares_state, late=late,
            parts=shared_parts(how.sum_tree, late, microbatches),
        )  # fmt: skip
        master = Master(replace(start, hellos=gathering.hellos), setup, built.layers, loss)
        master.lay_out(built.checkpoint)
        whole = [Batch(0, *split_batch(*each, microbatches), len(each[1])) for each in batches]
        upcoming = (lambda step: whole[step] if step < len(whole) else None) if ahead else None
        losses = [master.train_step(step, batch, step == 0, upcoming) for step, batch in enumerate(whole)]
        found: dict[str, torch.Tensor] = {}
        for index, layer in enumerate(built.layers):
            tensors, _ = master._layer_state(index)
            for each, tensor in zip(layer.tensors, tensors, strict=True):
                if each.saved:
                    found[layer.full_name(each)] = tensor
        digest = hashlib.sha256()
        for name, first in built.state or [(name, name) for name in found]:
            update_digest(digest, name, found[first])
        then(master)
        master.stop("done")
        return digest.hexdigest(), losses
    finally:
        pool.stop()
        log.close()
