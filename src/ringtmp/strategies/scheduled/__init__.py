"""STRADS: a schedule picks the weights that matter most and disturb each other least, and only those are updated in a step.

J. K. Kim, Q. Ho, S. Lee, X. Zheng, W. Dai, G. A. Gibson, E. P. Xing, STRADS: A Distributed Framework for Scheduled Model
Parallel Machine Learning, EuroSys 2016; S. Lee et al., On Model Parallelization and Scheduling Strategies for Distributed
Machine Learning, NIPS 2014. The role is in scheduled_weights.py, what is picked in schedule.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from ringtmp.errors import UsageError
from ringtmp.strategies.base import (
    About,
    OnPaper,
    Plan,
    PlanRequest,
    Roles,
    Runs,
    Settings,
    Sizes,
    Strategy,
    Task,
    Traffic,
    described,
)
from ringtmp.strategies.data_parallel.checked_settings import refuse_outside
from ringtmp.wire.formats import wire_format

if TYPE_CHECKING:
    from ringtmp.model.portable_layer import Layer
    from ringtmp.runtime.mailbox import Endpoint
    from ringtmp.strategies.data_parallel.member import WorkerMember
    from ringtmp.wire.messages import Enlist

MOST_CANDIDATES = 1 << 16
#: Their products with each other travel, too: the square of their number.
MOST_COMPARED = 1024


class ScheduledSettings(Settings, frozen=True):
    candidates: Annotated[int, described(
        f"1 to {MOST_CANDIDATES}; to {MOST_COMPARED} where independence is below 1",
        "weights that are drawn in a step, by how much they last changed", "Lee et al. 2014: U'")] = 32  # fmt: skip
    independence: Annotated[float, described(
        "0 to 1", "of those drawn, two are updated together only if the cosine of their inputs is at most this; 1: all are",
        "Lee et al. 2014: rho = 0.1")] = 0.1  # fmt: skip
    l1: Annotated[float, described(
        "0 or more", "what the sum of all absolute weights is multiplied with before it joins the loss; biases are free",
        "lasso: lambda")] = 0.0  # fmt: skip
    rate: Annotated[float, described(
        "above 0, to 2", "a weight moves by this times its gradient over the mean square of its input; 0.5 is the minimum "
        "along it for mse of one output and safe for cross_entropy")] = 0.5  # fmt: skip
    eta: Annotated[float, described(
        "above 0", "joins the last change of a weight, so that one that did not change is drawn again some time",
        "Lee et al. 2014: a small constant")] = 1e-3  # fmt: skip

    def __post_init__(self) -> None:
        if not 1 <= self.candidates <= MOST_CANDIDATES:
            raise UsageError(f"candidates={self.candidates} must be from 1 to {MOST_CANDIDATES}")
        refuse_outside("independence", self.independence, 0.0, 1.0)
        if self.compares and self.candidates > MOST_COMPARED:
            raise UsageError(
                f"candidates={self.candidates} must be from 1 to {MOST_COMPARED} with independence={self.independence:g}: "
                "as many squared travel in every step"
            )
        if not 0 <= self.l1 < math.inf:
            raise UsageError(f"l1={self.l1:g} must be a finite number of at least 0")
        if not 0 < self.rate <= 2:
            raise UsageError(f"rate={self.rate:g} must be above 0 and at most 2")
        if not 0 < self.eta < math.inf:
            raise UsageError(f"eta={self.eta:g} must be a finite number above 0")

    def check(self, nodes: int, wire: str) -> None:
        if not wire_format(wire).exact:
            raise UsageError(
                f"scheduled sends products that decide what is updated, which {wire} rounds: use --wire float32"
            )

    @property
    def compares(self) -> bool:
        return self.independence < 1

    def values(self, parameters: float) -> float:
        """That are summed over all workers in a step: gradients, mean squares, and products of any two."""
        drawn = min(self.candidates, parameters)
        return 2 * drawn + drawn * drawn * self.compares


class Scheduled(Strategy):
    name = "scheduled"
    about = About(
        "STRADS: only weights are updated that matter most and disturb each other least",
        "data, and weights by turns", "centralised, replicated in every worker", "synchronous, scheduled",
        "gradients and products of scheduled weights", "ring of workers", "Kim et al. 2016",
    )  # fmt: skip
    runs = (
        Runs("STRADS", "scheduled:l1=0.01", lacks="schedulers of their own; matrix factorisation and topic models"),
    )
    Settings = ScheduledSettings
    short = "candidates"
    short_number = "32 for 32 weights that are drawn in a step"
    full_batch = True
    state_from = "survivors"

    def plan(self, request: PlanRequest) -> Plan:
        from ringtmp.strategies.data_parallel.plan import plan

        refuse_other_layers(request.layers)
        if request.config.training.clip_norm is not None:
            raise UsageError("--clip-norm needs all gradients, and scheduled sums a few: leave it out")
        unused = "scheduled moves each weight by its own curvature: --optimizer and --lr play no part"
        return plan(request, self, warnings=(unused,))

    def worker(self, endpoint: Endpoint, plan: Enlist, settings: ScheduledSettings, roles: Roles) -> WorkerMember:
        from functools import partial

        from ringtmp.strategies.data_parallel.member import WorkerMember
        from ringtmp.strategies.scheduled.scheduled_weights import ScheduledWeights

        values = int(settings.values(sum(plan.sizes)))
        make = partial(ScheduledWeights, settings=settings)
        return WorkerMember(endpoint, plan, roles, make, hands_over=True, sizes=[values])

    def simulate(self, settings: ScheduledSettings, task: Task) -> OnPaper:
        """As a sum over all workers of so many values."""
        from ringtmp.strategies.data_parallel.simulate_sum_over_workers import simulate_sums
        from ringtmp.strategies.data_parallel.simulated_workers import Workload

        load = Workload.of(task)
        whole = sum(layer.gradient_bytes for layer in task.layers)
        few = replace(load, wire_ratio=load.wire_ratio * 4 * settings.values(whole / 4) / max(whole, 1))
        return OnPaper(simulate_sums(few, task.devices, task.paths), load.memory(task, vectors=VECTORS))

    def traffic(self, settings: ScheduledSettings, sizes: Sizes, nodes: int) -> Traffic:
        total = 2 * (nodes - 1) * settings.values(sizes.parameters)
        return Traffic(total, total / nodes)


#: Of the model's size in float32, at a worker: where each weight lies and what it is multiplied with, four whole numbers of 64
#: bits, and its importance in float64.
VECTORS = 10


def refuse_other_layers(layers: Sequence[Layer]) -> None:
    """UsageError unless everything that is trained is the matrix of a linear layer or its bias."""
    for layer in layers:
        shapes = {layer.full_name(each): each.shape for each in layer.tensors if each.trainable}
        matrices = [shape for shape in shapes.values() if len(shape) == 2]
        biases = [shape for shape in shapes.values() if len(shape) == 1]
        linear = len(matrices) == 1 and len(biases) <= 1 and len(matrices) + len(biases) == len(shapes)
        if shapes and not (linear and all(bias[0] == matrices[0][0] for bias in biases)):
            found = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
            raise UsageError(
                f"scheduled draws weights of linear layers, each with one matrix and at most one bias; layer {layer.name} has "
                f"{found}: train it with another strategy"
            )


STRATEGY = Scheduled()
