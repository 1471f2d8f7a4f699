"""A ring that evaluates or predicts: laid out from a run's newest checkpoint, gone when it is done."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path

from ringtmp.config import RunConfig
from ringtmp.data.batches import Batch
from ringtmp.launch.node_pool import NodePool
from ringtmp.metrics.events import EventLog
from ringtmp.plan.partition import equal_cost
from ringtmp.plan.pipeline_schedules import DEFAULT_SCHEDULE
from ringtmp.plan.route import MASTER, plain_ring
from ringtmp.runtime.checkpoint import latest
from ringtmp.runtime.losses import LossFunction
from ringtmp.runtime.run_directory import RunDirectory
from ringtmp.strategies.ring.master import Master
from ringtmp.system.resources import set_threads
from ringtmp.wire.messages import Recipe, Setup


class Inference:
    """A ring laid out from a run's newest checkpoint, to evaluate or predict with. A context manager."""

    def __init__(self, run: RunDirectory, config: RunConfig, nodes: int, loss: LossFunction, pool: NodePool) -> None:
        self._index, self._layers = run.read_layers()
        self._checkpoint, self.warnings = latest(run.checkpoints, self._index.run)
        self.step = self._checkpoint.progress.step
        bounds = equal_cost(self._index.cost_s, [layer.parameters > 0 for layer in self._layers], nodes)
        self._route = plain_ring(nodes, bounds)
        self._config = config
        self._loss = loss
        self._node_pool = pool
        self._log = EventLog(Path(os.devnull))
        self._made: Master | None = None

    def checked(self, batches: Iterable[Batch], where: str, loss: str | None = None) -> Iterator[Batch]:
        """The same batches, each held against what the model takes before it is used; labels too where there is a loss."""
        for batch in batches:
            for each in batch.inputs:
                self._index.check_inputs(each, where)
            if loss is not None:
                self._index.label_range(loss).check_batch(batch, where, where)
            yield batch

    @property
    def master(self) -> Master:
        assert self._made is not None, "use it in a with statement"
        return self._made

    def __enter__(self) -> Inference:
        training = self._config.training
        try:
            endpoint = self._node_pool.start(secrets.token_hex(8), 1)
            set_threads(training.threads or self._node_pool.threads)
            self._made = master = Master(endpoint, self._node_pool, self._layers, self._loss, self._log)
            master.gather([node for node in self._route.nodes() if node != MASTER])
            recipe = Recipe(
                training.seed,
                self._node_pool.threads,
                training.optimizer,
                training.optimizer_settings,
                training.lr_schedule,
            )
            assert isinstance(training.microbatches, int), "a saved run has a number"
            window = DEFAULT_SCHEDULE.default_window(len(self._route.visits), training.microbatches)
            setup = Setup(self._route, recipe, window, DEFAULT_SCHEDULE.name, self.step, self._node_pool.addresses(), 0)
            master.lay_out(setup, self._checkpoint)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            if self._made is not None:
                self._made.stop("done")
        finally:
            self._node_pool.stop()
            self._log.close()
