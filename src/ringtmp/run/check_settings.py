"""A run's settings checked together and complete, before anything starts.

`resolve` fills in every default, so that the run directory holds what was really used.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ringtmp.config import (
    DEFAULT_EPOCHS,
    SETTINGS,
    RingPart,
    RunConfig,
    TrainingPart,
    checked,
    merge_for_resume,
    replaced,
    usual_microbatches,
    value_of,
)
from ringtmp.errors import UsageError
from ringtmp.model.adapter_folder import lora_of
from ringtmp.model.frozen_formats import FROZEN_AS
from ringtmp.model.lora import lora_text
from ringtmp.plan.microbatches import MOST
from ringtmp.plan.node_groups import (
    ANY_GROUPS,
    EXACT_SUMS,
    check_groups,
    check_late_groups,
    parse_groups,
    parse_sums,
)
from ringtmp.plan.pipeline_schedules import AUTO, DEFAULT_SCHEDULE, SCHEDULES
from ringtmp.plan.sum_tree import check_parts, check_workers
from ringtmp.runtime.learning_rates import checked_schedule
from ringtmp.runtime.optimizers import ELSEWHERE, OPTIMIZERS, checked_optimizer
from ringtmp.strategies import registry
from ringtmp.strategies.base import Strategy
from ringtmp.wire.formats import PLAIN, wire_format

#: What lets a run choose how it is trained; once it has chosen there is nothing left to choose.
CHOOSING = ("strategy", "share_data", "any_bits")


def resolve(config: RunConfig) -> RunConfig:
    """The same settings with defaults filled in. Refuses what cannot be."""
    config = checked(config)
    config = registry.parse(config.ring.strategy).applied_to(config)
    training, ring = config.training, config.ring
    strategy, settings = registry.of(ring)
    settings.check(ring.nodes, training.wire)
    strategy.refuse_wire(training.wire)
    _check_split_only(config, strategy.splits_layers)
    _check_leave(ring, strategy)
    _check_homes(training, ring, strategy)
    if ring.route == "v" and ring.laps > 1:
        raise UsageError("--route v cannot be combined with --laps")
    if training.epochs is not None and training.steps is not None:
        raise UsageError("give --epochs or --steps, not both")
    checked_schedule(training.lr_schedule, total_steps=1)  # the real total is known with the data
    auto = training.microbatches == "auto"
    if auto and not strategy.splits_layers:
        raise UsageError(
            f"--microbatches auto works with --strategy {registry.splitting_layers()} only: give a number with {ring.strategy}"
        )
    microbatches = usual_microbatches(training)
    check_parts(training.sum_tree, min(MOST, training.batch_size) if auto else microbatches)
    all_first = ring.schedule != AUTO and SCHEDULES[ring.schedule].all_forward_first
    if all_first and ring.window is not None and ring.window < microbatches and not auto:
        raise UsageError(
            f"--window {ring.window} is too small for {ring.schedule}, which keeps all {microbatches} microbatches in flight: "
            f"leave it out, or use --schedule {DEFAULT_SCHEDULE.name}"
        )
    roles = strategy.roles(settings, ring.nodes)
    optimizer_settings = checked_optimizer(training.optimizer, training.optimizer_settings)
    if roles.servers and OPTIMIZERS[training.optimizer].matrices is not None:
        raise UsageError(
            f"--optimizer {training.optimizer} needs whole matrices, and {ring.strategy} cuts parameters into ranges for its "
            f"servers: use a strategy without servers, such as {registry.splitting_layers()}, or --optimizer {ELSEWHERE}"
        )
    workers = len(roles.workers)
    if not strategy.splits_layers and strategy.shares_batches:
        _check_fed(workers, microbatches, training.batch_size)
    if ring.groups is not None or ring.group_sums != EXACT_SUMS:
        _check_groups(ring, training, microbatches)
    if training.compile:
        ring = _compiled(ring, training)
    if ring.share_optimizer:
        _check_shared_state(config)
    if training.sum_tree > 1:
        _check_tree(strategy, settings, training, ring, workers)
    lora = training.lora
    if training.adapter is not None and lora is None:  # kept beside it: the folder may be gone when the run is exported
        lora = lora_text(lora_of(Path(training.adapter)))
    training = msgspec.structs.replace(
        training,
        lora=lora,
        epochs=training.epochs if training.steps or training.epochs else DEFAULT_EPOCHS,
        microbatches="auto" if auto else microbatches,
        optimizer_settings=optimizer_settings,
    )
    return msgspec.structs.replace(config, training=training, ring=ring)


def resumed(saved: RunConfig, given: Mapping[str, Any]) -> RunConfig:
    """What a run goes on with: its own settings, but for what is given by field name."""
    if isinstance(given.get("strategy"), str) and registry.get(given["strategy"].partition(":")[0]).chooses:
        kept = (*CHOOSING, "nodes") if saved.ring.nodes == 1 else CHOOSING  # the master's device alone is a choice, too
        given = {key: value for key, value in given.items() if key not in kept}
    elif isinstance(given.get("strategy"), str):
        choice = registry.parse(given["strategy"])
        settings = {**choice.settings, **given.get("strategy_settings", {})}
        given = {**given, **choice.run, "strategy": choice.name, "strategy_settings": settings}
    anew = given.get("strategy_settings", {})
    if anew and saved.training.sum_tree == 1 and given.get("strategy", saved.ring.strategy) == saved.ring.strategy:
        free = registry.get(saved.ring.strategy).order_of_sums
        anew = {key: value for key, value in anew.items() if key in free}
        saved = replaced(saved, {"strategy_settings": {**saved.ring.strategy_settings, **anew}})
    return resolve(merge_for_resume(saved, given))


def _check_fed(workers: int, microbatches: int, batch_size: int) -> None:
    if microbatches < workers:
        raise UsageError(
            f"{microbatches} microbatches cannot feed {workers} workers: use --microbatches {workers} or more"
            + ("" if batch_size >= workers else f", and a --batch-size of at least {workers}")
        )


def _check_leave(ring: RingPart, strategy: Strategy) -> None:
    """Refuse leave that nobody asked for, and what a choice could not keep."""
    auto, plain = f"--strategy {registry.AUTO.name}", RingPart()
    if strategy.chooses:
        by_hand = [SETTINGS[each] for each in ("cuts", "laps", "route") if getattr(ring, each) != getattr(plain, each)]
        if by_hand:
            raise UsageError(
                f"{auto} cannot keep {by_hand[0].option}, which only a ring has: leave it out, or use --strategy "
                f"{registry.splitting_layers()}"
            )
    elif ring.share_data and strategy.keeps_data:
        raise UsageError(
            f"--share-data is not needed: with --strategy {ring.strategy} inputs and labels stay on the master. It goes with "
            f"{auto}"
        )
    elif ring.any_bits:
        raise UsageError(f"--any-bits goes with {auto}, which it lets choose: leave it out with {ring.strategy}")


def _check_homes(training: TrainingPart, ring: RingPart, strategy: Strategy) -> None:
    """Refuse settings of two homes where there is one, and what two homes cannot keep."""
    names = ("outer_lr", "outer_momentum", "home_alone", "home_wait_s")
    if ring.local_steps is None:
        changed = [SETTINGS[each].option for each in names if getattr(ring, each) != getattr(RingPart(), each)]
        if changed:
            raise UsageError(f"{changed[0]} goes with --local-steps, the steps between two exchanges with another home")
        return
    option = f"--local-steps {ring.local_steps}"
    if strategy.chooses or not strategy.splits_layers:
        raise UsageError(
            f"{option} works with --strategy {registry.splitting_layers()} only: a home is a whole ring, not {ring.strategy}"
        )
    if training.staleness:
        raise UsageError(f"{option} cannot be combined with --staleness 1: leave that out")
    if training.early_stop is not None:
        raise UsageError(f"{option} cannot be combined with --early-stop: the homes would not stop at the same step")


def _check_groups(ring: RingPart, training: TrainingPart, microbatches: int) -> None:
    if late := parse_sums(ring.group_sums):
        _check_late(ring, training, late, microbatches)
    assert ring.groups is not None
    if ring.groups != ANY_GROUPS:
        check_groups(parse_groups(ring.groups), ring.nodes, None if late else training.sum_tree)
    elif training.sum_tree == 1:
        raise UsageError(
            f"--groups {ANY_GROUPS} needs --sum-tree, without which groups would change the bits: use --sum-tree 4, say, for "
            "up to 4 nodes a stage"
        )
    elif ring.cuts is not None:
        raise UsageError(f"--groups {ANY_GROUPS} chooses the cuts too: leave out --cuts, or give --groups 2,2, say")
    if ring.laps > 1 or ring.route != RingPart().route or training.staleness:
        raise UsageError(f"--groups {ring.groups} cannot be combined with --laps, --route v or --staleness 1 yet")


def _check_late(ring: RingPart, training: TrainingPart, late: int, microbatches: int) -> None:
    """Refuse what members that do not wait for each other cannot keep."""
    text = f"--group-sums {ring.group_sums}"
    if ring.groups in (None, ANY_GROUPS):
        raise UsageError(f"{text} is for groups given by hand: use it with --groups 2,2, say, or leave it out")
    if registry.get(ring.strategy).chooses:
        raise UsageError(f"{text} is no way that --strategy {ring.strategy} considers: use it with --strategy ring")
    if ring.share_optimizer:
        raise UsageError(
            f"{text} cannot be combined with --share-optimizer: each member updates all of its stage by itself. Leave one of "
            "them out"
        )
    if training.clip_norm is not None:
        raise UsageError(f"{text} cannot be combined with --clip-norm: nobody waits until the whole gradient is known")
    if training.microbatches == "auto":
        raise UsageError(f"{text} cannot be combined with --microbatches auto: give a number")
    check_late_groups(parse_groups(ring.groups or ""), late, training.sum_tree, microbatches)


def _compiled(ring: RingPart, training: TrainingPart) -> RingPart:
    """What a compiled layer cannot do is refused, and not chosen."""
    if ring.schedule != AUTO and SCHEDULES[ring.schedule].defers_weights:
        raise UsageError(
            f"--schedule {ring.schedule} takes backward passes apart, and --compile makes one piece of them: leave one of them "
            f"out, or use --schedule {DEFAULT_SCHEDULE.name}"
        )
    if FROZEN_AS[training.frozen_as].small:
        raise UsageError(
            f"--frozen-as {training.frozen_as} converts weights where operators use them, which --compile hides: leave one of "
            "them out"
        )
    return msgspec.structs.replace(ring, schedule=DEFAULT_SCHEDULE.name if ring.schedule == AUTO else ring.schedule)


def _check_shared_state(config: RunConfig) -> None:
    if config.ring.groups is None:
        raise UsageError(
            "--share-optimizer is for stages that several nodes hold: use it with --groups 2,2, say, or leave it out"
        )


def _check_tree(strategy: Strategy, settings: Any, training: TrainingPart, ring: RingPart, workers: int) -> None:
    """Refuse a tree of sums where it would keep no bits."""
    if not strategy.sums_by_tree(settings):
        given = registry.spelled(registry.Choice(ring.strategy, ring.strategy_settings))
        raise UsageError(
            f"--sum-tree {training.sum_tree} keeps the bits of one process, which {given} cannot: use --strategy "
            f"{registry.keeping_bits_by_tree()}, or leave --sum-tree out"
        )
    if not strategy.splits_layers:
        check_workers(training.sum_tree, workers, "workers")
        if not wire_format(training.wire).exact:
            raise UsageError(
                f"--sum-tree {training.sum_tree} keeps the bits of one process, which --wire {training.wire} rounds away "
                f"with {ring.strategy}: use --wire {PLAIN.name}, or leave --sum-tree out"
            )


def _check_split_only(config: RunConfig, splits_layers: bool) -> None:
    """Refuse settings that mean nothing where every worker holds the whole model."""
    for setting in SETTINGS.values():
        if not splits_layers and setting.said.split and value_of(config, setting.name) != setting.default:
            raise UsageError(
                f"{setting.option} works with --strategy {registry.splitting_layers()} only: with "
                f"{config.ring.strategy}, every worker holds the whole model"
            )
