"""STRADS, the part of worker p of P: schedule, push and pull, of which the scheduler's is done by every worker alike.

    w <- the model;  c_j <- 1 for every weight j
    for t in 0, 1, 2, ...
      schedule   C <- U' weights, drawn by importance c
      push       over the samples of share p:  z_j <- gradient, m_j <- mean square of x_j, q_jk <- mean of x_j x_k   (j, k in C)
      pull       sums of z, m and q over all workers;  S <- those of C that are nearly independent, by q
                 w_j <- S(w_j - rate z_j / m_j, rate lambda / m_j);  c_j <- |change of w_j| + eta                     (j in S)

    symbol   here                                             symbol   here
    U'       the setting candidates                           lambda   the setting l1; 0 for biases
    rho      the setting independence                         eta      the setting eta
    x_j      what weight j is multiplied with                 S(v, t)  shrink towards 0 by t

For a linear layer under mse with one output and rate 0.5 this is the paper's lasso, with the mean squared error in place of
half its sum: the minimum along every weight. Under cross_entropy the second derivative along a weight is at most half its
mean square, so rate 0.5 goes a quarter of the way that would still be safe.

Departures. Schedulers are no machines of their own: every worker draws with the same numbers, and the sums that all have
decide the rest. Data is split by samples, and every worker has all weights, as in the paper's lasso; a step takes all
samples. Products are summed anew in every step, for the drawn weights alone, so that what enters a layer
may change; two weights of different outputs count as independent, two of different layers as dependent. What enters a layer is
taken to be what meets its matrix. Networks of linear layers are trained too, with independence=1 and a small rate; nothing is
promised for them. The importance of weights is in no checkpoint: a resumed run, or one that lost a worker, begins with 1.

Lost worker: every worker has the same weights, at most one step apart. The others go on from the newest, with all samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ringtmp.errors import UsageError
from ringtmp.metrics.step_recorder import Recorder
from ringtmp.strategies.data_parallel.member import SummingExchange
from ringtmp.strategies.data_parallel.replica import Replica
from ringtmp.strategies.data_parallel.sum_over_workers import Summed
from ringtmp.strategies.scheduled import ScheduledSettings
from ringtmp.strategies.scheduled.schedule import draw, independent, soft
from ringtmp.wire.messages import Enlist


class Weights:
    """Every weight of a replica by a number: its layer, its place there, its output and input; a bias has the last input."""

    def __init__(self, replica: Replica) -> None:
        found: list[torch.Tensor] = [torch.empty(4, 0, dtype=torch.long)]
        self.inputs: list[int] = []  # of each layer
        for layer, layout in enumerate(replica.layouts):
            matrices = [slot for slot in layout.slots if len(slot.shape) == 2]
            self.inputs.append(matrices[0].shape[1] if matrices else 0)
            for slot in layout.slots:
                size = slot.stop - slot.start
                number, width = torch.arange(size), slot.shape[1] if len(slot.shape) == 2 else 1
                entering = number % width if len(slot.shape) == 2 else torch.full((size,), self.inputs[layer])
                found.append(torch.stack([torch.full((size,), layer), slot.start + number, number // width, entering]))
        self.layer, self.place, self.output, self.input = torch.cat(found, dim=1)

    def is_bias(self, chosen: torch.Tensor) -> torch.Tensor:
        return torch.eq(self.input[chosen], torch.tensor(self.inputs)[self.layer[chosen]])


class ScheduledWeights(SummingExchange):
    cause = "sums"

    def __init__(
        self, plan: Enlist, replica: Replica, recorder: Recorder, start: Summed, *, settings: ScheduledSettings
    ) -> None:
        self.step = self.rounds = plan.step
        self._plan = plan
        self._replica = replica
        self._recorder = recorder
        self._start = start
        self._settings = settings
        self._width = min(settings.candidates, sum(plan.sizes))
        self._weights: Weights | None = None  # none before the first step, when the layers are there
        self._importance = torch.empty(0)
        self._drawn = torch.empty(0, dtype=torch.long)
        self._drawn_for = plan.step - 1
        self._gradients = torch.empty(0)  # z, of those drawn
        self._products = torch.empty(0, 0)  # q, or m alone

    # -- schedule and push --------------------------------------------------------------------------------------------

    def ready(self, layer: int, step: int, training: bool) -> bool:
        if self._width and self.step < step:
            return False
        if training and layer == 0:
            self._replica.mark(step)
            if self._drawn_for < step:
                self._schedule(step)
        return True

    def _schedule(self, step: int) -> None:
        if self._weights is None:
            self._weights = Weights(self._replica)
            self._importance = torch.ones(len(self._weights.place), dtype=torch.float64)
        self._drawn = draw(self._importance, self._width, self._plan.recipe.seed, step)
        self._drawn_for = step
        count = len(self._drawn)
        self._gradients = torch.zeros(count)
        self._products = torch.zeros((count, count) if self._settings.compares else (count,), dtype=torch.float64)

    def entered(self, layer: int, tensors: Sequence[torch.Tensor], share: float) -> None:
        assert self._weights is not None
        mine = (self._weights.layer[self._drawn] == layer).nonzero().flatten()
        if not len(mine):
            return
        rows = _rows(tensors, self._weights.inputs[layer], self._replica.layers[layer].name)
        columns = torch.cat([rows, torch.ones(len(rows), 1)], 1)[:, self._weights.input[self._drawn[mine]]].double()
        if self._settings.compares:
            self._products[mine[:, None], mine] += columns.T @ columns * (share / len(rows))
        else:
            self._products[mine] += columns.square().sum(0) * (share / len(rows))

    def gradient(self, layer: int, step: int, share: float, gradient: torch.Tensor) -> None:
        assert self._weights is not None
        mine = self._weights.layer[self._drawn] == layer
        self._gradients[mine] = gradient[self._weights.place[self._drawn[mine]]]
        if layer == 0 and self._width:
            pushed = torch.zeros(int(self._settings.values(sum(self._plan.sizes))))
            squares = self._products.diagonal() if self._settings.compares else self._products
            parts = (self._gradients, squares, self._products.flatten() if self._settings.compares else torch.empty(0))
            found = torch.cat([each.float() for each in parts])
            pushed[: len(found)] = (
                found  # a flat vector has gaps between tensors: fewer weights may be there than it has values
            )
            self._start(step, 0, pushed)

    # -- pull ---------------------------------------------------------------------------------------------------------

    def summed(self, round: int, bucket: int, vector: torch.Tensor) -> None:
        started = self._recorder.begin()
        count = len(self._drawn)
        z, m = vector[:count].double(), vector[count : 2 * count].double()
        kept = torch.arange(count)
        if self._settings.compares:
            q = vector[2 * count : 2 * count + count * count].view(count, count).double()
            kept = torch.tensor(independent(self._cosines(q, m), self._settings.independence), dtype=torch.long)
        self._update(self._drawn[kept], z[kept], m[kept])
        self.step = self.rounds = round + 1
        self._recorder.end(started, "update", 0, -1)

    def _cosines(self, q: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        assert self._weights is not None
        found = q / (m[:, None] * m).sqrt().clamp(min=1e-30)
        layers, outputs = self._weights.layer[self._drawn], self._weights.output[self._drawn]
        found[outputs[:, None] != outputs] = 0.0
        found[layers[:, None] != layers] = 1.0
        return found

    def _update(self, chosen: torch.Tensor, z: torch.Tensor, m: torch.Tensor) -> None:
        assert self._weights is not None
        stride = torch.where(m > 0, self._settings.rate / m.clamp(min=1e-30), 0.0)  # nothing enters: nothing to learn
        threshold = stride * self._settings.l1
        threshold[self._weights.is_bias(chosen)] = 0.0
        for layer in self._weights.layer[chosen].unique().tolist():
            mine = self._weights.layer[chosen] == layer
            values, places = self._replica.values[layer], self._weights.place[chosen[mine]]
            before = values[places]
            after = soft(before.double() - stride[mine] * z[mine], threshold[mine]).float()
            values[places] = after
            self._importance[chosen[mine]] = (after - before).abs().double() + self._settings.eta


def _rows(tensors: Sequence[torch.Tensor], inputs: int, name: str) -> torch.Tensor:
    """What enters a linear layer, a row for everything that it is multiplied with."""
    entering = tensors[0].detach()
    if entering.is_floating_point():
        if entering.shape[-1] == inputs:
            return entering.reshape(-1, inputs)
        if entering[0].numel() == inputs:
            return entering.reshape(len(entering), inputs)
    raise UsageError(
        f"scheduled draws weights of linear layers: {name} takes {inputs} inputs, and {entering.dtype} of shape "
        f"{list(entering.shape)} enters it"
    )
