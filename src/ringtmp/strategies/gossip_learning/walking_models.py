"""Gossip learning, the part of worker i of n.

    last <- the model;  w <- the model
    loop
      for every model m received since w was sent:                  (onReceiveModel)
        w <- mu: the mean of m and the visitors in the cache        (createModelMU: update(merge(m, last)))
             rw: m                                                  (createModelRW: update(m))
        cache <- cache with m, without the oldest beyond its size
      x <- share i of the next batch;  w <- w - rate gradient of the mean loss of x at w           (update)
      every so many steps:  send w to another worker, chosen by chance                    (selectPeer, freshest)

    symbol       here                                         symbol   here
    Delta        the setting every, in steps                  w        the freshest model
    createModel  the setting create                           last     the newest visitor in the cache

With a cache of one visitor merging is the paper's: the mean of the visitor and the last one. A larger one merges with the
"limited cache of previous visitors" that J. Verbraeken et al. (2020, 3.4) describe.

Departures. A worker has a share of every batch, not one sample, and descends by the optimizer of the run, not by Pegasos at a
rate 1 / age: the optimizer's state stays where it is while models walk, and a model's age plays no part. A model learns at its
worker until it walks on, also when no visitor came; a visitor waits until it has, so that nothing learnt here is lost unsent.
createModelUM, which learns before it merges, would need two gradients of every sample. The paper predicts by a vote of a
second cache of fresh models, which for linear models is close to the mean of their weights; the model of a run is the mean of
all workers' freshest, and a resumed run begins with it everywhere, as last visitor too. Peers are all other workers. Chance is
a function of the run's seed, the worker and the step; what is still chance is when a model arrives.

With rate 0, mu leads all models to one; rw moves them from worker to worker and changes none, bit for bit.

Lost worker: nobody waits for it, and nobody sends to it. The model that was there is gone, but for its traces in other
workers' caches; a model on its way to it is gone from there and goes on learning where it came from.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

import torch

from ringtmp.metrics.step_recorder import Recorder
from ringtmp.strategies.data_parallel.own_updates import OwnUpdates
from ringtmp.strategies.data_parallel.peers import MakePeerExchange, Model, PeerExchange, Send
from ringtmp.strategies.data_parallel.replica import Replica
from ringtmp.strategies.gossip_learning import GossipLearningSettings
from ringtmp.wire.messages import Enlist


class Visitors:
    """The newest models that came by, and what becomes of the next one."""

    def __init__(self, first: Model, cache: int, merges: bool) -> None:
        self._merges = merges
        self._cache: deque[Model] = deque([first], maxlen=cache)

    def welcome(self, visitor: Model) -> Model:
        """createModel, before it learns. The visitor is remembered as it came."""
        created = merge([visitor, *self._cache]) if self._merges else [each.clone() for each in visitor]
        self._cache.append(visitor)
        return created


class WalkingModels(PeerExchange):
    cause = "gossip"

    def __init__(
        self, plan: Enlist, replica: Replica, recorder: Recorder, send: Send,
        *, me: int, workers: Sequence[int], settings: GossipLearningSettings,
    ) -> None:  # fmt: skip
        self.step = plan.step
        self._replica = replica
        self._send = send
        self._me = me
        self._others = [node for node in workers if node != me]
        self._settings = settings
        self._seed = plan.recipe.seed
        self._own = OwnUpdates(plan, replica, recorder)
        self._visitors: Visitors | None = None  # none before the first step, when the model is there
        self._early: list[Model] = []  # came before that
        self._created: Model | None = None  # of the newest visitor
        self._walked_on = True  # the model that was here

    def begin(self, fresh: bool) -> None:
        if self._visitors is None:
            first = [values.clone() for values in self._replica.values]
            self._visitors = Visitors(first, self._settings.cache, self._settings.create == "mu")
            for model in self._early:
                self._created = self._visitors.welcome(model)
            self._early = []
        if self._walked_on and self._created is not None:
            for mine, values in zip(self._replica.values, self._created, strict=True):
                mine.copy_(values)
            self._created, self._walked_on = None, False

    def ready(self, layer: int, step: int, training: bool) -> bool:
        return self.step >= step

    def gradient(self, layer: int, step: int, share: float, gradient: torch.Tensor) -> None:
        if not self._own.take(layer, share, gradient):
            return
        self._own.make(step)
        self.step = step + 1
        if self._others and self.step % self._settings.every == 0:
            chance = random.Random(f"{self._seed} {self._me} {step}")
            self._send(chance.choice(self._others), step, 1.0, self._replica.values)
            self._walked_on = True

    def arrived(self, sender: int, step: int, weight: float, model: Model) -> None:
        if self._visitors is None:
            self._early.append(model)
        else:
            self._created = self._visitors.welcome(model)

    def lose(self, node: int) -> None:
        self._others = [each for each in self._others if each != node]


def merge(models: Sequence[Model]) -> Model:
    """The mean of them, a new one."""
    return [torch.stack(list(layers)).mean(0) for layers in zip(*models, strict=True)]


def walking_models(me: int, workers: Sequence[int], settings: GossipLearningSettings) -> MakePeerExchange:
    def make(plan: Enlist, replica: Replica, recorder: Recorder, send: Send) -> WalkingModels:
        return WalkingModels(plan, replica, recorder, send, me=me, workers=workers, settings=settings)

    return make
