"""Text becomes samples of one length, for models that compute their own loss from `labels`.

Documents are written one after the other, each ended by the tokeniser's end token, and cut into samples: nothing is padded.
Answers and conversations are one a sample, padded behind, with labels of -100 wherever nothing is learned. What is padded
needs no attention mask in a causal model: nobody looks ahead, and there nothing is learned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ringtmp.data.learn_answers_only import Tokens, of_chat, of_completion
from ringtmp.data.sample_or_batch import IGNORED, LABELS, OWN_LOSS
from ringtmp.data.tables_and_streams import Shape, Table, Text, subset
from ringtmp.data.text_files import Answered, Chat, Document, Item, TextFiles
from ringtmp.data.tokenizer import Encoder
from ringtmp.errors import UsageError
from ringtmp.units import bytes_text

DEFAULT_CONTEXT = 128
#: At most so many samples are tested on, evenly spread over the last tenth.
MOST_TESTS = 512
#: A long document is given to the tokeniser in pieces of so many characters, which end with a line where there is one.
_PIECE = 1 << 18
#: Seconds between two states of the line that shows progress.
_SHOW_S = 1.0


@dataclass(frozen=True)
class Reading:
    """How text is read: with which tokeniser, into samples of how many tokens, and with a mask of what is padded or not."""

    encoder: Encoder
    context: int = DEFAULT_CONTEXT
    mask: bool = False
    phase: Callable[[str], None] = lambda text: None


def tested(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of the samples for training and for the test: the last tenth, or an even choice from it."""
    cut = size - max(1, size // 10)
    return torch.arange(cut), torch.linspace(cut, size - 1, min(size - cut, MOST_TESTS)).long()


def read_text(name: str, path: Path, lines: bool, how: Reading) -> tuple[Table, Table]:
    """`text:PATH`, or with `lines` `jsonl:PATH`."""
    return _split(TextFiles.at(name, path, lines), how)


def read_files(name: str, paths: Sequence[Path], how: Reading) -> tuple[Table, Table]:
    """Every file is a document."""
    return _split(TextFiles(name, tuple(paths), lines=False), how)


def _split(files: TextFiles, how: Reading) -> tuple[Table, Table]:
    name, size_bytes = files.name, files.size_bytes
    if how.context < 2:
        raise UsageError(f"--context {how.context}: a sample needs at least 2 tokens, of which the second is learned")
    shown = _shown(files.items(), size_bytes, how.phase)
    first = next(shown, None)
    if first is None or not size_bytes:
        raise UsageError(f"data {name} is empty")
    everything = _chained(first, shown)
    whole = _packed(name, everything, how) if isinstance(first, Document) else _one_a_row(name, everything, how)
    train, test = tested(whole.size)
    return subset(whole, train), subset(whole, test)


def _chained(first: Item, rest: Iterator[Item]) -> Iterator[Item]:
    yield first
    yield from rest


def _shown(items: Iterable[tuple[Item, int]], size_bytes: int, phase: Callable[[str], None]) -> Iterator[Item]:
    """Progress is told now and then, and long documents come in pieces."""
    last = time.monotonic()
    before = 0
    for item, done in items:
        pieces = list(_pieces(item.text)) if isinstance(item, Document) else []
        for number, piece in enumerate(pieces or [""]):
            if time.monotonic() - last > _SHOW_S:
                last = time.monotonic()
                share = number / max(1, len(pieces))
                phase(f"tokenising: {bytes_text(before + share * (done - before))} of {bytes_text(size_bytes)}")
            if isinstance(item, Document):
                ends = number + 1 >= len(pieces)
                yield replace(item, text=piece, begins=number == 0, ends=ends)
            else:
                yield item
        before = done


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        stop = start + _PIECE
        if stop < len(text):
            stop = text.rfind("\n", start, stop) + 1 or stop
        yield text[start:stop]
        start = stop


def _packed(name: str, documents: Iterator[Item], how: Reading) -> Table:
    encoder, context = how.encoder, how.context
    ids, sizes = [], []
    for each in documents:
        assert isinstance(each, Document), "one kind in all files"
        found = encoder.encode(each.text)
        begin = encoder.begin if each.begins and len(found.ids) else ()
        end = (encoder.end,) if each.ends and len(found.ids) and encoder.end is not None else ()
        ids.append(np.concatenate((begin, found.ids, end)).astype(np.int32))
        sizes.append(np.concatenate(([0] * len(begin), found.bytes, [0] * len(end))).astype(np.int32))
    stream, stands_for = torch.from_numpy(np.concatenate(ids)), torch.from_numpy(np.concatenate(sizes))
    rows = len(stream) // context
    if rows < 2:
        raise UsageError(
            f"data {name} has {len(stream)} tokens, too few for two samples of {context} tokens (one to train on, one for the "
            "test): give more text, or a smaller --context"
        )
    stream = stream[: rows * context].view(rows, context)
    stands_for = stands_for[: rows * context].view(rows, context)
    text = Text(encoder.name, encoder.vocabulary, stands_for[:, 1:].sum(1))

    def take(index: torch.Tensor) -> tuple[Any, torch.Tensor]:
        taken = stream[index].long()
        labels = taken.clone()
        return {"input_ids": taken, LABELS: labels}, labels

    return Table(name, rows, Shape((context,), False, 0), take, OWN_LOSS, items="labels", text=text)


def _one_a_row(name: str, items: Iterator[Item], how: Reading) -> Table:
    encoder, context = how.encoder, how.context
    inputs, labels, sizes, lengths = [], [], [], []
    cut = empty = 0
    for each in items:
        found, learned = _tokens(encoder, each)
        cut += len(found.ids) > context
        ids, learned = found.ids[:context], learned[:context]
        if not learned[1:].any():
            empty += 1
            continue
        learned[0] = False  # nothing comes before it
        inputs.append(_filled(ids, context, encoder.padding))
        labels.append(_filled(np.where(learned, ids, IGNORED), context, IGNORED))
        sizes.append(int(found.bytes[:context][learned].sum()))
        lengths.append(len(ids))
    total = len(inputs) + empty
    if len(inputs) < 2:
        short = f": {empty} have nothing to learn within {context} tokens; give a larger --context" if empty else ""
        raise UsageError(
            f"data {name} has {len(inputs)} samples, and it needs one to train on and one for the test{short}"
        )
    remarks = [f"{cut} of {total} samples of {name} were cut at {context} tokens"] if cut else []
    if empty:
        remarks.append(
            f"{empty} of {total} samples of {name} are left out: nothing of the answer is within {context} tokens"
        )
    rows = torch.from_numpy(np.stack(inputs)), torch.from_numpy(np.stack(labels))
    text = Text(encoder.name, encoder.vocabulary, torch.tensor(sizes), tuple(remarks))
    ends = torch.tensor(lengths) if how.mask and min(lengths) < context else None

    def take(index: torch.Tensor) -> tuple[Any, torch.Tensor]:
        taken = {"input_ids": rows[0][index].long()}
        if ends is not None:
            taken["attention_mask"] = (torch.arange(context) < ends[index][:, None]).long()
        taken[LABELS] = rows[1][index].long()
        return taken, taken[LABELS]

    return Table(name, len(inputs), Shape((context,), False, 0), take, OWN_LOSS, items="labels", text=text)


def _tokens(encoder: Encoder, item: Item) -> Tokens:
    if isinstance(item, Answered):
        return of_completion(encoder, item)
    assert isinstance(item, Chat), "one kind in all files"
    return of_chat(encoder, item)


def _filled(values: Any, context: int, value: int) -> Any:
    """To the full length, behind."""
    return np.concatenate((values, np.full(context - len(values), value))).astype(np.int32)
