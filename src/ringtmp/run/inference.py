"""A ring that is not trained: laid out from a run's newest checkpoint, asked for outputs, gone when it is done."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ringtmp.config import TrainingPart
from ringtmp.data.batches import Batch
from ringtmp.data.nested_inputs import leaves
from ringtmp.errors import DoesNotFit, UsageError
from ringtmp.launch.node_pool import NodePool
from ringtmp.metrics.event_log import EventLog
from ringtmp.model.frozen_formats import FLOAT32
from ringtmp.model.portable_layer import Layer, Value, hides_inputs
from ringtmp.model.run_graph import layer_bytes
from ringtmp.model.whole_graph import rows_of
from ringtmp.plan.memory_forecast import PROCESS_BYTES
from ringtmp.plan.partition import equal_cost
from ringtmp.plan.pipeline_schedules import DEFAULT_SCHEDULE
from ringtmp.plan.route import MASTER, Route, plain_ring
from ringtmp.runtime.base_leader import STOP_LIMIT_S, BaseLeader, Start
from ringtmp.runtime.checkpoint import Weights, latest
from ringtmp.runtime.ensemble_members import Member
from ringtmp.runtime.losses import LossFunction, loss_named
from ringtmp.runtime.run_directory import LayerIndex, RunDirectory
from ringtmp.strategies.ring.master import Master
from ringtmp.strategies.ring.tensor_routes import flow_of
from ringtmp.system.resources import set_threads
from ringtmp.units import bytes_text
from ringtmp.wire.messages import Crossing, Randomness, Recipe, Setup

#: How long a ring that failed is waited for: somebody may be dead and never answer.
FAILED_STOP_LIMIT_S = 0.5


@dataclass(frozen=True)
class Inference:
    master: Master
    step: int
    index: LayerIndex
    layers: Sequence[Layer]
    rows: Mapping[int, int]  # of embeddings, by the place of the input that chooses among them

    def checked(self, batches: Iterable[Batch], where: str, loss: str | None = None) -> Iterator[Batch]:
        """The same batches, each held against what the model takes before it is used; labels too where there is a loss."""
        before = 0
        for batch in batches:
            found = self.index.check_batch(batch, loss, where, where)
            found = replace(found, inputs=tuple(map(self.index.in_its_types, found.inputs)))
            for place, inputs in enumerate(found.inputs):
                numbers = None if found.numbers is None else found.numbers[place]
                self._check_tokens(inputs, where, before, numbers)
                before += len(leaves(inputs)[0])
            yield found

    def _check_tokens(self, inputs: Any, where: str, before: int, numbers: torch.Tensor | None) -> None:
        """UsageError for a number that is no row of the embedding it chooses from: which, and of what."""
        given = leaves(inputs)
        for place, rows in self.rows.items():
            tensor = given[place]
            wrong = (tensor < 0) | (tensor >= rows)
            if not bool(wrong.any()):
                continue
            first = wrong.nonzero()[0]
            row = int(first[0])
            sample = before + row if numbers is None else int(numbers[row])
            position = f" at position {', '.join(map(str, first[1:].tolist()))}" if len(first) > 1 else ""
            name = self.index.input_names[place] if self.index.input_names else ""
            raise UsageError(
                f"sample {sample} of {where} has {int(tensor[tuple(first)])}{position}{f' of {name}' if name else ''}, and the "
                f"model's embedding has {rows} rows, for 0 to {rows - 1}: was it made with another tokeniser or vocabulary?"
            )


@dataclass(frozen=True)
class Layout:
    """What is laid out. `describe`: what is known of a tensor on its way, in training or not; None: nothing."""

    layers: Sequence[Layer]
    costs: Sequence[float]
    weights: Weights
    step: int
    describe: Callable[[bool, Value], Crossing] | None = None
    leaving: Sequence[tuple[Crossing, ...]] = ()  # what leaves each layer of a list
    randomness: Randomness = "operator"
    compute: str = FLOAT32
    loss: LossFunction = field(default_factory=lambda: loss_named("mse"))

    def route(self, nodes: int) -> Route:
        """UsageError where the model has too few layers for so many."""
        return plain_ring(nodes, equal_cost(self.costs, hides_inputs(self.layers), nodes))

    def setup(self, pool: NodePool, training: TrainingPart, microbatches: int) -> Setup:
        """The plan for the nodes that are there."""
        layers, route = self.layers, self.route(pool.nodes)
        _require_room(pool, route, layers)
        recipe = Recipe(
            training.seed, pool.threads, training.optimizer, training.optimizer_settings, training.lr_schedule,
            randomness=self.randomness, compute=self.compute,
        )  # fmt: skip
        window = DEFAULT_SCHEDULE.default_window(len(route.visits), microbatches)
        known = {visit.index: self.leaving[visit.first - 1] for visit in route.visits[1:]} if self.leaving else {}
        return Setup(
            route, recipe, window, DEFAULT_SCHEDULE.name, self.step, pool.addresses(), detailed_steps=0, crossings=known,
            flow=flow_of(layers, route, self.describe),
        )  # fmt: skip


@contextmanager
def inference(
    run: RunDirectory, training: TrainingPart, loss: LossFunction, pool: NodePool, member: int = 0
) -> Iterator[Inference]:  # fmt: skip
    """The run's own model, as it was trained; of an ensemble one of its members."""
    index, layers = run.read_layers()
    checkpoint, _ = latest(run.checkpoints, index.run)
    weights = Member(checkpoint, member, len(layers))
    assert isinstance(training.microbatches, int), "a saved run has a number"
    layout = Layout(
        layers, index.cost_s, weights, checkpoint.progress.step, describe=index.crossing if index.inputs else None,
        leaving=index.outputs, randomness=index.randomness, compute=training.compute, loss=loss,
    )  # fmt: skip
    with laid_out(layout, training, pool, training.microbatches) as master:
        yield Inference(master, layout.step, index, layers, rows_of(layers, len(index.inputs)))


@contextmanager
def laid_out(layout: Layout, training: TrainingPart, pool: NodePool, microbatches: int) -> Iterator[Master]:
    """`microbatches`: in the largest pass."""
    layout.route(pool.nodes)  # refused before anybody is started or waited for
    log = EventLog(Path(os.devnull))
    try:
        endpoint = pool.start(secrets.token_hex(8), 1)
        set_threads(training.threads or pool.threads)
        setup = layout.setup(pool, training, microbatches)
        gathering = BaseLeader(Start(endpoint, pool, log))
        gathering.gather(setup.route.nodes())
        master = Master(Start(endpoint, pool, log, gathering.hellos), setup, layout.layers, layout.loss)
        limit_s = FAILED_STOP_LIMIT_S
        try:
            master.lay_out(layout.weights)
            yield master
            limit_s = STOP_LIMIT_S
        finally:
            master.stop("done", limit_s)
    finally:
        pool.stop()
        log.close()


def _require_room(pool: NodePool, route: Route, layers: Sequence[Layer]) -> None:
    """DoesNotFit where a device of its own has less memory than what it is to hold."""
    if pool.same_machine:
        return
    for node, device in zip(sorted(pool.addresses()), pool.devices(), strict=True):
        held = sum(layer_bytes(layers[index]) for visit in route.on(node) for index in visit.layers)
        process = 0 if node == MASTER else PROCESS_BYTES  # the master's is there already
        if process + held > device.memory_bytes:
            raise DoesNotFit(
                f"{device.name} is to hold {bytes_text(held)} of the model beside the {bytes_text(process)} of its process, "
                f"and has {bytes_text(device.memory_bytes)} free: add devices (--nodes)"
            )
