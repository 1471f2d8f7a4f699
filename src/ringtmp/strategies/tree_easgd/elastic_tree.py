"""Tree EASGD, the part of worker i.

    w_i <- the model
    for t in 1, 2, ...
      if t mod tau_up = 0:    send w_i to the worker above          (not the root)
      if t mod tau_down = 0:  send w_i to every worker below        (not a leaf)
      for every model w received from above or below:  w_i <- w_i + alpha (w - w_i)
      x <- share i of the next batch;  w_i <- w_i - rate gradient of the mean loss of x at w_i

    symbol             here
    tau_up, tau_down   the settings of these names, the same for every worker; infinite for the root, for leaves
    alpha              the setting alpha

Departures. The optimizer of the run takes the place of plain descent. t counts the run's steps from 1. What arrives while
layers are at work is put together as if it came one after another at the next step. The model of a run is the mean of all
workers'; a resumed run begins with it everywhere.

Lost worker: those below it turn to the nearest one above it that is there, and that one to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from ringtmp.metrics.step_recorder import Recorder
from ringtmp.strategies.data_parallel.own_updates import OwnUpdates
from ringtmp.strategies.data_parallel.peers import MakePeerExchange, Model, PeerExchange, Send
from ringtmp.strategies.data_parallel.replica import Replica
from ringtmp.strategies.data_parallel.worker_topologies import living_parent
from ringtmp.wire.messages import Enlist


class Intervals(Protocol):
    @property
    def tau_up(self) -> int: ...
    @property
    def tau_down(self) -> int: ...
    @property
    def alpha(self) -> float: ...


class ElasticTree(PeerExchange):
    cause = "neighbours"

    def __init__(
        self, plan: Enlist, replica: Replica, recorder: Recorder, send: Send,
        *, me: int, settings: Intervals, parents: Mapping[int, int],
    ) -> None:  # fmt: skip
        self.step = plan.step
        self._replica = replica
        self._send = send
        self._me = me
        self._settings = settings
        self._parents = parents
        self._lost: set[int] = set()
        self._own = OwnUpdates(plan, replica, recorder)
        self._received: tuple[float, Model] | None = None  # what is left of one's own model, and what is added to it

    def begin(self, fresh: bool) -> None:
        self._send_what_is_due()
        if self._received is not None:
            left, added = self._received
            for mine, more in zip(self._replica.values, added, strict=True):
                mine.mul_(left).add_(more)
            self._received = None

    def _send_what_is_due(self) -> None:
        above = living_parent(self._parents, self._me, self._lost)
        if above is not None and (self.step + 1) % self._settings.tau_up == 0:
            self._send(above, self.step, self._settings.alpha, self._replica.values)
        if (self.step + 1) % self._settings.tau_down == 0:
            for child in self._below():
                self._send(child, self.step, self._settings.alpha, self._replica.values)

    def _below(self) -> list[int]:
        there = [node for node in self._parents if node not in self._lost]
        return [node for node in there if living_parent(self._parents, node, self._lost) == self._me]

    def ready(self, layer: int, step: int, training: bool) -> bool:
        return self.step >= step

    def gradient(self, layer: int, step: int, share: float, gradient: torch.Tensor) -> None:
        if self._own.take(layer, share, gradient):
            self._own.make(step)
            self.step = step + 1

    def arrived(self, sender: int, step: int, weight: float, model: Model) -> None:
        """w <- (1 - alpha) w + alpha w_j, of whatever w will be by then."""
        alpha = self._settings.alpha
        left, added = self._received or (1.0, [torch.zeros_like(each) for each in model])
        for sum_, new in zip(added, model, strict=True):
            sum_.mul_(1 - alpha).add_(new, alpha=alpha)
        self._received = (left * (1 - alpha), added)

    def lose(self, node: int) -> None:
        self._lost.add(node)


def elastic_tree(me: int, settings: Intervals, parents: Mapping[int, int]) -> MakePeerExchange:
    def make(plan: Enlist, replica: Replica, recorder: Recorder, send: Send) -> ElasticTree:
        return ElasticTree(plan, replica, recorder, send, me=me, settings=settings, parents=parents)

    return make
