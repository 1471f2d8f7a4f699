"""GADMM, the part of worker n of N in the chain 0 - 1 - 2 - ... - N-1.

    theta_n <- the model;  lambda_m <- 0 for the edges m = (n-1, n) and (n, n+1) of this worker
    for k in 0, 1, 2, ...
      heads (n even):
        theta_n <- argmin of  f_n(theta) + <lambda_(n-1), theta_(n-1) - theta> + <lambda_n, theta - theta_(n+1)>
                              + rho/2 |theta_(n-1) - theta|^2 + rho/2 |theta - theta_(n+1)|^2      with the tails' models of k
        send theta_n to both neighbours
      tails (n odd):
        await both neighbours' new models;  theta_n <- argmin of the same, with them
        send theta_n to both neighbours
      all:  lambda_m <- lambda_m + rho (theta_m - theta_(m+1)) for each edge m of this worker

    symbol   here                                              symbol    here
    f_n      the loss of worker n's own samples, by its         rho       the setting rho
             share of all: the f_n add up to the mean loss     lambda    the duals, one for each edge, kept at both its ends
    N        the number of workers                             k         the step

A worker's samples are those whose number in the table leaves its rank as a remainder, the same in every step. The argmin takes
as many gradients of them as it needs (`passes` at most, in local_minimum.py); each but the first of a step begins with what the
last came to, so late steps need few.

Departures. The first worker is a head (the paper counts from 1). The paper solves quadratics in closed form and logistic
problems to the end; here both end at `tolerance`, and the next step goes on from there. Neighbours begin with the model that
all begin with. The model of a run is the mean of all workers', which are one when it has converged; a resumed run begins with
it and with duals of 0. Objectives must be convex for the theory; a network is trained too, without its promises. Local
penalties that have no gradient, as that of lasso, are not there.

Lost worker: its samples are gone from the sum, the chain is broken and duals mean nothing without it. The others go back to the
newest checkpoint, share out all samples anew and form a chain of those who are there, with duals of 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ringtmp.errors import ProtocolError
from ringtmp.metrics.step_recorder import Recorder
from ringtmp.strategies.data_parallel.peers import MakePeerExchange, Model, PeerExchange, Send
from ringtmp.strategies.data_parallel.replica import Replica
from ringtmp.strategies.gadmm import GadmmSettings
from ringtmp.strategies.gadmm.local_minimum import NOISE, Descent
from ringtmp.wire.messages import Enlist


class HeadOrTail(PeerExchange):
    cause = "neighbours"
    several_passes = True

    def __init__(
        self, plan: Enlist, replica: Replica, recorder: Recorder, send: Send,
        *, me: int, workers: Sequence[int], settings: GadmmSettings,
    ) -> None:  # fmt: skip
        self.step = plan.step
        self._replica = replica
        self._recorder = recorder
        self._send = send
        self._settings = settings
        rank = workers.index(me)
        self._head = rank % 2 == 0
        #: Neighbours, and the sign with which the dual of the edge to each counts here: its first end's is plus.
        self._sign = {workers[at]: sign for at, sign in ((rank - 1, -1.0), (rank + 1, 1.0)) if 0 <= at < len(workers)}
        self._models: dict[int, torch.Tensor] = {}  # theta of neighbours, the newest
        self._arrived = dict.fromkeys(self._sign, plan.step - 1)  # the step of which that is
        self._duals: dict[int, torch.Tensor] = {}  # empty before the first step
        self._duals_of = plan.step  # steps that they know of
        self._gradients: dict[int, torch.Tensor] = {}  # by layer, of the pass under way
        self._descent = Descent(settings.tolerance, settings.passes, settings.rho * len(self._sign))
        self._goes_on = False

    def ready(self, layer: int, step: int, training: bool) -> bool:
        if self.step < step:
            return False
        if not training or self._goes_on:
            return True
        if any(newest < step - self._head for newest in self._arrived.values()):
            return False
        if not self._duals:
            self._begin()
        if self._duals_of < step:  # a head hears of the tails' last models only now
            self._update_duals(step)
        return True

    def gradient(self, layer: int, step: int, share: float, gradient: torch.Tensor) -> None:
        self._gradients[layer] = gradient
        if layer:
            return
        started = self._recorder.begin()
        theta = self._theta()
        found = torch.cat([self._gradients[each] for each in range(len(self._replica.values))]).double()
        self._gradients.clear()
        noise = NOISE * float(found.norm())
        point, self._goes_on = self._descent.next(theta, found + self._pull(theta), noise)
        self._put(point.float())
        self._recorder.end(started, "update", 0, -1)
        if not self._goes_on:
            self._finish(step)

    def another_pass(self, step: int) -> bool:
        return self._goes_on

    def arrived(self, sender: int, step: int, weight: float, model: Model) -> None:
        due = self._arrived.get(sender, step) + 1
        if step != due:
            raise ProtocolError(f"sent its model of step {step}, and that of step {due} was due")
        self._arrived[sender] = step
        self._models[sender] = torch.cat(model).double()

    def lose(self, node: int) -> None:
        """Everyone goes back to the checkpoint."""

    def _begin(self) -> None:
        start = self._theta()
        self._models = {node: self._models.get(node, start) for node in self._sign}
        self._duals = {node: torch.zeros_like(start) for node in self._sign}

    def _pull(self, theta: torch.Tensor) -> torch.Tensor:
        """The gradient of what joins f_n."""
        total = torch.zeros_like(theta)
        for node, sign in self._sign.items():
            total.add_(self._duals[node], alpha=sign).add_(theta - self._models[node], alpha=self._settings.rho)
        return total

    def _finish(self, step: int) -> None:
        self._descent.rest()
        for node in self._sign:
            self._send(node, step, 1.0, self._replica.values)
        self.step = step + 1
        if not self._head:
            self._update_duals(self.step)

    def _update_duals(self, steps: int) -> None:
        theta = self._theta()
        for node, sign in self._sign.items():
            self._duals[node].add_(theta - self._models[node], alpha=sign * self._settings.rho)
        self._duals_of = steps

    def _theta(self) -> torch.Tensor:
        return torch.cat(self._replica.values).double()

    def _put(self, theta: torch.Tensor) -> None:
        sizes = [values.numel() for values in self._replica.values]
        for mine, values in zip(self._replica.values, torch.split(theta, sizes), strict=True):
            mine.copy_(values)


def heads_and_tails(me: int, workers: Sequence[int], settings: GadmmSettings) -> MakePeerExchange:
    def make(plan: Enlist, replica: Replica, recorder: Recorder, send: Send) -> HeadOrTail:
        return HeadOrTail(plan, replica, recorder, send, me=me, workers=workers, settings=settings)

    return make
