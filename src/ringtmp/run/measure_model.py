"""Layers built and measured, one at a time: what a plan on paper and the plan of a run both stand on.

Measuring runs every kind of layer a few times at the run's microbatch size, with the thread count of the run; what was
measured before comes from the cache, whoever measured it. So a plan made before a run is the run's plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ringtmp.config import RunConfig, TrainingPart, usual_microbatches
from ringtmp.data.batches import TrainingBatches
from ringtmp.data.drop_unused_inputs import leave_out, names_of
from ringtmp.data.nested_inputs import names
from ringtmp.data.sample_or_batch import LABELS
from ringtmp.data.tables_and_streams import Source, Stream, with_loss
from ringtmp.errors import UsageError
from ringtmp.model.analyse_graph import Fact
from ringtmp.model.blocks import patterns_of
from ringtmp.model.build import BuiltLayer, Known, build_layers
from ringtmp.model.build_cells import Cutting
from ringtmp.model.compute_formats import going_forward
from ringtmp.model.frozen_formats import FROZEN_AS
from ringtmp.model.layers import Model
from ringtmp.model.matrices_for_muon import hidden_matrices
from ringtmp.model.output_tree import leaves_of
from ringtmp.model.portable_layer import Layer
from ringtmp.model.prepare_weights import Preparation
from ringtmp.model.profile import PROCESSOR, ProfileCache, Profiler, Where
from ringtmp.model.running_statistics import changes_statistics
from ringtmp.plan import microbatches as counts
from ringtmp.plan.choose_schedule import plan_with_schedule
from ringtmp.plan.devices import Device, LayerCost
from ringtmp.plan.planner import Plan
from ringtmp.runtime import compute_device
from ringtmp.runtime.losses import LOSSES, LossFunction, check_loss, loss_named
from ringtmp.runtime.optimizers import ELSEWHERE, OPTIMIZERS, make_optimizer
from ringtmp.strategies.data_parallel.plan import refuse_unshared
from ringtmp.strategies.ring.plan import options_on_paper
from ringtmp.system.resources import set_threads
from ringtmp.wire.message_parts import FREE, Crossing


@dataclass(frozen=True)
class Reading:
    """How a model is read: for which microbatches, and under which settings it is measured."""

    training: TrainingPart
    loss: LossFunction
    loss_name: str
    sizes: list[int]  # of the microbatches to come
    measured: list[int]  # those whose cost the plan wants to know
    #: Sizes that are measured besides, to tell what other numbers of microbatches would cost.
    others: tuple[int, ...] = ()
    #: Patterns of the names of modules between which alone the model is cut.
    blocks: tuple[str, ...] = ()
    preparation: Preparation | None = None

    @staticmethod
    def of(config: RunConfig, batches: TrainingBatches, batch_size: int, loss: tuple[LossFunction, str]) -> Reading:
        training = config.training
        auto, usual = training.microbatches == "auto", usual_microbatches(training)
        sizes, measured = counts.to_build(batches.sizes(), batch_size, usual, auto)
        return Reading(
            training,
            *loss,
            sizes,
            measured,
            blocks=patterns_of(config.ring.blocks),
            preparation=Preparation.of(
                training.weights, training.lora, training.train, FROZEN_AS[training.frozen_as], training.adapter
            ),
        )


@dataclass(frozen=True)
class MeasuredModel:
    costs: tuple[LayerCost, ...]
    costs_at_all_sizes: tuple[LayerCost, ...]
    entering: tuple[Crossing, ...]  # the first layer
    leaving: tuple[tuple[Crossing, ...], ...]  # each layer
    least_microbatch: int  # samples the model needs at least
    checked: str
    input_names: tuple[str, ...]
    evaluated: tuple[tuple[Crossing, ...], ...] = ()  # each cell, in evaluation; empty: as in training
    unshared: str = ""  # why no two nodes may hold the same of its layers
    in_order: bool = False  # its running statistics go by the order in which microbatches pass
    state: tuple[tuple[str, str], ...] = ()  # the names in the model's state_dict, where it is no list of layers


def measure(
    model: Model,
    train: Source,
    how: Reading,
    phase: Callable[[str], None],
    *,
    take: Callable[[int, BuiltLayer], None] = lambda index, built: None,
    known: Known = lambda has_parameters, why: None,
    folder: Path | None = None,
) -> MeasuredModel:
    """One layer at a time: the whole model is never in memory. `take` gets each before the next is built; `known` is told
    of the layers before the first is read, if they can be known, and why a module was not cut into more."""
    with going_forward(how.training.compute):  # as the nodes will
        return _measured(model, train, how, phase, take=take, known=known, folder=folder)


def _measured(
    model: Model,
    train: Source,
    how: Reading,
    phase: Callable[[str], None],
    *,
    take: Callable[[int, BuiltLayer], None],
    known: Known,
    folder: Path | None,
) -> MeasuredModel:
    def sample(count: int) -> Any:
        return train.example(count)[0]

    training, sizes = how.training, sorted({*how.sizes, *how.others})
    optimizer, settings = training.optimizer, training.optimizer_settings
    profiler = Profiler(
        sample(sizes[-1]), sorted({*how.measured, *how.others}), training.threads or 1,
        lambda parameters, matrices: make_optimizer(optimizer, settings, parameters, matrices),
        optimizer_name=f"{optimizer} {sorted(settings.items())} {training.compute}", cache=ProfileCache(),
        where=_where(training.compute),
    )  # fmt: skip
    costs: list[LayerCost] = []
    leaving: list[tuple[Crossing, ...]] = []
    evaluated: list[tuple[Crossing, ...]] = []
    outputs, one_sample, checked, matrices, in_order, unshared = None, True, "", 0, False, ""
    state: tuple[tuple[str, str], ...] = ()
    cutting = _cutting(how, names(sample(1)))
    built_layers = build_layers(
        model, training.seed, sample, sizes, known, cutting=cutting, phase=phase, folder=folder,
        preparation=how.preparation,
    )  # fmt: skip
    for index, built in enumerate(built_layers):
        take(index, built)
        costs.append(profiler.cost(built))
        in_order, unshared = in_order or changes_statistics([built.layer]), unshared or why_unshared([built.layer])
        matrices += len(hidden_matrices(built.layer))
        if built.cell is None:
            leaving.append(_crossings(built.sample_outputs, sizes[-1]))
        else:
            leaving.append(tuple(map(described, built.cell.trained)))
            evaluated.append(tuple(map(described, built.cell.evaluated)))
            state = built.state
        outputs, one_sample, checked = built.sample_outputs, built.takes_one_sample, built.checked
        phase(f"reading the model: layer {index + 1}, {built.layer.name}")
        del built  # one layer in memory, not two
    _require_matrices(optimizer, matrices)
    targets = train.example(_samples_of(outputs, sizes[-1]))[1]
    check_loss(how.loss, how.loss_name, outputs, targets)
    costs[-1] = profiler.with_loss(costs[-1], how.loss, how.loss_name if how.loss_name in LOSSES else None, targets)
    return MeasuredModel(
        tuple(each.only_at(how.measured) for each in costs), tuple(costs),
        _crossings(sample(sizes[-1]), sizes[-1]), tuple(leaving), 1 if one_sample else 2, checked,
        input_names=names(sample(1)), evaluated=tuple(evaluated), state=state, in_order=in_order,
        unshared=unshared,
    )  # fmt: skip


def _where(compute: str) -> Where:
    """Layers are measured where this process computes."""
    here = compute_device.here()
    if here.type == "cpu":
        return PROCESSOR

    def bring(tensor: torch.Tensor) -> torch.Tensor:
        return compute_device.brought([tensor])[0]

    computing = partial(compute_device.going_forward, compute)
    return Where(str(here), compute_device.name(), bring, compute_device.finish, computing)


def why_unshared(layers: Sequence[Layer]) -> str:
    """Why no two nodes may hold the same layers; empty: they may."""
    try:
        refuse_unshared(layers, "a strategy with a copy of the model on every node")
    except UsageError as problem:
        return str(problem)
    return ""


def _require_matrices(optimizer: str, count: int) -> None:
    if OPTIMIZERS[optimizer].matrices is not None and not count:
        raise UsageError(
            f"--optimizer {optimizer} is for the matrices of hidden layers, and this model trains none: a parameter of two "
            f"dimensions that multiplies what passes through. Use another optimizer, such as {ELSEWHERE}"
        )


def _cutting(how: Reading, inputs: Sequence[str]) -> Cutting:
    """Labels among the inputs, of which the model computes its own loss, stay with the last cell."""
    own = how.loss_name in LOSSES and LOSSES[how.loss_name].of_model
    return Cutting(how.blocks, tuple(place for place, name in enumerate(inputs) if own and name == LABELS))


def _crossings(outputs: Any, samples: int) -> tuple[Crossing, ...]:
    """What leaves a layer for `samples` samples, as the plan knows it."""
    found = []
    for leaf in leaves_of(outputs):
        per_sample = leaf.dim() > 0 and leaf.shape[0] == samples
        rest = tuple(leaf.shape[1:]) if per_sample else tuple(leaf.shape)
        found.append(Crossing(str(leaf.dtype).removeprefix("torch."), rest, per_sample))
    return tuple(found)


def described(fact: Fact) -> Crossing:
    """What leaves a cell, as the plan knows it."""
    shape = fact.shape or ()
    sizes = tuple(each if isinstance(each, int) else FREE for each in shape)
    per_sample = bool(shape) and isinstance(shape[0], str) and shape[0].isidentifier()
    return Crossing(fact.dtype, sizes[1:] if per_sample else sizes, per_sample)


def _samples_of(outputs: Any, usual: int) -> int:
    """As many as its tensors have rows; a number alone, such as a loss, has none."""
    rows = [len(leaf) for leaf in leaves_of(outputs) if leaf.dim()]
    return usual if usual in rows or not rows else rows[0]


# -- for a plan on paper ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """What is to be done in a step, measured."""

    model: MeasuredModel
    batch_size: int
    microbatches: int  # with "auto" where the search begins
    batches: TrainingBatches

    def allows(self, count: int) -> bool:
        """Whether every microbatch has enough samples when batches are sliced into so many."""
        return min(counts.microbatch_sizes(self.batches.sizes(), count)) >= self.model.least_microbatch


def work_of(
    config: RunConfig, model: Model, train: Source, phase: Callable[[str], None],
    *, known: Known = lambda has_parameters, why: None,
) -> Work:  # fmt: skip
    """`config` is resolved. Refuses what a session would refuse of model and data; `known` as for `measure`."""
    training = config.training
    set_threads(training.threads or 1)
    train, name = with_loss(leave_out(train, names_of(training.leave_out)), training.loss or None)
    batch_size = train.batch_size if isinstance(train, Stream) else training.batch_size
    microbatches = min(usual_microbatches(training), batch_size)
    batches = TrainingBatches(train, batch_size, microbatches, training.seed)
    how = Reading.of(config, batches, batch_size, (loss_named(name), name))
    if training.microbatches != "auto":
        largest = how.measured[-1]
        # Half and twice the size tell what other numbers of microbatches would cost; BatchNorm refuses a single sample.
        half, twice = largest // 2 if largest >= 4 else largest, 2 * largest if microbatches > 1 else largest
        how = replace(how, others=(half, twice))
    return Work(measure(model, train, how, phase, known=known), batch_size, microbatches, batches)


def plan(config: RunConfig, work: Work, devices: Sequence[Device], keep_all: bool = False) -> Plan:
    """As the run's settings have it; with "auto" with the number of microbatches that is found fastest."""
    costs = work.model.costs
    options = options_on_paper(
        config, work.batch_size, work.microbatches, len(costs), len(devices), keep_all, work.model.in_order
    )
    if config.training.microbatches == "auto":
        return counts.best_plan(costs, devices, options, work.allows)
    return plan_with_schedule(costs, devices, options)
