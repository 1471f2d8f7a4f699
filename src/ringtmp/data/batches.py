"""The batch of a step: a pure function of seed and step for tables, order of arrival for streams."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ringtmp.data.sources import Source, Stream, Table, leaves, map_tensors
from ringtmp.errors import UsageError


@dataclass(frozen=True)
class Batch:
    epoch: int
    inputs: tuple[Any, ...]  # one entry per microbatch
    targets: tuple[torch.Tensor, ...]
    samples: int
    #: The samples' numbers in their table, for those who keep what they have seen; a stream's have none.
    numbers: tuple[torch.Tensor, ...] | None = None

    @property
    def weights(self) -> list[float]:
        """Each microbatch's share of the batch."""
        return [len(target) / self.samples for target in self.targets]


def split_batch(
    inputs: Any, targets: torch.Tensor, microbatches: int
) -> tuple[tuple[Any, ...], tuple[torch.Tensor, ...]]:
    """Slices by `tensor_split`. The batch itself starts on a 64-byte boundary, so slices lie the same in every run."""
    inputs = map_tensors(aligned, inputs)
    targets = aligned(targets)
    count = min(microbatches, len(targets))
    pieces = [leaf.tensor_split(count) for leaf in leaves(inputs)]

    def piece(index: int) -> Any:
        rest = iter(pieces)
        return map_tensors(lambda _: next(rest)[index], inputs)

    return tuple(piece(index) for index in range(count)), targets.tensor_split(count)


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, copied if it does not start on a 64-byte boundary: matrix kernels change bits with alignment."""
    return tensor if tensor.data_ptr() % 64 == 0 else tensor.clone()


class TrainingBatches:
    """Batches by step number, from `first_step` on."""

    def __init__(self, source: Source, batch_size: int, microbatches: int, seed: int) -> None:
        self._source = source
        self._size = batch_size
        self._microbatches = microbatches
        self._seed = seed
        self._order: tuple[int, torch.Tensor] | None = None
        self._arrived = 0
        self._epoch = 0
        self._early: tuple[int, Batch] | None = None
        self._spool: dict[int, Batch] = {}  # of a stream, which cannot be asked twice
        if isinstance(source, Table) and batch_size > source.size:
            raise UsageError(f"batch size {batch_size} is above the {source.size} training samples of {source.name}")

    @property
    def steps_per_epoch(self) -> int | None:
        if isinstance(self._source, Stream):
            return None
        return -(-self._source.size // self._size)

    def sizes(self) -> set[int]:
        """Every batch size that will occur, as far as it is known."""
        if isinstance(self._source, Stream):
            return {self._source.batch_size}
        rest = self._source.size % self._size
        return {self._size, rest} - {0}

    def batch(self, step: int) -> Batch | None:
        """None when a stream has ended for good."""
        source = self._source
        if isinstance(source, Stream):
            if step in self._spool:
                return self._spool[step]
            if step < self._arrived:
                raise UsageError(f"the batch of step {step} is needed again, and {source.name} gives it only once")
            batch = self._arrive(source, step)
            if batch is not None:
                self._spool[step] = batch
            return batch
        if self._early is not None and self._early[0] == step:
            return self._early[1]
        per_epoch = -(-source.size // self._size)
        epoch, position = divmod(step, per_epoch)
        if self._order is None or self._order[0] != epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            self._order = (epoch, torch.randperm(source.size, generator=generator))
        index = self._order[1][position * self._size : (position + 1) * self._size]
        inputs, targets = split_batch(*source.take(index), self._microbatches)
        return Batch(epoch, inputs, targets, len(index), index.tensor_split(len(targets)))

    def forget(self, before: int) -> None:
        """Nobody will ask again for a step before this one."""
        for step in [each for each in self._spool if each < before]:
            del self._spool[step]

    @property
    def spooled_bytes(self) -> int:
        """Of a stream's batches that may be asked for again."""
        return sum(leaf.nbytes for batch in self._spool.values() for each in batch.inputs for leaf in leaves(each))

    def early(self, step: int) -> Batch | None:
        """The batch of a step whose turn has not come; None at the start of an epoch, and from a stream, where asking
        could mean waiting."""
        per_epoch = self.steps_per_epoch
        if per_epoch is None or step % per_epoch == 0:
            return None
        batch = self.batch(step)
        assert batch is not None
        self._early = (step, batch)
        return batch

    def _arrive(self, stream: Stream, step: int) -> Batch | None:
        """Steps done before a resume are read and dropped: a stream has no other way to step S. Nothing is read
        ahead: a slow stream's batch is used the moment it is there."""
        while True:
            item = stream.next()
            if item is None:  # the end of a pass; a generator has no second one
                item = stream.next()
                if item is None:
                    return None
                self._epoch += 1
            self._arrived += 1
            if self._arrived - 1 == step:
                inputs, targets = split_batch(*item, self._microbatches)
                return Batch(self._epoch, inputs, targets, len(item[1]))


def evaluation_batches(source: Source, batch_size: int, microbatches: int) -> Iterator[Batch]:
    """The whole source once, in order."""
    if isinstance(source, Stream):
        while (item := source.next()) is not None:
            inputs, targets = split_batch(*item, microbatches)
            yield Batch(0, inputs, targets, len(item[1]))
        return
    for start in range(0, source.size, batch_size):
        index = torch.arange(start, min(start + batch_size, source.size))
        inputs, targets = split_batch(*source.take(index), microbatches)
        yield Batch(0, inputs, targets, len(index), index.tensor_split(len(targets)))
