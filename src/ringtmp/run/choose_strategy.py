"""`--strategy auto` for a run and for a plan on paper: the same choice for the layers and devices that are there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ringtmp.config import RunConfig, replaced
from ringtmp.launch.node_pool import NodePool
from ringtmp.model.running_statistics import changes_statistics
from ringtmp.plan.devices import Device
from ringtmp.run import measure_model
from ringtmp.run.check_settings import resolve
from ringtmp.run.measure_model import Work, why_unshared
from ringtmp.strategies.auto.choose import Choice, Question, Way, choose
from ringtmp.strategies.auto.tell_why import why
from ringtmp.strategies.base import PlanRequest

STRATEGY_CHOSEN = "strategy_chosen"


def best_way(request: PlanRequest, pool: NodePool) -> tuple[Way, dict[str, Any]]:
    """And what the run's record says of it."""
    question = Question(
        request.config, request.index.costs, request.devices, request.batch_size, request.microbatches, request.keep_all,
        resolve, paths=request.paths, alone=None if request.config.ring.all_devices else pool.alone(),
        in_order=changes_statistics(request.layers), unshared=why_unshared(request.layers),
    )  # fmt: skip
    made = choose(question)
    considered = [msgspec.to_builtins(each.considered) for each in made.ways]
    return made.best, {STRATEGY_CHOSEN: why(made, request.config.ring.minimise), "considered": considered}


@dataclass(frozen=True)
class ChosenOnPaper:
    choice: Choice
    why: str
    ring: Way  # the best that splits the layers, which a plan draws


def on_paper(
    config: RunConfig, work: Work, devices: Sequence[Device], keep_all: bool, alone: Device | None
) -> ChosenOnPaper:
    """`alone` as in a question. With `--microbatches auto` their number is that of the best ring, as in a run."""
    count = work.microbatches
    if config.training.microbatches == "auto":
        count = measure_model.plan(config, work, devices, keep_all).options.ring.microbatches
        config = replaced(config, {"microbatches": count})
    made = choose(
        Question(
            config, work.model.costs, tuple(devices), work.batch_size, count, keep_all, resolve, alone=alone,
            in_order=work.model.in_order, unshared=work.model.unshared,
        )
    )  # fmt: skip
    split = [each for each in made.ways if each.fits and not each.needs and each.strategy.splits_layers]
    open_ = [each for each in split if alone is not None or not each.alone]
    ring = made.best if made.best.strategy.splits_layers else min(open_, key=lambda each: each.cost)
    return ChosenOnPaper(made, why(made, config.ring.minimise), ring)
