"""A worker's own descent: its gradient, of the mean loss of its own samples, changes its own replica and nothing else."""

from __future__ import annotations

import torch

from ringtmp.metrics.step_recorder import Recorder
from ringtmp.runtime.clipping import parameter_order, total_norm
from ringtmp.strategies.data_parallel.replica import Replica
from ringtmp.wire.messages import Enlist


class OwnUpdates:
    def __init__(self, plan: Enlist, replica: Replica, recorder: Recorder) -> None:
        self._plan = plan
        self._replica = replica
        self._recorder = recorder
        self._idle = False  # no samples in this step

    def take(self, layer: int, share: float, gradient: torch.Tensor) -> bool:
        """A layer's gradient, weighted by the worker's share of the batch. True: it was the last of the step."""
        self._idle = not share  # a batch with fewer microbatches than workers leaves some without
        if not self._idle:
            self._replica.give_gradients(layer, gradient.div_(share))
        return layer == 0

    def make(self, step: int) -> None:
        """w <- w - rate(t) g, by the optimizer of the run; `--clip-norm` holds for this worker's own gradient."""
        if self._idle:
            return
        started, norm, stages = self._recorder.begin(), None, self._replica.stages
        if self._plan.recipe.clip_norm is not None:
            every = [norms for stage in stages for norms in stage.gradient_norms(step)]
            norm = total_norm(every, parameter_order(self._replica.layers))
        for layer, stage in enumerate(stages):
            if self._plan.sizes[layer]:
                stage.step(step, norm)
        self._recorder.end(started, "update", 0, -1)
