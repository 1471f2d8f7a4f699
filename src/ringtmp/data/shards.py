"""Samples in shards, read one shard after the other: Parquet files, and tar files as WebDataset writes them.

Never more than a buffer of samples is in memory. Every pass shuffles the shards, and the samples within the buffer, with
numbers from torch's global generator, as a DataLoader does: the same seed gives the same order, and a resumed run goes on at
the sample it had reached.
"""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ringtmp.data.randomness import Repeatable
from ringtmp.data.tables_and_streams import Stream
from ringtmp.errors import UsageError

#: Samples that are shuffled among each other.
BUFFER = 4096
#: Rows of a Parquet file that are read at once.
ROWS = 1024
#: What the files of the test part are called, as Hugging Face's datasets do.
TEST = re.compile(r"(test|validation|valid|val)\b.*")
USUAL_COLUMNS = ("inputs", "targets")
Sample = tuple[torch.Tensor, torch.Tensor]
Rows = Callable[[Path], Iterator[Sample]]


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
    for sample in samples:
        if len(buffer) < BUFFER:
            buffer.append(sample)
            continue
        at = int(torch.randint(BUFFER, ()))
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
    files = sorted(place.rglob(f"*.{kind}")) if place.is_dir() else [place] if place.is_file() else []
    if not files:
        raise UsageError(f"data {name}: there is no {kind} file at {place}")
    rows: Rows = partial(_parquet_rows, columns=columns) if kind == "parquet" else _tar_rows
    test = [each for each in files if TEST.fullmatch(each.name) or TEST.fullmatch(each.parent.name)]
    train = [each for each in files if each not in test]
    if not train:
        raise UsageError(f"data {name}: every file is one of a test part ({', '.join(each.name for each in test[:3])})")
    made = Stream(name, Shards(train, rows, batch_size, shuffled=True), seed=seed)
    return made, Stream(name, Shards(test, rows, batch_size, shuffled=False)) if test else None


def _parquet_rows(path: Path, columns: Sequence[str]) -> Iterator[Sample]:
    """Columns of numbers, or of lists of numbers that are all of one length. The last column is the target."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise UsageError("data parquet: needs pyarrow: pip install 'ringtmp[data]'") from None
    try:
        with parquet.ParquetFile(path) as file:
            if missing := [each for each in columns if each not in file.schema_arrow.names]:
                raise UsageError(
                    f"data parquet: {path} has no column {' and no '.join(map(repr, missing))}; it has "
                    f"{', '.join(file.schema_arrow.names)}: name them with --columns, the target last"
                )
            for part in file.iter_batches(ROWS, columns=list(columns)):
                *given, targets = (_numbers(path, each, part.column(each)) for each in columns)
                inputs = given[0] if len(given) == 1 else torch.stack([each.float() for each in given], 1)
                yield from zip(inputs, targets, strict=True)
    except (OSError, pyarrow.ArrowException) as error:
        raise _unreadable(path, error) from error


def _numbers(path: Path, name: str, column: Any) -> torch.Tensor:
    try:
        rows = column.to_numpy(zero_copy_only=False)
        values = np.stack(list(rows)) if rows.dtype == object else rows
        tensor = torch.from_numpy(np.array(values))
    except (TypeError, ValueError):
        raise UsageError(
            f"data parquet: column {name!r} of {path} is not numbers, nor lists of numbers of one length"
        ) from None
    return tensor.float() if tensor.is_floating_point() else tensor


def _tar_rows(path: Path) -> Iterator[Sample]:
    """Members with one stem are one sample: KEY.npy its input, KEY.cls its class or KEY.target.npy its target."""
    try:
        with tarfile.open(path) as archive:
            key, found = "", dict[str, bytes]()
            for member in archive:
                if not member.isfile():
                    continue
                stem, _, ending = member.name.partition(".")
                if stem != key and found:
                    yield _tar_sample(path, key, found)
                    found = {}
                key = stem
                content = archive.extractfile(member)
                found[ending] = content.read() if content is not None else b""
            if found:
                yield _tar_sample(path, key, found)
    except (OSError, tarfile.TarError) as error:
        raise _unreadable(path, error) from error


def _tar_sample(path: Path, key: str, found: dict[str, bytes]) -> Sample:
    if "npy" not in found or not {"cls", "target.npy"} & found.keys():
        raise UsageError(
            f"data tar: sample {key} of {path} has {', '.join(sorted(found))}: it needs {key}.npy and {key}.cls (or "
            f"{key}.target.npy); images must be arrays by now"
        )
    try:
        target = torch.tensor(int(found["cls"])) if "cls" in found else _array(found["target.npy"])
        return _array(found["npy"]), target
    except ValueError as error:
        raise UsageError(f"data tar: sample {key} of {path} cannot be read: {error}") from None


def _array(raw: bytes) -> torch.Tensor:
    tensor = torch.from_numpy(np.load(io.BytesIO(raw), allow_pickle=False))
    return tensor.float() if tensor.is_floating_point() else tensor


def _unreadable(path: Path, error: Exception) -> UsageError:
    reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
    return UsageError(f"shard {path} cannot be read: {reason}; put it back and resume the run")
