"""Model averaging: every worker trains by itself, and every tau steps all go on from the mean of their parameters.

R. McDonald et al., Distributed Training Strategies for the Structured Perceptron, 2010; S. Stich, Local SGD Converges Fast and
Communicates Little, 2019.

    for t in 0, 1, 2, ...      on every worker m of n
      x <- share m of batch t
      w_m <- w_m - rate(t) gradient of the mean loss of x at w_m
      if t + 1 is a multiple of tau:  w_m <- mean over all workers of w

RingTMP has this one as `averaging`, which also heals without going back to the disk; here it is as short as it can be.
Departures: the optimizer of the run takes the place of plain descent, and what it remembers stays each worker's own. A
checkpoint between two means holds the mean of what the workers have; they go on with their own. A loss is healed from the
last checkpoint: what the lost worker had learnt since the last mean, nobody else has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from ringtmp.errors import UsageError
from ringtmp.strategies.base import (
    About,
    OnPaper,
    Plan,
    PlanRequest,
    Roles,
    Settings,
    Sizes,
    Strategy,
    Task,
    Traffic,
    described,
)

if TYPE_CHECKING:
    from ringtmp.runtime.mailbox import Endpoint
    from ringtmp.strategies.data_parallel.member import WorkerMember
    from ringtmp.wire.messages import Enlist


class MeansSettings(Settings, frozen=True):
    tau: Annotated[int, described("1 or more", "steps from one mean to the next")] = 8

    def __post_init__(self) -> None:
        if self.tau < 1:
            raise UsageError(f"tau={self.tau} must be at least 1")

    def check(self, nodes: int, wire: str) -> None:
        if wire != "float32":
            raise UsageError(f"local-means sends parameters, which {wire} would round every time: use --wire float32")


class LocalMeans(Strategy):
    name = "local-means"
    about = About(
        "Model averaging: every worker trains by itself, and every tau steps all go on from the mean",
        "data", "decentralised, one replica each", "synchronous every tau steps", "parameters", "ring of workers",
        "McDonald et al. 2010; Stich 2019",
    )  # fmt: skip
    Settings = MeansSettings
    short = "tau"

    def parse_short(self, text: str) -> dict[str, Any]:
        if not text.isdigit():
            raise UsageError(f"local-means:{text}: write local-means:8 for a mean every 8 steps")
        return {"tau": int(text)}

    def delayed(self, settings: MeansSettings) -> bool:
        """Between two means a worker knows nothing of what the others learn."""
        return settings.tau > 1

    def plan(self, request: PlanRequest) -> Plan:
        from ringtmp.strategies.data_parallel.plan import Pace, plan

        return plan(request, self, pace=Pace(alike=False))

    def worker(self, endpoint: Endpoint, plan: Enlist, settings: MeansSettings, roles: Roles) -> WorkerMember:
        from ringtmp.strategies.data_parallel.member import WorkerMember

        return WorkerMember(endpoint, plan, roles, make_exchange(settings.tau, len(roles.workers)))

    def simulate(self, settings: MeansSettings, task: Task) -> OnPaper:
        from ringtmp.strategies.data_parallel.simulate_sum_over_workers import simulate_sums
        from ringtmp.strategies.data_parallel.simulated_workers import Workload

        load = Workload.of(task)
        return OnPaper(simulate_sums(load, task.devices, task.paths, every=settings.tau), load.memory(task))

    def traffic(self, settings: MeansSettings, sizes: Sizes, nodes: int) -> Traffic:
        once = 2 * sizes.parameters * (nodes - 1) / settings.tau
        return Traffic(once, once / nodes)


def make_exchange(tau: int, n: int) -> Any:
    """What a worker does with its gradients. Here, so that nothing loads torch before a run needs it."""
    import torch

    from ringtmp.metrics.step_recorder import Recorder
    from ringtmp.runtime.clipping import total_norm
    from ringtmp.strategies.data_parallel.member import SummingExchange
    from ringtmp.strategies.data_parallel.replica import Replica
    from ringtmp.strategies.data_parallel.sum_over_workers import Summed, buckets

    class Means(SummingExchange):
        cause = "means"

        def __init__(self, plan: Enlist, replica: Replica, recorder: Recorder, start: Summed) -> None:
            self.step, self.rounds = plan.step, plan.step // tau
            self._plan, self._replica, self._recorder, self._start = plan, replica, recorder, start
            self._buckets = buckets(plan.sizes)
            self._missing = 0

        def ready(self, layer: int, step: int, training: bool) -> bool:
            return self.step >= step

        def gradient(self, layer: int, step: int, share: float, gradient: torch.Tensor) -> None:
            self._replica.give_gradients(layer, gradient.div_(share))  # of its own samples' mean loss
            if layer == 0:  # the backward pass is over
                self._update(step)

        def _update(self, step: int) -> None:
            started, norm, stages = self._recorder.begin(), None, self._replica.stages
            if self._plan.recipe.clip_norm is not None:
                norm = total_norm([norms for stage in stages for norms in stage.gradient_norms(step)])
            for layer, stage in enumerate(stages):
                if self._plan.sizes[layer]:
                    stage.step(step, norm)
            self._recorder.end(started, "update", 0, -1)
            if (step + 1) % tau or n == 1:
                self.step = step + 1
                return
            self._missing = len(self._buckets)
            for bucket, group in enumerate(self._buckets):
                self._start(self.rounds, bucket, torch.cat([self._replica.values[layer] for layer in group]) / n)

        def summed(self, round: int, bucket: int, vector: torch.Tensor) -> None:
            group = self._buckets[bucket]
            parts = torch.split(vector, [self._plan.sizes[layer] for layer in group])
            for layer, part in zip(group, parts, strict=True):
                self._replica.values[layer].copy_(part)
            self._missing -= 1
            if not self._missing:
                self.rounds += 1
                self.step = self.rounds * tau

    return Means


STRATEGY = LocalMeans()
