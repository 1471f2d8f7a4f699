"""All-reduce inside a team: every worker of it ends with the sum of the team's gradients, which the head pushes.

A. Mamidala et al., MXNet-MPI: Embedding MPI parallelism in Parameter Server Task Model for scaling Deep Learning, 2018:

    on worker i of a team, for each layer from the last down:
      g <- gradient of the layer;  g <- all-reduce of g over the team, in chunks around a ring
      i is the head:  push(layer, g, t)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch

from ringtmp.metrics.step_recorder import Recorder
from ringtmp.runtime.mailbox import Endpoint
from ringtmp.strategies.data_parallel.message_checks import PartScrutiny
from ringtmp.strategies.data_parallel.sum_over_workers import RingReduce, Sender
from ringtmp.strategies.ps.teams import Team
from ringtmp.wire.messages import Enlist


class TeamSums:
    def __init__(
        self, endpoint: Endpoint, plan: Enlist, team: Team, recorder: Recorder,
        *, lag: int, finished: Callable[[int, int, torch.Tensor], None],
    ) -> None:  # fmt: skip
        """`finished`: told step, layer and sum."""
        self._finished = finished
        self._layers = sum(size > 0 for size in plan.sizes)
        self._done: Counter[int] = Counter()  # by step: layers that are summed
        self._step = plan.step  # all before it are
        ring = RingReduce(Sender(endpoint, plan.wire, recorder), team, self._summed)
        self.start, self.part = ring.start, ring.part
        # Parameters come from the head, and may be there before the last chunk of the sums that they have in them.
        self.scrutiny = PartScrutiny(
            lambda sender, part: ring.due(sender, part, plan.sizes[part.bucket]),
            len(plan.sizes), plan.wire, lambda: self._step, ahead=1 + lag,
        )  # fmt: skip

    def _summed(self, step: int, layer: int, vector: torch.Tensor) -> None:
        self._done[step] += 1
        while self._done[self._step] == self._layers:
            del self._done[self._step]
            self._step += 1
        self._finished(step, layer, vector)
