"""A stream's batches by step: read once, kept as long as they may be asked for, and told of when they cannot be had again."""

from __future__ import annotations

import zlib
from typing import Any, Literal

import msgspec
import torch

from ringtmp.data.stream_store import Kept, Spool, kept_copy, mapped, memory_of
from ringtmp.data.tables_and_streams import Stream, Table, leaves
from ringtmp.errors import UsageError

Keep = Literal["memory", "disk", "none"]


class StreamPlace(msgspec.Struct, frozen=True):
    """Where in its stream a run is before a step, for its checkpoint."""

    arrived: int | None = None  # batches read so far, skipped ones included; None: as many as steps
    mark: int | None = None  # their checksum, one after the other; None: not known
    skipped: int = 0  # samples that could not be had again after a loss
    strayed: bool = False  # the batches are no longer those of an undisturbed run
    batch_size: int | None = None  # that the loader declares; None: it declares none


class Stray(msgspec.Struct, frozen=True):
    """From `step` on, batches are not those that an undisturbed run would have."""

    step: int
    skipped: int  # samples
    text: str


#: So many samples of a table, evenly spread, and its size tell whether it is the one of before.
MARKED_SAMPLES = 16


class TableMark:
    """Whether the table of a resumed run is the one it began with, as far as a few samples tell."""

    def __init__(self, table: Table, seed: int) -> None:
        self._table = table
        self._seed = seed
        self._strayed = False
        self._known: int | None = None
        self.strays: list[Stray] = []

    def go_on(self, step: int, place: StreamPlace) -> None:
        first, second = self._checksum(), self._checksum()
        self._known = first if first == second else None  # one that differs from itself says nothing
        self._strayed = place.strayed
        if None not in (place.mark, self._known) and place.mark != self._known:
            self._strayed = True
            text = f"the data ({self._table.name}) is not what it was before step {step}: this run goes on with other batches"
            self.strays.append(Stray(step, 0, text))

    def place(self) -> StreamPlace:
        return StreamPlace(None, self._known, 0, self._strayed)

    def _checksum(self) -> int:
        index = torch.linspace(0, self._table.size - 1, min(MARKED_SAMPLES, self._table.size)).long()
        return checksum(self._table.drawn(index, self._seed, "mark"), self._table.size)


class Arrivals:
    def __init__(self, stream: Stream, spool: Spool, keep: Keep = "memory") -> None:
        self._stream = stream
        self._spool = spool
        self._keep = keep
        self._read = 0  # batches taken from the stream, from its beginning
        self._epoch = 0
        self._mark = 0
        self._ahead = 0  # batches skipped: step S has the batch number S + ahead
        self._marks: dict[int, int] = {}  # by the number of batches read
        self._samples: dict[int, int] = {}  # of the steps since the last checkpoint
        self._last: tuple[int, Kept] | None = None
        self.skipped = 0
        self.strayed = False
        self.strays: list[Stray] = []

    def go_on(self, step: int, place: StreamPlace) -> None:
        """A run begins at this step, or goes on from there."""
        given, before = self._stream.declared_batch_size, place.batch_size
        if None not in (given, before) and given != before:
            raise UsageError(
                f"data {self._stream.name} gives batches of {given}, where the run had batches of {before}: give a loader with "
                f"batch_size={before}, or start a new run"
            )
        self.skipped, self.strayed = place.skipped, place.strayed
        if place.arrived is not None:
            self._ahead = place.arrived - step
            if place.mark is not None:
                self._marks[place.arrived] = place.mark
        for each, (arrival, mark) in self._spool.open(step).items():
            if arrival - each > self._ahead:  # skipped between the checkpoint and the end
                self.skipped += (arrival - each - self._ahead) * self._stream.batch_size
                self._ahead, self.strayed = arrival - each, True
            self._marks[arrival + 1] = mark

    def place(self, step: int) -> StreamPlace:
        arrived = step + self._ahead
        mark = self._marks.get(arrived, 0 if not arrived else None)
        return StreamPlace(arrived, mark, self.skipped, self.strayed, self._stream.declared_batch_size)

    def get(self, step: int) -> Kept | None:
        """The batch of this step; None when the stream has ended for good."""
        if self._last is not None and self._last[0] == step:
            return self._last[1]
        kept = self._spool.get(step)
        if kept is None:
            kept = self._take(step)
            if kept is None:
                return None
            if self._keep != "none":
                kept = mapped(kept_copy, kept)
                self._spool.put(step, kept)
        self._samples[step] = len(kept.targets)
        self._last = (step, kept)
        return kept

    def forget(self, before: int) -> None:
        """Nobody will ask again for a step before this one."""
        self._spool.forget(before)
        oldest = before + self._ahead
        self._marks = {count: mark for count, mark in self._marks.items() if count >= oldest}
        self._samples = {step: samples for step, samples in self._samples.items() if step >= before}

    def _take(self, step: int) -> Kept | None:
        """From the stream. What was read for steps before a resume is read and dropped: a stream has no other way there.
        Nothing is read ahead: a slow stream's batch is used the moment it is there."""
        if step + self._ahead < self._read:  # asked for again, and nobody has it
            if self._stream.not_ours is None and self._stream.rewind():
                self._read = self._epoch = self._mark = 0
            else:
                self._skip(step)
        while True:
            item = self._stream.next()
            if item is None:  # the end of a pass; a generator has no second one
                item = self._stream.next()
                if item is None:
                    return None
                self._epoch += 1
            self._mark = checksum(item, self._mark)
            self._read += 1
            self._compare(step)
            if self._read == step + self._ahead + 1:
                inputs, targets = item
                return Kept(self._read - 1, self._epoch, self._mark, inputs, targets)

    def _skip(self, step: int) -> None:
        """Those who knew the batches since `step` are gone, and the batches too: on with the next one."""
        count = self._read - step - self._ahead
        usual = self._stream.batch_size
        samples = sum(self._samples.get(each, usual) for each in range(step, step + count))
        self._spool.forget(step + count)
        self._ahead += count
        self.skipped += samples
        self.strayed = True
        text = (
            f"{samples} samples of {self._stream.name} are skipped: the {count} batches since step {step} were lost with the "
            "nodes that had learnt from them, and the stream gives a batch only once"
        )
        self.strays.append(Stray(step, samples, text))

    def _compare(self, step: int) -> None:
        """With what was read here before, by this process or the one that is resumed."""
        before = self._marks.setdefault(self._read, self._mark)
        if before != self._mark:
            self._marks = {self._read: self._mark}
            self.strayed = True
            text = (
                f"{self._stream.name} gives other batches than before, or in another order: the run goes on with them"
            )
            self.strays.append(Stray(step, 0, text))


def checksum(item: tuple[Any, torch.Tensor], before: int) -> int:
    inputs, targets = item
    value = before
    for tensor in (*leaves(inputs), targets):
        value = zlib.crc32(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), value)
        if tensor.layout == torch.strided:
            value = zlib.crc32(memory_of(tensor.detach().cpu().contiguous()), value)
    return value
