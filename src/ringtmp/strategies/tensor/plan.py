"""The plan of a run whose layers are cut inside: which weights are cut how, and what a step will send."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from ringtmp.errors import UsageError
from ringtmp.model.compute_formats import COMPUTE_IN
from ringtmp.model.parameters_changed_in_forward import refuse_written
from ringtmp.model.portable_layer import Layer, count
from ringtmp.plan.when_to_rebalance import Balance
from ringtmp.runtime.base_leader import Start
from ringtmp.runtime.losses import LOSSES
from ringtmp.runtime.optimizers import OPTIMIZERS
from ringtmp.strategies import registry
from ringtmp.strategies.base import PlanRequest, Roles, Share, Strategy
from ringtmp.strategies.data_parallel.loss import exported
from ringtmp.strategies.data_parallel.replica import layer_flat
from ringtmp.strategies.tensor.cutting import Cuts
from ringtmp.strategies.tensor.leader import TensorLeader
from ringtmp.strategies.tensor.told import TRIED_WITH, Told, decide, local_layer, programs
from ringtmp.units import bytes_text
from ringtmp.wire.formats import PLAIN
from ringtmp.wire.messages import Enlist


@dataclass(frozen=True)
class TensorPlan:
    request: PlanRequest
    strategy: Strategy
    enlist: Enlist
    roles: Roles
    cuts: Cuts
    facts: dict[str, Any]
    shares: tuple[Share, ...]
    lines: tuple[str, ...]
    loss: tuple[Layer, list[torch.Tensor]] | None = None  # one of the user's own, which every worker needs
    warnings: tuple[str, ...] = ()
    left_out: bool = False

    def balance(self, not_before: float) -> Balance | None:
        return None

    def lead(self, start: Start) -> TensorLeader:
        return TensorLeader(start, self)


def plan(request: PlanRequest, strategy: Strategy, least: int) -> TensorPlan:
    config, workers, layers = request.config, request.config.ring.nodes, request.layers
    _refuse(request)
    loss = None
    if request.loss_name not in LOSSES:
        loss = exported(request.loss, layers[-1], request.index.outputs[-1], request.targets)
    inputs = request.index.inputs
    cuts = decide(layers, inputs, workers, least) if workers > 1 else {}
    if workers > 1 and not cuts:
        raise UsageError(
            "strategy tensor finds nothing to cut: no linear layer or convolution of this model has as many weights as "
            f"least={least}; lower it"
        )
    told = Told(least, inputs, {name: (each.dim, each.groups) for name, each in cuts.items()})
    local = [local_layer(each, cuts, workers) for each in layers]
    per_sample = programs(layers, told, 0, workers).train.sent(workers, True) / TRIED_WITH
    enlist = Enlist(
        strategy.name, msgspec.to_builtins(told), workers, request.recipe, wire=config.training.wire,
        loss=request.loss_name, sizes=tuple(layer_flat(each).size for each in local), step=request.step,
        addresses=request.addresses, detailed_steps=config.keep.detailed_steps,
        package=registry.package_of(strategy.name),
    )  # fmt: skip
    held, whole = sum(each.parameters for each in local), sum(each.parameters for each in layers)
    cut_values = sum(count(e.shape) for layer in layers for e in layer.tensors if layer.full_name(e) in cuts)
    step_bytes = per_sample * request.batch_size * 4
    line = (
        f"{len(cuts)} tensors are cut ({cut_values} of {whole} values): a worker holds {held} parameters; a step of "
        f"{request.batch_size} samples sends {bytes_text(step_bytes)} in all"
    )
    facts = {"servers": 0, "workers": workers, "parts_per_sample": per_sample, "cut_values": cut_values}
    segments = (f"1/{workers} of {len(cuts)} tensors", "the rest whole")
    shares = tuple(Share(node, "worker", segments, held) for node in range(workers))
    return TensorPlan(
        request, strategy, enlist, strategy.roles(None, workers), cuts, facts=facts, shares=shares, lines=(line,), loss=loss
    )  # fmt: skip


def _refuse(request: PlanRequest) -> None:
    """UsageError for what cannot be computed in parts."""
    recipe = request.recipe
    refuse_written(request.layers, "tensor")
    if OPTIMIZERS[recipe.optimizer].matrices is not None:
        others = ", ".join(name for name, each in OPTIMIZERS.items() if each.matrices is None)
        raise UsageError(
            f"{recipe.optimizer} works on whole matrices, and strategy tensor cuts them: use --optimizer {others}"
        )
    asked = {f"--compute {recipe.compute}": not COMPUTE_IN[recipe.compute].plain, "--compile": recipe.compiled}
    for option in (each for each, given in asked.items() if given):
        raise UsageError(f"strategy tensor computes in float32, operator by operator: leave out {option}")
    if not request.index.inputs:
        raise UsageError(
            "strategy tensor needs to know the shapes of the model's inputs: train it anew with this version"
        )
    if recipe.randomness != "operator":
        raise UsageError("strategy tensor numbers random operators, and this run was begun by an older version")
    for layer in request.layers:
        for each in layer.tensors:
            if each.trainable and each.dtype != PLAIN.name:
                raise UsageError(
                    f"{layer.full_name(each)} is {each.dtype}: strategy tensor cuts {PLAIN.name} parameters only"
                )
            if each.kind == "scale" or each.copied:
                raise UsageError(
                    f"{layer.full_name(each)} is kept small or shared by cells: strategy tensor cannot cut it"
                )
