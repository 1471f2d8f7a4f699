"""A run that trained an ensemble, used: every member is asked in its turn, and what they say is combined."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch

from ringtmp.data.batches import Batch
from ringtmp.model.ensemble import Combine, combined, one_tensor
from ringtmp.run.inference import Inference
from ringtmp.runtime.checkpoint import latest
from ringtmp.runtime.ensemble_members import weights_of
from ringtmp.runtime.losses import LossFunction, Score, class_dim_of
from ringtmp.runtime.run_directory import RunDirectory, SavedConfig
from ringtmp.strategies import registry

#: Lays out a member, by its number.
Started = Callable[[int], AbstractContextManager[Inference]]
Batches = Callable[[], Iterator[Batch]]


def how_of(saved: SavedConfig) -> Combine:
    how: Combine = registry.of(saved.config.ring)[1].combine
    return how


class Combined:
    """`step`: of the checkpoint that the members are taken from."""

    def __init__(self, weights: torch.Tensor, saved: SavedConfig, step: int) -> None:
        self.step = step
        self._weights = weights
        self._loss = saved.loss
        self._how = how_of(saved)

    @classmethod
    def of(cls, run: RunDirectory, saved: SavedConfig) -> Combined | None:
        """None: the run trained one model."""
        checkpoint, _ = latest(run.checkpoints, run.read_layers()[0].run)
        weights = weights_of(checkpoint)
        return None if weights is None else cls(weights, saved, checkpoint.progress.step)

    def predictions(
        self, started: Started, batches: Batches, where: str, loss: str | None = None
    ) -> list[torch.Tensor]:
        """One entry per microbatch, in order."""
        found = []
        for member in range(len(self._weights)):
            with started(member) as ring:
                outputs = ring.master.predict(ring.checked(batches(), where, loss), ring.step)
            found.append([one_tensor(each) for each in outputs])
        dim = class_dim_of(self._loss)
        return [combined(each, self._weights, self._how, dim) for each in zip(*found, strict=True)]

    def score(
        self, started: Started, batches: Batches, where: str, loss: LossFunction, bytes_model: bool
    ) -> Score:  # fmt: skip
        score = Score(bytes_model=bytes_model)
        targets = (each for batch in batches() for each in batch.targets)
        for outputs, wanted in zip(self.predictions(started, batches, where, self._loss), targets, strict=True):
            score.add(float(loss(outputs, wanted)), outputs, wanted)
        return score
