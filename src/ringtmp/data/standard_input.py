"""Samples as they come on standard input, one JSON object a line: {"inputs": [...], "targets": 3}.

They are read when they are needed and never again; `--stream-keep` says what is kept of them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

import msgspec
import torch

from ringtmp.data.sources import Stream
from ringtmp.errors import UsageError

NAME = "-"
MOST_CHARACTERS = 64 * 2**20


class Line(msgspec.Struct):
    inputs: list[object]
    targets: object


def standard_input(batch_size: int, lines: Iterable[bytes] | None = None) -> Stream:
    if lines is None:
        if sys.stdin.isatty():
            raise UsageError('data -: pipe samples in, one JSON object a line: {"inputs": [0.1, 0.2], "targets": 1}')
        lines = sys.stdin.buffer
    return Stream(NAME, _batches(lines, batch_size))


def _batches(lines: Iterable[bytes], batch_size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        waiting.append(_sample(line, number, waiting[0] if waiting else None))
        if len(waiting) == batch_size:
            yield _together(waiting)
            waiting = []
    if waiting:
        yield _together(waiting)


def _sample(
    line: bytes, number: int, first: tuple[torch.Tensor, torch.Tensor] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    try:
        if len(line) > MOST_CHARACTERS:
            raise ValueError(f"it has {len(line)} characters")
        read = msgspec.json.decode(line, type=Line)
        inputs, targets = torch.tensor(read.inputs), torch.tensor(read.targets)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise UsageError(
            f"data -: line {number} is no sample: {str(error).splitlines()[0]}; a sample is one JSON object such as "
            '{"inputs": [0.1, 0.2], "targets": 1}'
        ) from None
    inputs = inputs.float() if inputs.is_floating_point() else inputs
    targets = targets.float() if targets.is_floating_point() else targets
    if first is not None and (inputs.shape, targets.shape) != (first[0].shape, first[1].shape):
        raise UsageError(
            f"data -: line {number} has inputs of shape {tuple(inputs.shape)} and targets of {tuple(targets.shape)}, the lines "
            f"before {tuple(first[0].shape)} and {tuple(first[1].shape)}"
        )
    return inputs, targets


def _together(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """1 and 1.5 are numbers of one kind, however they are written."""
    inputs = [each for each, _ in samples]
    if any(each.is_floating_point() for each in inputs):
        inputs = [each.float() for each in inputs]
    targets = [each for _, each in samples]
    if any(each.is_floating_point() for each in targets):
        targets = [each.float() for each in targets]
    return torch.stack(inputs), torch.stack(targets)
