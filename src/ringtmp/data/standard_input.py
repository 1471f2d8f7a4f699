"""Samples as they come on standard input, one JSON object a line: {"inputs": [...], "targets": 3}.

They are read when they are needed and never again; `--stream-keep` says what is kept of them. A line that is no sample ends
the run, or is counted and left out, as `--bad-lines` says.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

import msgspec
import torch

from ringtmp.data.tables_and_streams import LeftOut, Stream
from ringtmp.errors import UsageError

NAME = "-"
MOST_CHARACTERS = 64 * 2**20
REFUSE = "refuse"
#: So many lines in a row that are no samples are not a few bad ones.
MOST_BAD_IN_A_ROW = 10_000
EXAMPLE = '{"inputs": [0.1, 0.2], "targets": 1}'
Sample = tuple[torch.Tensor, torch.Tensor]


class Line(msgspec.Struct):
    inputs: list[object]
    targets: object


def standard_input(batch_size: int, lines: Iterable[bytes] | None = None, bad_lines: str = REFUSE) -> Stream:
    if lines is None:
        if sys.stdin.isatty():
            raise UsageError(f"data -: pipe samples in, one JSON object a line: {EXAMPLE}")
        lines = sys.stdin.buffer
    left_out = LeftOut()
    samples = _read(lines) if bad_lines == REFUSE else _skipping(lines, left_out)
    return Stream(NAME, _batches(samples, batch_size), left_out=left_out)


def _batches(samples: Iterable[Sample], batch_size: int) -> Iterator[Sample]:
    waiting: list[Sample] = []
    for sample in samples:
        waiting.append(sample)
        if len(waiting) == batch_size:
            yield _together(waiting)
            waiting = []
    if waiting:
        yield _together(waiting)


def _read(lines: Iterable[bytes]) -> Iterator[Sample]:
    for sample in _samples_and_errors(lines):
        if isinstance(sample, UsageError):
            raise sample
        yield sample


def _skipping(lines: Iterable[bytes], left_out: LeftOut) -> Iterator[Sample]:
    in_a_row = 0
    for sample in _samples_and_errors(lines):
        if not isinstance(sample, UsageError):
            in_a_row = 0
            yield sample
            continue
        in_a_row += 1
        left_out.count += 1
        left_out.text = str(sample).partition(";")[0]
        if in_a_row == MOST_BAD_IN_A_ROW:
            raise UsageError(
                f"data -: the last {in_a_row} lines were no samples: {left_out.text}; a sample is {EXAMPLE}"
            )


def _samples_and_errors(lines: Iterable[bytes]) -> Iterator[Sample | UsageError]:
    shapes: tuple[torch.Size, torch.Size] | None = None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            sample = _sample(line, number, shapes)
        except UsageError as error:
            yield error
            continue
        shapes = sample[0].shape, sample[1].shape
        yield sample


def _sample(line: bytes, number: int, shapes: tuple[torch.Size, torch.Size] | None) -> Sample:
    """`shapes`: of the inputs and targets of the lines before."""
    try:
        if len(line) > MOST_CHARACTERS:
            raise ValueError(f"it has {len(line)} characters")
        read = msgspec.json.decode(line, type=Line)
        inputs, targets = torch.tensor(read.inputs), torch.tensor(read.targets)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise UsageError(
            f"data -: line {number} is no sample: {str(error).splitlines()[0]}; a sample is one JSON object such as {EXAMPLE}, "
            "and --bad-lines skip leaves such lines out"
        ) from None
    inputs = inputs.float() if inputs.is_floating_point() else inputs
    targets = targets.float() if targets.is_floating_point() else targets
    if shapes is not None and (inputs.shape, targets.shape) != shapes:
        raise UsageError(
            f"data -: line {number} has inputs of shape {tuple(inputs.shape)} and targets of {tuple(targets.shape)}, the lines "
            f"before {tuple(shapes[0])} and {tuple(shapes[1])}"
        )
    return inputs, targets


def _together(samples: list[Sample]) -> Sample:
    """1 and 1.5 are numbers of one kind, however they are written."""
    inputs = [each for each, _ in samples]
    if any(each.is_floating_point() for each in inputs):
        inputs = [each.float() for each in inputs]
    targets = [each for _, each in samples]
    if any(each.is_floating_point() for each in targets):
        targets = [each.float() for each in targets]
    return torch.stack(inputs), torch.stack(targets)
