"""Bagging, the part of worker i of n.

    w_i <- the model
    loop
      x <- the samples of the next batch that are in bag i, as often as they are in it
      w_i <- w_i - rate gradient of the mean loss of x at w_i
      when asked:  send what w_i predicts

    symbol    here                            bag i     shard: samples whose number leaves rank i as a remainder by n
    w_i       worker i's replica                        bootstrap: sample j k_ij times, k_ij Poisson of mean 1
    n         the number of workers           L^(B)     the learning set of the B-th bootstrap: bag i

Departures. A bootstrap of N out of N samples has each of them Binomial(N, 1/N) times; the Poisson count is its limit, and can
be drawn for a sample by itself (Oza and Russell 2001), so a stream can be bagged too. Members begin with the same weights and
differ by their data (and by dropout), not by their first weights. Members go through the run's batches together, so a
batch's share of a shard is smaller than the batch; the learning rate is the run's.

Lost worker: nobody waits for it, and the others are the ensemble. Its samples are in nobody else's shard. In a new generation
(a worker has joined, a resumed run) worker k goes on with member k of the checkpoint; those there are too few members for
begin with a copy of another one, and shards are dealt anew.
"""

from __future__ import annotations

import torch

from ringtmp.errors import ProtocolError
from ringtmp.metrics.step_recorder import Recorder
from ringtmp.strategies.data_parallel.own_updates import OwnUpdates
from ringtmp.strategies.data_parallel.peers import Model, PeerExchange
from ringtmp.strategies.data_parallel.replica import Replica
from ringtmp.wire.messages import Enlist


class OwnTraining(PeerExchange):
    cause = "work"
    predicts = True

    def __init__(self, plan: Enlist, replica: Replica, recorder: Recorder) -> None:
        self._own = OwnUpdates(plan, replica, recorder)

    def ready(self, layer: int, step: int, training: bool) -> bool:
        return True

    def gradient(self, layer: int, step: int, share: float, gradient: torch.Tensor) -> None:
        if self._own.take(layer, share, gradient):
            self._own.make(step)

    def arrived(self, sender: int, step: int, weight: float, model: Model) -> None:
        raise ProtocolError("sent its model, and members of an ensemble keep theirs")

    def lose(self, node: int) -> None:
        return
