"""Losses and scores. They run on the master only, where labels are."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from ringtmp.errors import UsageError, unknown

LossFunction = Callable[[Any, torch.Tensor], torch.Tensor]


def cross_entropy(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, targets)


def mse(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(outputs, targets)


def next_byte(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    """(batch, time, 256) logits against (batch, time) bytes."""
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


LOSSES: dict[str, LossFunction] = {"cross_entropy": cross_entropy, "mse": mse, "next_byte": next_byte}


def loss_named(name: str) -> LossFunction:
    if name not in LOSSES:
        raise unknown("loss", name, LOSSES)
    return LOSSES[name]


@dataclass
class Score:
    """Sums over an evaluation."""

    loss_sum: float = 0.0
    samples: int = 0
    right: int = 0
    guesses: int = 0
    bytes_model: bool = False

    def add(self, loss: float, outputs: Any, targets: torch.Tensor) -> None:
        count = len(targets)
        self.loss_sum += loss * count
        self.samples += count
        if isinstance(outputs, torch.Tensor) and not targets.is_floating_point() and outputs.dim() == targets.dim() + 1:
            self.right += int((outputs.argmax(-1) == targets).sum())
            self.guesses += targets.numel()

    @property
    def loss(self) -> float:
        return self.loss_sum / max(1, self.samples)

    @property
    def accuracy(self) -> float | None:
        return self.right / self.guesses if self.guesses else None

    @property
    def bits_per_byte(self) -> float | None:
        return self.loss / math.log(2) if self.bytes_model else None


def check_loss(loss: LossFunction, name: str, outputs: Any, targets: torch.Tensor) -> None:
    """Try the loss on a sample: wrong shapes and labels out of range are the user's to know before the start."""
    if name in ("cross_entropy", "next_byte") and not targets.is_floating_point() and isinstance(outputs, torch.Tensor):
        classes = outputs.shape[-1]
        low, high = int(targets.min()), int(targets.max())
        if low < 0 or high >= classes:
            raise UsageError(
                f"label {high if high >= classes else low} is out of range 0..{classes - 1} of the outputs"
            )
    try:
        value = loss(outputs, targets)
    except Exception as error:  # a callable may raise anything
        raise UsageError(f"loss {name} refuses the model's outputs: {str(error).strip().splitlines()[0]}") from error
    if not isinstance(value, torch.Tensor) or value.dim() != 0:
        raise UsageError(f"loss {name} must return one number as a tensor")
