"""A training step that has begun and not ended, as the master knows it: its batch, and the losses there are so far."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from ringtmp.data.batches import Batch
from ringtmp.runtime import compute_device
from ringtmp.strategies.ring.diagnose_failure import NotFinite


@dataclass
class StepUnderWay:
    batch: Batch
    turn: int
    losses: dict[int, float] = field(default_factory=dict)  # by microbatch, times its share of the batch
    unread: dict[int, torch.Tensor] = field(default_factory=dict)  # of microbatches, still on an accelerator

    def came(self, step: int, microbatch: int, loss: torch.Tensor) -> torch.Tensor:
        """The loss of a microbatch, on its way back. Nothing of a step is updated before its last microbatch has a loss: where
        to read one is to wait for an accelerator, that is soon enough to see that all of them are numbers."""
        self.unread[microbatch] = loss.detach()
        complete = len(self.losses) + len(self.unread) == len(self.batch.targets)
        if complete or not compute_device.works_behind():
            self._read(step)
        return loss * self.batch.weights[microbatch]

    def _read(self, step: int) -> None:
        """NotFinite: of the last that is not a number, because what it was computed of is most likely to be here still."""
        found = dict(zip(self.unread, torch.stack(list(self.unread.values())).tolist(), strict=True))
        self.unread.clear()
        for microbatch, value in reversed(found.items()):
            if not math.isfinite(value):
                raise NotFinite(step, microbatch, value)
            self.losses[microbatch] = value * self.batch.weights[microbatch]

    @property
    def loss(self) -> float:
        """Added up in the order of microbatches, whichever came first."""
        return sum(self.losses[each] for each in sorted(self.losses))
