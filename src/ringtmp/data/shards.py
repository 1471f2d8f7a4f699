"""Samples in shards, read one shard after the other: Parquet and Arrow files, and tar files as WebDataset writes them.

Never more than a buffer of samples is in memory. Every pass shuffles the shards, and the samples within the buffer, with
numbers from torch's global generator, as a DataLoader does: the same seed gives the same order, and a resumed run goes on at
the sample it had reached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from ringtmp.data.arrow_rows import arrow_rows, parquet_rows
from ringtmp.data.randomness import Repeatable
from ringtmp.data.shard_files import find_shards
from ringtmp.data.tables_and_streams import Stream
from ringtmp.data.tar_rows import tar_rows
from ringtmp.errors import UsageError

#: Samples that are shuffled among each other, unless they are so large that fewer fill `BUFFER_BYTES`.
BUFFER = 4096
BUFFER_BYTES = 256 * 2**20
USUAL_COLUMNS = ("inputs", "targets")
Sample = tuple[torch.Tensor, torch.Tensor]
Rows = Callable[[Path], Iterator[Sample]]
#: Kinds of shards whose samples are rows of a table.
WITH_COLUMNS = {"parquet": parquet_rows, "arrow": arrow_rows}
KINDS = (*WITH_COLUMNS, "tar")


class Shards(Repeatable):
    """Batches from shards; every pass over it is an epoch."""

    def __init__(self, files: Sequence[Path], rows: Rows, batch_size: int, shuffled: bool) -> None:
        self._files = files
        self._rows = rows
        self._batch_size = batch_size
        self._shuffled = shuffled

    def __iter__(self) -> Iterator[Sample]:
        order = torch.randperm(len(self._files)).tolist() if self._shuffled else range(len(self._files))
        samples = (sample for number in order for sample in self._rows(self._files[number]))
        waiting: list[Sample] = []
        for sample in _mixed(samples) if self._shuffled else samples:
            waiting.append(sample)
            if len(waiting) == self._batch_size:
                yield _together(waiting)
                waiting = []
        if waiting:
            yield _together(waiting)


def _mixed(samples: Iterator[Sample]) -> Iterator[Sample]:
    """Each sample that comes takes the place of a random one in the buffer, which goes."""
    buffer: list[Sample] = []
    room = BUFFER_BYTES
    for sample in samples:
        if len(buffer) < BUFFER and room > 0:
            buffer.append(sample)
            room -= sum(each.nbytes for each in sample)
            continue
        at = int(torch.randint(len(buffer), ()))
        yield buffer[at]
        buffer[at] = sample
    for at in torch.randperm(len(buffer)).tolist():
        yield buffer[at]


def _together(samples: Sequence[Sample]) -> Sample:
    inputs, targets = zip(*samples, strict=True)
    try:
        return torch.stack(inputs), torch.stack(targets)
    except RuntimeError:
        shapes = sorted({str(tuple(each.shape)) for each in inputs})
        raise UsageError(f"samples of one batch have different shapes: {', '.join(shapes)}") from None


def open_shards(
    kind: str, place: Path, seed: int, batch_size: int, columns: Sequence[str]
) -> tuple[Stream, Stream | None]:
    """(train, test) of a file, or of all files of this kind in a folder and the folders in it."""
    name = f"{kind}:{place}"
    train, test = find_shards(kind, place)
    rows: Rows = partial(WITH_COLUMNS[kind], columns=columns) if kind in WITH_COLUMNS else tar_rows
    made = Stream(name, Shards(train, rows, batch_size, shuffled=True), seed=seed)
    return made, Stream(name, Shards(test, rows, batch_size, shuffled=False)) if test else None
