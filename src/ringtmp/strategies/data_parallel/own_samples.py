"""Which samples of a batch go to which worker, where each has a part of the data of its own. Pure.

A sample belongs to the worker whose rank its number in the table leaves as a remainder. So parts are as alike as the order of
the table allows, differ in size by one at most, and are the same in every epoch.
"""

from __future__ import annotations

import torch

from ringtmp.data.batches import Batch
from ringtmp.data.tables_and_streams import leaves
from ringtmp.errors import UsageError

#: Inputs, one tensor for each that a model takes; targets; numbers in the table, where samples have them.
Samples = tuple[list[torch.Tensor], torch.Tensor, torch.Tensor | None]


def joined(batch: Batch, first: int, stop: int) -> Samples:
    """Of these microbatches."""
    columns = zip(*(leaves(each) for each in batch.inputs[first:stop]), strict=True)
    numbers = None if batch.numbers is None else torch.cat(list(batch.numbers[first:stop]))
    return [torch.cat(list(column)) for column in columns], torch.cat(list(batch.targets[first:stop])), numbers


def _mine(batch: Batch, rank: int, workers: int) -> torch.Tensor:
    """Places in the batch, in the order of the samples' numbers."""
    if batch.numbers is None:
        raise UsageError("every worker has samples of its own, and those of a stream have no numbers: train on a table")
    numbers = torch.cat(list(batch.numbers))
    order = numbers.argsort()
    return order[numbers[order] % workers == rank]


def sizes(batch: Batch, rank: int, workers: int, microbatches: int) -> tuple[int, ...]:
    """Of the worker's microbatches, no more than this; none where the batch has nothing of its part."""
    count = len(_mine(batch, rank, workers))
    return tuple(len(each) for each in torch.arange(count).tensor_split(min(microbatches, count))) if count else ()


def taken(batch: Batch, rank: int, workers: int) -> Samples:
    inputs, targets, numbers = joined(batch, 0, len(batch.targets))
    assert numbers is not None
    mine = _mine(batch, rank, workers)
    return [each[mine] for each in inputs], targets[mine], numbers[mine]
