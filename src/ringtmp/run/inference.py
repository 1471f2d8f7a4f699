"""A ring that evaluates or predicts: laid out from a run's newest checkpoint, gone when it is done."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ringtmp.config import RunConfig
from ringtmp.data.batches import Batch
from ringtmp.data.nested_inputs import leaves
from ringtmp.errors import UsageError
from ringtmp.launch.node_pool import NodePool
from ringtmp.metrics.events import EventLog
from ringtmp.model.portable_layer import hides_inputs
from ringtmp.model.whole_graph import rows_of
from ringtmp.plan.partition import equal_cost
from ringtmp.plan.pipeline_schedules import DEFAULT_SCHEDULE
from ringtmp.plan.route import plain_ring
from ringtmp.runtime.checkpoint import latest
from ringtmp.runtime.leader import BaseLeader, Start
from ringtmp.runtime.losses import LossFunction
from ringtmp.runtime.run_directory import LayerIndex, RunDirectory
from ringtmp.strategies.ring.master import Master
from ringtmp.system.resources import set_threads
from ringtmp.wire.messages import Recipe, Setup


@dataclass(frozen=True)
class Inference:
    master: Master
    step: int
    index: LayerIndex
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


@contextmanager
def inference(run: RunDirectory, config: RunConfig, loss: LossFunction, pool: NodePool) -> Iterator[Inference]:
    index, layers = run.read_layers()
    checkpoint, _ = latest(run.checkpoints, index.run)
    step, training = checkpoint.progress.step, config.training
    route = plain_ring(pool.nodes, equal_cost(index.cost_s, hides_inputs(layers), pool.nodes))
    assert isinstance(training.microbatches, int), "a saved run has a number"
    window = DEFAULT_SCHEDULE.default_window(len(route.visits), training.microbatches)
    log = EventLog(Path(os.devnull))
    try:
        endpoint = pool.start(secrets.token_hex(8), 1)
        set_threads(training.threads or pool.threads)
        gathering = BaseLeader(Start(endpoint, pool, log))
        gathering.gather(route.nodes())
        recipe = Recipe(
            training.seed, pool.threads, training.optimizer, training.optimizer_settings, training.lr_schedule,
            randomness=index.randomness,
        )  # fmt: skip
        setup = Setup(route, recipe, window, DEFAULT_SCHEDULE.name, step, pool.addresses(), 0)
        master = Master(Start(endpoint, pool, log, gathering.hellos), setup, layers, loss)
        try:
            master.lay_out(checkpoint)
            yield Inference(master, step, index, rows_of(layers, len(index.inputs)))
        finally:
            master.stop("done")
    finally:
        pool.stop()
        log.close()
