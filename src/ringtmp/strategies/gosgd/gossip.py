"""GoSGD, the part of worker i: sum-weighted push gossip.

    alpha_i <- 1 / n;  w_i <- the model
    loop
      for every (w_j, alpha_j) received:
        w_i <- (alpha_i w_i + alpha_j w_j) / (alpha_i + alpha_j);  alpha_i <- alpha_i + alpha_j
      x <- share i of the next batch;  w_i <- w_i - rate gradient of the mean loss of x at w_i
      with probability p:
        alpha_i <- alpha_i / 2;  send (w_i, alpha_i) to a worker chosen by chance

    symbol    here
    n         the number of workers
    p         the setting p
    alpha_i   the weight of worker i: all weights, those under way included, add up to 1

Departures. The optimizer of the run takes the place of plain descent. Chance is a function of the run's seed, the worker and
the step; what is still chance is when a model arrives. Models that arrive while layers are at work are merged with each other
first, by the same rule. The model of a run is the plain mean of all workers'; a resumed run begins with it and equal weights.

With rate 0 all models come to be one: the mean of all, weighted with the alphas they began with.

Lost worker: nobody waits for it. Its weight is gone with it, and only the proportions of the others' matter.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from ringtmp.metrics.step_recorder import Recorder
from ringtmp.strategies.data_parallel.own_updates import OwnUpdates
from ringtmp.strategies.data_parallel.peers import MakePeerExchange, Model, PeerExchange, Send
from ringtmp.strategies.data_parallel.replica import Replica
from ringtmp.wire.messages import Enlist


class Gossip(PeerExchange):
    cause = "gossip"

    def __init__(
        self, plan: Enlist, replica: Replica, recorder: Recorder, send: Send,
        *, me: int, workers: Sequence[int], p: float,
    ) -> None:  # fmt: skip
        self.step = plan.step
        self.alpha = 1 / len(workers)
        self._replica = replica
        self._send = send
        self._me = me
        self._others = [node for node in workers if node != me]
        self._p = p
        self._seed = plan.recipe.seed
        self._own = OwnUpdates(plan, replica, recorder)
        self._received: tuple[float, Model] | None = None  # merged already

    @property
    def weight(self) -> float:
        """With what has come and is not merged yet."""
        return self.alpha + (self._received[0] if self._received is not None else 0.0)

    def begin(self, fresh: bool) -> None:
        if self._received is not None:
            self.alpha = merge(self._replica.values, self.alpha, self._received[1], self._received[0])
            self._received = None

    def ready(self, layer: int, step: int, training: bool) -> bool:
        return self.step >= step

    def gradient(self, layer: int, step: int, share: float, gradient: torch.Tensor) -> None:
        if not self._own.take(layer, share, gradient):
            return
        self._own.make(step)
        self.step = step + 1
        chance = random.Random(f"{self._seed} {self._me} {step}")
        if self._others and chance.random() < self._p:
            self.alpha /= 2
            self._send(chance.choice(self._others), step, self.alpha, self._replica.values)

    def arrived(self, sender: int, step: int, weight: float, model: Model) -> None:
        if self._received is None:
            self._received = (weight, model)
        else:
            self._received = (merge(self._received[1], self._received[0], model, weight), self._received[1])

    def lose(self, node: int) -> None:
        self._others = [each for each in self._others if each != node]


def merge(mine: Sequence[torch.Tensor], alpha: float, other: Sequence[torch.Tensor], beta: float) -> float:
    """`mine` becomes the weighted mean of both models. The weight of both together."""
    for one, two in zip(mine, other, strict=True):
        one.mul_(alpha / (alpha + beta)).add_(two, alpha=beta / (alpha + beta))
    return alpha + beta


def gossip(me: int, workers: Sequence[int], p: float) -> MakePeerExchange:
    def make(plan: Enlist, replica: Replica, recorder: Recorder, send: Send) -> Gossip:
        return Gossip(plan, replica, recorder, send, me=me, workers=workers, p=p)

    return make
