"""The oracle: training as anyone would write it in plain PyTorch, in one process, without RingTMP's runtime."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ringtmp.runtime.layer_randomness import random_key
from ringtmp.runtime.learning_rates import learning_rate


def plain_loop(
    model: nn.Sequential,
    batches: Sequence[tuple[Any, torch.Tensor]],
    microbatches: int,
    loss: Callable[[Any, torch.Tensor], torch.Tensor],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    seed: int = 0,
    clip_norm: float | None = None,
    schedule: dict[str, Any] | None = None,
    delayed: bool = False,
) -> list[float]:
    """Trains `model` in place and returns the loss of every step. `delayed`: every gradient is taken at the weights one
    update ago, w[t+1] = w[t] - step(gradient at w[t-1]); the first at the first weights."""
    model.train()
    previous = _weights(model)
    updates = optimizer(model.parameters())
    base = updates.param_groups[0]["lr"]
    losses = []
    for step, (inputs, targets) in enumerate(batches):
        total = 0.0
        newest = _weights(model)
        if delayed:
            _load(model, previous)
        count = min(microbatches, len(targets))
        for number, (x, y) in enumerate(zip(inputs.tensor_split(count), targets.tensor_split(count), strict=True)):
            for position, layer in enumerate(model):
                torch.default_generator.manual_seed(random_key(seed, step, number, position))
                x = layer(x)
            share = len(y) / len(targets)
            value = loss(x, y)
            (value * share).backward()
            total += float(value.detach()) * share
        if delayed:  # else a weight that a layer changes in its forward pass would be lost
            _load(model, newest)
        previous = newest
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        if schedule is not None:
            for group in updates.param_groups:
                group["lr"] = learning_rate(schedule, base, step)
        updates.step()
        updates.zero_grad()
        losses.append(total)
    return losses


def _weights(model: nn.Module) -> list[torch.Tensor]:
    return [each.detach().clone() for each in model.parameters()]


@torch.no_grad()
def _load(model: nn.Module, weights: list[torch.Tensor]) -> None:
    for parameter, weight in zip(model.parameters(), weights, strict=True):
        parameter.copy_(weight)


def state_sha256(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        digest.update(
            name.encode() + b"\0" + dtype.encode() + b"\0" + ",".join(map(str, tensor.shape)).encode() + b"\0"
        )
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
