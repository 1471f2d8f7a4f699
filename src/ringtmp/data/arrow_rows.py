"""Rows of Parquet and Arrow files as samples: columns of numbers, or of lists of numbers that are all of one length.

pyarrow is loaded when the first file is read; it is in the extra `data`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ringtmp.errors import UsageError

#: Rows of a file that are read at once.
ROWS = 1024
Sample = tuple[torch.Tensor, torch.Tensor]


def parquet_rows(path: Path, columns: Sequence[str]) -> Iterator[Sample]:
    """The last column is the target."""
    with _reading(path, "parquet") as pyarrow:
        from pyarrow import parquet

        with parquet.ParquetFile(path) as file:
            _check(path, columns, file.schema_arrow)
            yield from _samples(pyarrow, path, columns, file.iter_batches(ROWS, columns=list(columns)))


def arrow_rows(path: Path, columns: Sequence[str]) -> Iterator[Sample]:
    """Of an IPC file, or of an IPC stream, as Hugging Face's datasets write it."""
    with _reading(path, "arrow") as pyarrow, path.open("rb") as file:
        if file.read(6) == b"ARROW1":
            reader = pyarrow.ipc.open_file(file)
            parts: Iterable[Any] = (reader.get_batch(number) for number in range(reader.num_record_batches))
        else:
            file.seek(0)
            parts = reader = pyarrow.ipc.open_stream(file)
        _check(path, columns, reader.schema)
        pieces = (part.slice(first, ROWS) for part in parts for first in range(0, part.num_rows, ROWS))
        yield from _samples(pyarrow, path, columns, pieces)


@contextlib.contextmanager
def _reading(path: Path, kind: str) -> Iterator[Any]:
    """pyarrow, whose errors become ours."""
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError:
        raise UsageError(f"data {kind}: needs pyarrow: pip install 'ringtmp[data]'") from None
    try:
        yield pyarrow
    except (OSError, pyarrow.ArrowException) as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: Exception) -> UsageError:
    reason = getattr(error, "strerror", None) or next(iter(str(error).splitlines()), type(error).__name__)
    return UsageError(f"shard {path} cannot be read: {reason}; put it back and resume the run")


def _check(path: Path, columns: Sequence[str], schema: Any) -> None:
    if missing := [each for each in columns if each not in schema.names]:
        raise UsageError(
            f"{path} has no column {' and no '.join(map(repr, missing))}; it has {', '.join(schema.names)}: name them with "
            "--columns, the target last"
        )


def _samples(pyarrow: Any, path: Path, columns: Sequence[str], parts: Iterable[Any]) -> Iterator[Sample]:
    """Each with memory of its own: one that waits in a buffer must not keep a whole part of the file there."""
    for part in parts:
        *given, targets = (_numbers(pyarrow, path, each, part.column(each)) for each in columns)
        inputs = given[0] if len(given) == 1 else torch.stack([each.float() for each in given], 1)
        if not targets.is_floating_point():
            targets = targets.long()
        for row, target in zip(inputs, targets, strict=True):
            yield row.clone(), target.clone()


def _numbers(pyarrow: Any, path: Path, name: str, column: Any) -> torch.Tensor:
    sizes: list[int] = []
    values = column
    while isinstance(values, pyarrow.ExtensionArray):
        values = values.storage
    while pyarrow.types.is_nested(values.type) and hasattr(values, "flatten"):
        _refuse_gaps(path, name, values)
        if pyarrow.types.is_struct(values.type) or pyarrow.types.is_map(values.type):
            raise _no_numbers(path, name, values.type)
        inner = values.flatten()
        size, rest = divmod(len(inner), len(values)) if len(values) else (0, 0)
        lengths = None if pyarrow.types.is_fixed_size_list(values.type) else values.value_lengths()
        if rest or (lengths is not None and not np.all(lengths.to_numpy(zero_copy_only=False) == size)):
            raise UsageError(f"column {name!r} of {path} has lists of different lengths: pad them to one")
        sizes.append(size)
        values = inner
    _refuse_gaps(path, name, values)
    try:
        tensor = torch.from_numpy(np.array(values.to_numpy(zero_copy_only=False)))
    except TypeError:
        raise _no_numbers(path, name, values.type) from None
    if tensor.dtype == torch.bool:
        tensor = tensor.long()
    return (tensor.float() if tensor.is_floating_point() else tensor).reshape(len(column), *sizes)


def _refuse_gaps(path: Path, name: str, values: Any) -> None:
    """An empty value would become a number that is none."""
    if values.null_count:
        raise UsageError(
            f"column {name!r} of {path} has {values.null_count} empty values (null) among {len(values)}: fill them, or leave "
            "those rows out"
        )


def _no_numbers(path: Path, name: str, kind: Any) -> UsageError:
    return UsageError(f"column {name!r} of {path} is of type {kind}: it must be numbers, or lists of numbers")
