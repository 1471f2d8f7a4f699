"""The batch of a step: a pure function of seed and step for tables, order of arrival for streams."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ringtmp.data.stream_batches import Arrivals, Keep, Stray, StreamPlace, TableMark
from ringtmp.data.stream_store import MEMORY_LIMIT_BYTES, Spool
from ringtmp.data.tables_and_streams import LeftOut, Source, Stream, Table, leaves, map_tensors
from ringtmp.errors import UsageError

#: Bytes. Matrix kernels give other bits where a tensor begins elsewhere.
BOUNDARY = 64


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
    return tensor if tensor.data_ptr() % BOUNDARY == 0 else tensor.clone()


def as_in_the_batch(piece: torch.Tensor, before: int) -> torch.Tensor:
    """A copy of some rows that lies as a slice of its batch does, of which so many rows come `before` it."""
    extent = 1 + sum((size - 1) * step for size, step in zip(piece.shape, piece.stride(), strict=True))
    if not piece.dim() or extent != piece.numel():  # nothing in it, or memory between its values
        return piece.clone()
    offset = before * piece.stride(0) % max(1, BOUNDARY // piece.element_size())
    storage = torch.empty(offset + extent, dtype=piece.dtype)
    return storage.as_strided(piece.shape, piece.stride(), offset).copy_(piece)


class TrainingBatches:
    """Batches by step number. A stream's are kept for those who go back, in `folder` with `keep="disk"`."""

    def __init__(
        self, source: Source, batch_size: int, microbatches: int, seed: int, *,
        keep: Keep = "memory", folder: Path | None = None, memory_bytes: int = MEMORY_LIMIT_BYTES,
    ) -> None:  # fmt: skip
        self._source = source
        self._size = batch_size
        self._microbatches = microbatches
        self._seed = seed
        self._order: tuple[int, torch.Tensor] | None = None
        self._early: tuple[int, Batch] | None = None
        self._keep = keep
        self._told = False
        self._told_of = 0  # what was left out
        self._spool = Spool(folder, memory_bytes, disk=keep == "disk")
        self._arrivals = Arrivals(source, self._spool, keep) if isinstance(source, Stream) else None
        self._table = TableMark(source, seed) if isinstance(source, Table) else None
        if isinstance(source, Table) and batch_size > source.size:
            raise UsageError(
                f"batch size {batch_size} is larger than the {source.size} training samples of {source.name}"
            )

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

    def slice_into(self, microbatches: int) -> None:
        """From now on."""
        self._microbatches = microbatches

    def batch(self, step: int) -> Batch | None:
        """None when a stream has ended for good."""
        if self._arrivals is not None:
            kept = self._arrivals.get(step)
            if kept is None:
                return None
            inputs, targets = split_batch(kept.inputs, kept.targets, self._microbatches)
            return Batch(kept.epoch, inputs, targets, len(kept.targets))
        source = self._source
        assert isinstance(source, Table)
        if self._early is not None and self._early[0] == step:
            return self._early[1]
        per_epoch = -(-source.size // self._size)
        epoch, position = divmod(step, per_epoch)
        if self._order is None or self._order[0] != epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            self._order = (epoch, torch.randperm(source.size, generator=generator))
        index = self._order[1][position * self._size : (position + 1) * self._size]
        inputs, targets = split_batch(*source.drawn(index, self._seed, step), self._microbatches)
        return Batch(epoch, inputs, targets, len(index), index.tensor_split(len(targets)))

    # -- of a stream --------------------------------------------------------------------------------------------------

    @property
    def not_ours(self) -> str | None:
        """Why the order of batches cannot be promised; None where it can."""
        if self._arrivals is None or not isinstance(self._source, Stream):
            return None
        return self._source.not_ours

    @property
    def once(self) -> bool:
        """The data can be read only once, so nobody knows how many steps an epoch has, or whether there is a second."""
        return isinstance(self._source, Stream) and self._source.once

    def left_out(self) -> LeftOut | None:
        """What could not be read as samples; None if nobody need be told again."""
        if not isinstance(self._source, Stream) or self._source.left_out.count == self._told_of:
            return None
        self._told_of = self._source.left_out.count
        return self._source.left_out

    def leave_out_last(self, step: int, text: str) -> bool:
        """Whether the batch of this step is the last of data that is read once; if so it is counted as left out."""
        if not isinstance(self._source, Stream) or not self.once or (batch := self.batch(step)) is None:
            return False
        if self.batch(step + 1) is not None:
            return False
        self._source.left_out.count += batch.samples
        self._source.left_out.text = text
        return True

    def go_on(self, step: int, place: StreamPlace) -> None:
        """The run begins at this step, or goes on from there."""
        if self._arrivals is not None:
            self._arrivals.go_on(step, place)
        elif self._table is not None:
            self._table.go_on(step, place)

    def place(self, step: int) -> StreamPlace:
        """What a checkpoint of this step must remember."""
        if self._arrivals is not None:
            return self._arrivals.place(step)
        return self._table.place() if self._table is not None else StreamPlace()

    def strays(self) -> list[Stray]:
        """What nobody has been told of yet."""
        of = self._arrivals or self._table
        if of is None:
            return []
        told, of.strays = of.strays, []
        return told

    def forget(self, before: int) -> None:
        """Nobody will ask again for a step before this one."""
        if self._arrivals is not None:
            self._arrivals.forget(before)

    @property
    def full(self) -> bool:
        """More is kept than there is room for: a checkpoint would let it go."""
        return self._spool.full

    @property
    def gone(self) -> bool:
        """A batch cannot be had again once its step is done."""
        return self._keep == "none" and self.not_ours is not None

    def trouble(self) -> str | None:
        """Why batches lie in memory and not on the disk, the first time it is asked for."""
        told, self._told = self._told, self._told or self._spool.trouble is not None
        return None if told else self._spool.trouble

    def close(self) -> None:
        """Nobody will ask again, not even a resumed run."""
        self._spool.clear()

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


def evaluation_batches(source: Source, batch_size: int, microbatches: int) -> Iterator[Batch]:
    """The whole source once, in order."""
    if isinstance(source, Stream):
        source.rewind()  # a pass that a lost node cut short does not count
        while (item := source.next()) is not None:
            inputs, targets = split_batch(*item, microbatches)
            yield Batch(0, inputs, targets, len(item[1]))
        return
    for start in range(0, source.size, batch_size):
        index = torch.arange(start, min(start + batch_size, source.size))
        inputs, targets = split_batch(*source.drawn(index, "evaluation", start), microbatches)
        yield Batch(0, inputs, targets, len(index), index.tensor_split(len(targets)))
