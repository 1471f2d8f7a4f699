"""MPCA-SGD, the part of worker i of n.

    m(0) <- the model;  v <- 0;  w_i <- m(0)
    for t in 0, 1, 2, ...
      if a mean m(k), of the models at step t_k = k tau, is due (t = t_k + delay):
        await it;  v <- m(k) - m(k-1)
      c <- m(k) + extrapolate (t - t_k) / tau v                      where the mean would be by now
      x <- share i of batch t
      w_i <- w_i - rate(t) gradient at w_i of (mean loss of x + rho / 2 |w_i - c|^2)
      if t + 1 = (k+1) tau:  start the sum of w_i - m(k) over all workers, up and down a binomial tree; do not wait

    symbol        here                                      symbol   here
    tau           the setting tau                           m(k)     the mean, the same on every worker
    delay         the setting delay                         v        its last change
    rho           the setting rho                           c        the centre that pulls
    extrapolate   the setting extrapolate

Departures. This follows the taxonomy's description (sharing decoupled from updating, the penalty a part of the cost function,
staleness dampened by extrapolation), not the paper's own listing. Workers sum up a tree, the master among them; the paper has
a Spark driver that does not work. A mean counts after a fixed number of steps, not when it happens to arrive, and is waited
for where it is late: so every run gives the same bits. The extrapolation is linear, along the last change of the mean. The
optimizer of the run takes the place of plain descent. The model of a run is the mean of all workers'; a resumed run begins
with it everywhere and with v = 0.

With rho = 0 every worker trains as if it were alone.

Lost worker: the others go on from the newest mean that any of them has, with or without a replacement, and do the steps since
its models were taken again: fewer than tau + delay + 1.
"""

from __future__ import annotations

import torch

from ringtmp.metrics.step_recorder import Recorder
from ringtmp.strategies.data_parallel.member import MakeExchange, SummingExchange
from ringtmp.strategies.data_parallel.own_updates import OwnUpdates
from ringtmp.strategies.data_parallel.replica import Replica
from ringtmp.strategies.data_parallel.sum_over_workers import Summed, buckets
from ringtmp.strategies.mpca import MpcaSettings
from ringtmp.wire.messages import Enlist


class PenalisedRounds(SummingExchange):
    cause = "means"

    def __init__(
        self, plan: Enlist, replica: Replica, recorder: Recorder, start: Summed, *, workers: int, settings: MpcaSettings
    ) -> None:
        self.step = plan.step
        self.rounds = 0
        self._plan = plan
        self._replica = replica
        self._recorder = recorder
        self._start = start
        self._workers = workers
        self._settings = settings
        self._own = OwnUpdates(plan, replica, recorder)
        self._buckets = buckets(plan.sizes)
        self._mean: list[torch.Tensor] = []  # m(k), by layer; empty before the first step
        self._moved: list[torch.Tensor] = []  # v
        self._taken_at = plan.step  # t_k
        self._sums: dict[int, torch.Tensor] = {}  # by bucket: what has come of the next mean's change
        self._under_way: int | None = None  # the step at which its models were taken

    def whole(self) -> int:
        return self._taken_at

    def ready(self, layer: int, step: int, training: bool) -> bool:
        if self.step < step:
            return False
        if not training:
            return True
        if not self._mean:
            self._mean = [values.clone() for values in self._replica.values]
            self._moved = [torch.zeros_like(values) for values in self._mean]
            self._replica.keep(step)
        if self._under_way is not None and step >= self._under_way + self._settings.steps_under_way:
            if len(self._sums) < len(self._buckets):
                return False
            self._take_mean(self._under_way)
        return True

    def gradient(self, layer: int, step: int, share: float, gradient: torch.Tensor) -> None:
        if self._plan.sizes[layer] and share and self._settings.rho:
            gradient.add_(self._replica.values[layer] - self._centre(layer, step), alpha=share * self._settings.rho)
        if not self._own.take(layer, share, gradient):
            return
        self._own.make(step)
        self.step = step + 1
        if self.step % self._settings.tau == 0 and self._buckets:
            self._under_way = self.step
            for number, group in enumerate(self._buckets):
                changes = [self._replica.values[each] - self._mean[each] for each in group]
                self._start(self.rounds, number, torch.cat(changes).div_(self._workers))

    def summed(self, round: int, bucket: int, vector: torch.Tensor) -> None:
        """Layers may be at work: it counts when it is due."""
        self._sums[bucket] = vector
        self.rounds += len(self._sums) == len(self._buckets)

    def _centre(self, layer: int, step: int) -> torch.Tensor:
        ahead = self._settings.extrapolate * (step - self._taken_at) / self._settings.tau
        return self._mean[layer].add(self._moved[layer], alpha=ahead)

    def _take_mean(self, taken_at: int) -> None:
        started = self._recorder.begin()
        for number, group in enumerate(self._buckets):
            changes = torch.split(self._sums.pop(number), [self._plan.sizes[each] for each in group])
            for layer, change in zip(group, changes, strict=True):
                self._mean[layer].add_(change)
                self._moved[layer] = change
        self._taken_at, self._under_way = taken_at, None
        # What another generation would begin with is the mean, not this worker's own model.
        own = [values.clone() for values in self._replica.values]
        self._put(self._mean)
        self._replica.keep(taken_at)
        self._put(own)
        self._recorder.end(started, "update", 0, -1)

    def _put(self, model: list[torch.Tensor]) -> None:
        for mine, values in zip(self._replica.values, model, strict=True):
            mine.copy_(values)


def penalised_rounds(workers: int, settings: MpcaSettings) -> MakeExchange:
    def make(plan: Enlist, replica: Replica, recorder: Recorder, start: Summed) -> PenalisedRounds:
        return PenalisedRounds(plan, replica, recorder, start, workers=workers, settings=settings)

    return make
