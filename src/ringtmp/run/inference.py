"""A ring that evaluates or predicts: laid out from a run's newest checkpoint, gone when it is done."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ringtmp.config import RunConfig
from ringtmp.data.batches import Batch
from ringtmp.launch.node_pool import NodePool
from ringtmp.metrics.events import EventLog
from ringtmp.model.portable_layer import hides_inputs
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

    def checked(self, batches: Iterable[Batch], where: str, loss: str | None = None) -> Iterator[Batch]:
        """The same batches, each held against what the model takes before it is used; labels too where there is a loss."""
        return (self.index.check_batch(batch, loss, where, where) for batch in batches)


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
            yield Inference(master, step, index)
        finally:
            master.stop("done")
    finally:
        pool.stop()
        log.close()
