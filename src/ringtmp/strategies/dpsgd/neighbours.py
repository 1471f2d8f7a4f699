"""D-PSGD, the part of worker i.

    w_i <- the model
    for t in 0, 1, 2, ...
      send w_i to every neighbour
      x <- share i of batch t;  g <- gradient of the mean loss of x at w_i
      await w_j of step t from every neighbour j
      w_i <- sum over j of W_ij w_j - rate(t) g          (i among the j)

    symbol    here
    W         the mixing matrix: symmetric, rows and columns add up to 1; by default Metropolis weights of the graph, on a
              ring of three or more 1/3 for oneself and either neighbour
    rate      the learning rate of the run and its schedule (gamma in the paper, eta in the lecture)

Departures. The optimizer of the run takes the place of plain descent, with g, and works on the mixed model. The model of a
run is the mean of all workers' (the paper's too); a checkpoint holds that, and a resumed run begins with it everywhere. The
sum is taken in the order of node numbers, so every run gives the same bits.

On a complete graph all have the mean after one step with rate 0. W keeps the mean: it moves by minus the rate times the mean
of the workers' gradients, whatever the graph.

Lost worker: each of its neighbours adds its weight to that of its own model, so that W stays symmetric and doubly stochastic
among those who are left. In the step under way some may have counted it and others not. If they cannot reach each other any
more, all go back to the checkpoint and form a graph anew.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ringtmp.errors import ProtocolError
from ringtmp.metrics.step_recorder import Recorder
from ringtmp.strategies.data_parallel.own_updates import OwnUpdates
from ringtmp.strategies.data_parallel.peers import MakePeerExchange, Model, PeerExchange, Send
from ringtmp.strategies.data_parallel.replica import Replica
from ringtmp.wire.messages import Enlist


class Neighbours(PeerExchange):
    cause = "neighbours"

    def __init__(
        self, plan: Enlist, replica: Replica, recorder: Recorder, send: Send, *, me: int, row: Sequence[float]
    ) -> None:
        self.step = plan.step  # updates made
        self._replica = replica
        self._recorder = recorder
        self._send = send
        self._me = me
        self._weights = {node: weight for node, weight in enumerate(row) if weight or node == me}
        self._own = OwnUpdates(plan, replica, recorder)
        self._sent = self._computed = (
            plan.step - 1
        )  # the newest step of which the model was sent, the gradient is there
        self._models: dict[int, dict[int, Model]] = {}  # by step and sender
        self._next = {node: plan.step for node in self._weights if node != me}  # the step of which a model is due

    def ready(self, layer: int, step: int, training: bool) -> bool:
        if self.step < step:
            return False
        if training and self._sent < step:
            self._sent = step
            for node, weight in self._weights.items():
                if node != self._me:
                    self._send(node, step, weight, self._replica.values)
        return True

    def gradient(self, layer: int, step: int, share: float, gradient: torch.Tensor) -> None:
        if self._own.take(layer, share, gradient):
            self._computed = step
            self._mix_if_all_are_there()

    def arrived(self, sender: int, step: int, weight: float, model: Model) -> None:
        if step > self.step + 1:  # for its next step it needs this worker's model of the step before
            raise ProtocolError(f"sent its model of step {step} to a worker in step {self.step}")
        if step != self._next.get(sender):
            raise ProtocolError(f"sent its model of step {step}, and that of step {self._next.get(sender)} was due")
        self._next[sender] += 1
        self._models.setdefault(step, {})[sender] = model
        self._mix_if_all_are_there()

    def lose(self, node: int) -> None:
        self._weights[self._me] += self._weights.pop(node, 0.0)
        self._next.pop(node, None)
        for models in self._models.values():
            models.pop(node, None)
        self._mix_if_all_are_there()

    def _mix_if_all_are_there(self) -> None:
        models = self._models.get(self.step, {})
        if self._computed < self.step or any(node not in models for node in self._weights if node != self._me):
            return
        started = self._recorder.begin()
        self._models.pop(self.step, None)
        for layer, mine in enumerate(self._replica.values):
            mixed = torch.zeros_like(mine)
            for node in sorted(self._weights):
                mixed.add_(mine if node == self._me else models[node][layer], alpha=self._weights[node])
            mine.copy_(mixed)
        self._recorder.end(started, "update", 0, -1)
        self._own.make(self.step)
        self.step += 1


def neighbours(me: int, row: Sequence[float]) -> MakePeerExchange:
    def make(plan: Enlist, replica: Replica, recorder: Recorder, send: Send) -> Neighbours:
        return Neighbours(plan, replica, recorder, send, me=me, row=row)

    return make
