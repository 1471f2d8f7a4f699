"""A model becomes data in a run directory: layers, measured costs, and its first weights as the checkpoint of step 0."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from ringtmp.data.batches import Batch
from ringtmp.data.sources import Source, leaves
from ringtmp.errors import UsageError
from ringtmp.model.build import build_layers
from ringtmp.model.layers import Model
from ringtmp.model.profile import ProfileCache, Profiler, with_loss
from ringtmp.plan.devices import LayerCost
from ringtmp.runtime.checkpoint import CheckpointWriter, Progress
from ringtmp.runtime.losses import LossFunction, check_loss
from ringtmp.runtime.optimizers import make_optimizer
from ringtmp.runtime.run_directory import LayerIndex, RunDirectory
from ringtmp.system.resources import give_back_memory
from ringtmp.wire.messages import Crossing, Recipe


def write_model(
    run: RunDirectory,
    model: Model,
    train: Source,
    loss: tuple[LossFunction, str],
    recipe: Recipe,
    sizes: list[int],
    measured: list[int],
    phase: Callable[[str], None],
    known: Callable[[int], None] = lambda count: None,
) -> None:
    """One layer at a time: the whole model is never in memory. `sizes` are those of the microbatches to come,
    `measured` those whose cost the plan wants to know, none larger. `known` is told the number of layers before the first is
    read, if it can be known."""
    phase("reading the model")
    name = secrets.token_hex(8)
    writer = CheckpointWriter(run.checkpoints, name, Progress(0))
    names: list[str] = []
    digests: list[str] = []
    costs: list[LayerCost] = []
    leaving: list[tuple[Crossing, ...]] = []
    try:
        sample = train.example
        profiler = _profiler(recipe, sample(sizes[-1])[0], measured)
        outputs, one_sample, checked = None, True, ""
        for index, built in enumerate(build_layers(model, recipe.seed, lambda count: sample(count)[0], sizes, known)):
            digests.append(run.write_layer(index, built.layer))
            writer.add(index, built.layer, list(built.tensors.values()), {})
            names.append(built.layer.name)
            costs.append(profiler.cost(built))
            leaving.append(_crossings(built.sample_outputs, sizes[-1]))
            outputs, one_sample, checked = built.sample_outputs, built.takes_one_sample, built.checked
            phase(f"reading the model: layer {index + 1}, {built.layer.name}")
            del built  # one layer in memory, not two
        targets = sample(len_of(outputs))[1]
        check_loss(*loss, outputs, targets)
        costs[-1] = with_loss(costs[-1], loss[0], outputs, targets, recipe.threads)
        least = 1 if one_sample else 2
        entering = _crossings(sample(sizes[-1])[0], sizes[-1])
        run.write_index(
            LayerIndex(
                name, tuple(names), tuple(costs), tuple(leaving), least, entering, checked, tuple(digests)
            )
        )  # fmt: skip
        writer.commit()
        give_back_memory()  # measuring held more of a layer than training will
    except OSError as error:
        writer.abandon()
        raise UsageError(f"the model's first weights cannot be written to {run.path}: {error.strerror}") from error
    except BaseException:
        writer.abandon()
        raise


def _profiler(recipe: Recipe, inputs: Any, sizes: list[int]) -> Profiler:
    name, settings = recipe.optimizer, recipe.optimizer_settings
    return Profiler(
        inputs,
        sizes,
        recipe.threads,
        lambda parameters: make_optimizer(name, settings, parameters),
        f"{name} {sorted(settings.items())}",
        ProfileCache(),
    )


def refuse_too_small(batch: Batch, least: int, step: int) -> None:
    """A table's sizes are checked before the start; a stream may bring any."""
    smallest = min(len(each) for each in batch.targets)
    if smallest < least:
        raise UsageError(
            f"the batch of step {step} has {batch.samples} samples, so a microbatch of {smallest}, and a BatchNorm needs "
            f"{least}: use fewer --microbatches or drop the last, smaller batch"
        )


def _crossings(outputs: Any, samples: int) -> tuple[Crossing, ...]:
    """What leaves a layer for `samples` samples, as the plan knows it."""
    found = []
    for leaf in leaves(outputs):
        per_sample = leaf.dim() > 0 and leaf.shape[0] == samples
        rest = tuple(leaf.shape[1:]) if per_sample else tuple(leaf.shape)
        found.append(Crossing(str(leaf.dtype).removeprefix("torch."), rest, per_sample))
    return tuple(found)


def len_of(outputs: Any) -> int:
    """Samples in a (nested) output."""
    while isinstance(outputs, tuple | list):
        outputs = outputs[0]
    return len(outputs)
