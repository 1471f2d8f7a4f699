"""Where samples come from.

A `Table` holds samples one can index: every batch is a pure function of seed and step. A `Stream` is anything that
yields ready batches in order of arrival: a DataLoader, a generator, a sensor.

Both read items as `data/sample_or_batch.py` has them: pairs, or mappings with labels.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ringtmp.data.nested_inputs import arranged, leaves, map_tensors, names
from ringtmp.data.randomness import Randomness, not_ours, restart_workers
from ringtmp.data.sample_or_batch import (
    IGNORED,
    LABELS,
    OWN_LOSS,
    Items,
    checked_pair,
    collated,
    kind_of,
    usual_loss,
    without_labels,
)  # fmt: skip
from ringtmp.errors import UsageError

__all__ = [
    "LABELS",
    "OWN_LOSS",
    "LeftOut",
    "Shape",
    "Source",
    "Stream",
    "Table",
    "Text",
    "from_python",
    "leaves",
    "map_tensors",
    "split",
    "subset",
    "tensors",
    "text_of",
    "with_loss",
]  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """What a model must know of its data: one sample's shape, and how many classes (0: not classes)."""

    inputs: tuple[int, ...]
    floating: bool
    outputs: int

    @property
    def values(self) -> int:
        total = 1
        for size in self.inputs:
            total *= size
        return total


@dataclass(frozen=True)
class Text:
    """Of a table of text in tokens, which a language model learns to continue."""

    tokenizer: str  # its name
    vocabulary: int  # every token's number is below it
    #: Of the text that the learned tokens of each sample stand for; a sample's first token is never learned.
    bytes: torch.Tensor
    remarks: tuple[str, ...] = ()  # what was done to the text that a person should know


@dataclass
class LeftOut:
    """What of a stream could not be read as samples, so far."""

    count: int = 0
    text: str = ""  # about the last one


@dataclass(frozen=True)
class Table:
    """Samples by number. `take` gives the inputs and targets of the given numbers, freshly allocated."""

    name: str
    size: int
    shape: Shape
    take: Callable[[torch.Tensor], tuple[Any, torch.Tensor]]
    #: The loss that fits the targets, unless the user names one.
    loss: str = "cross_entropy"
    #: Of a dataset, which may draw random numbers for a sample; plain tensors do not.
    randomness: Randomness | None = None
    items: Items = "pairs"
    text: Text | None = None

    def drawn(self, index: torch.Tensor, *key: object) -> tuple[Any, torch.Tensor]:
        """`take`, with every random number from the key alone."""
        if self.randomness is None:
            return self.take(index)
        with self.randomness.keyed(*key):
            return self.take(index)

    def example(self, count: int) -> tuple[Any, torch.Tensor]:
        return self.drawn(torch.arange(count) % self.size, "example")


class Stream:
    """Batches in order of arrival. Re-iterable sources give one epoch per pass; others end when they end.

    What is drawn from the global generators while it is read comes from `seed`, as in a loop that begins with
    `torch.manual_seed(seed)` and in which nothing else draws.
    """

    def __init__(
        self, name: str, batches: Iterable[Any], loss: str | None = None, seed: int = 0, left_out: LeftOut | None = None
    ) -> None:
        self.name = name
        self.left_out = left_out or LeftOut()
        self._batches = batches
        self.once = isinstance(batches, Iterator)
        #: Of every batch but the last of a pass, where the loader says so.
        declared = getattr(batches, "batch_size", None)
        self.declared_batch_size = declared if isinstance(declared, int) else None
        #: Why the order of batches cannot be reproduced; None: another reading gives the same.
        self.not_ours = not_ours(batches)
        self._randomness = Randomness(seed, None if self.once else batches)
        restart_workers(batches)
        self._iterator: Iterator[Any] | None = None
        self._first: tuple[Any, torch.Tensor] | None = None
        self.items: Items = "pairs"
        self._names: tuple[str, ...] | None = None
        self._apart = False
        self._change: Callable[[Any], Any] | None = None
        first = self._pull()
        if first is None:
            raise UsageError(f"data {name} is empty")
        self._first = first
        inputs, targets = first
        self._names = names(inputs)
        self.batch_size = leaves(inputs)[0].shape[0]
        self.loss = loss or usual_loss(self.items, targets)
        self.shape = shape_of(inputs)

    def take_labels_apart(self) -> None:
        """From now on they are not among the inputs."""
        if not self._apart:
            self._apart = True
            if self._first is not None:
                self._first = without_labels(self.name, *self._first)
                self.shape = shape_of(self._first[0])

    def change_inputs(self, change: Callable[[Any], Any]) -> None:
        """From now on the inputs of every batch are what this makes of them."""
        self._change = change
        if self._first is not None:
            self._first = change(self._first[0]), self._first[1]
            self._names = names(self._first[0])
            self.shape = shape_of(self._first[0])

    def next(self) -> tuple[Any, torch.Tensor] | None:
        """The next batch; None at the end of a pass."""
        if self._first is not None:
            first, self._first = self._first, None
            return first
        return self._pull()

    def rewind(self) -> bool:
        """Begin again, with the random numbers of the first time; False where there is no second time."""
        if self.once:
            return False
        if self._first is None:  # else nothing was read yet
            self._iterator = None
            restart_workers(self._batches)
            self._randomness.reset()
        return True

    def example(self, count: int) -> tuple[Any, torch.Tensor]:
        """`count` samples of the first batch, repeated as needed; the batch itself is not used up."""
        assert self._first is not None, "examples are taken before training starts"
        inputs, targets = self._first
        index = torch.arange(count) % self.batch_size
        return map_tensors(lambda each: each[index], inputs), targets[index]

    def _pull(self) -> tuple[Any, torch.Tensor] | None:
        with self._randomness.reading():
            if self._iterator is None:
                self._iterator = iter(self._batches)
            item = next(self._iterator, None)
        if item is None:
            self._iterator = None
            return None
        self.items = kind_of(item)
        inputs, targets = checked_pair(self.name, item)
        if self._change is not None:
            inputs = self._change(inputs)
        if self._names is not None:
            inputs = arranged(inputs, self._names, f"a batch of {self.name}")
        return without_labels(self.name, inputs, targets) if self._apart else (inputs, targets)


Source = Table | Stream


def text_of(source: Source) -> Text | None:
    """None: it was not read by a tokeniser of ours."""
    return source.text if isinstance(source, Table) else None


def with_loss(source: Source, given: str | None) -> tuple[Source, str]:
    """The data as this loss takes it, and the loss: the one that fits the data unless one is given."""
    if source.items == "pairs" or given == OWN_LOSS:
        return source, given or source.loss
    if source.items == "inputs":
        raise UsageError(
            f"data {source.name} gives dicts without {LABELS!r}: name the targets {LABELS!r}, give (inputs, targets) pairs, or "
            f'use loss="{OWN_LOSS}" if the model computes its loss from what is there'
        )
    if given is None:
        return source, source.loss
    if isinstance(source, Stream):
        source.take_labels_apart()
        return source, given
    whole = source

    def take(index: torch.Tensor) -> tuple[Any, torch.Tensor]:
        return without_labels(whole.name, *whole.take(index))

    inputs, _ = replace(whole, take=take).example(1)
    return replace(whole, take=take, items="pairs", shape=replace(shape_of(inputs), outputs=whole.shape.outputs)), given


def shape_of(inputs: Any, outputs: int = 0) -> Shape:
    sample = leaves(inputs)[0]
    return Shape(tuple(sample.shape[1:]), sample.is_floating_point(), outputs)


def tensors(name: str, inputs: torch.Tensor, targets: torch.Tensor, outputs: int | None = None) -> Table:
    """A table over two tensors of equal length. Integer targets are classes."""
    if len(inputs) != len(targets) or not len(inputs):
        raise UsageError(
            f"data {name} has {len(inputs)} inputs and {len(targets)} targets: it needs the same number of each, at least one"
        )
    classes = not targets.is_floating_point()
    if classes:
        targets = targets.long()
        below = (targets < 0) & (targets != IGNORED)
        if bool(below.any()):
            row = int(below.nonzero()[0][0])
            raise UsageError(f"data {name}: sample {row} has label {int(targets[below][0])}: labels start at 0")
    width = outputs or (int(targets.max()) + 1 if classes else (targets.shape[1] if targets.dim() > 1 else 1))
    if classes and int(targets.max()) >= width:
        raise UsageError(f"data {name}: label {int(targets.max())} is out of range 0..{width - 1}")
    shape = Shape(tuple(inputs.shape[1:]), inputs.is_floating_point(), width)

    def take(index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return inputs[index], targets[index]

    return Table(name, len(inputs), shape, take, "cross_entropy" if classes else "mse")


def from_python(data: Any, name: str = "given", seed: int = 0) -> Source:
    """What a user passes to `fit`: tensors, a map-style Dataset, a DataLoader, any iterable of batches."""
    if isinstance(data, Table | Stream):
        return data
    if isinstance(data, tuple | list) and len(data) == 2 and _is_whole(data[0]) and _is_whole(data[1], alone=True):
        inputs, targets = _tensors(data[0]), _tensors(data[1])
        if isinstance(inputs, torch.Tensor):
            return tensors(name, inputs, targets)
        return _whole(name, (inputs, targets))
    if isinstance(data, Mapping):
        if not _is_whole(data):
            raise UsageError(f"data {name}: a dict must hold tensors of all samples, or give a Dataset of dicts")
        return _whole(name, _tensors(data))
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, tuple | list):
        return _dataset(name, data)
    if isinstance(data, Iterable):
        return Stream(name, data, seed=seed)
    if inspect.isgeneratorfunction(data):
        raise UsageError(f"{data.__name__} is a generator function, not data: call it, {data.__name__}()")
    raise UsageError(
        f"a {type(data).__name__} is not data: give (inputs, targets) tensors, a Dataset, a DataLoader or an "
        "iterable of (inputs, targets) batches"
    )


def _is_whole(part: Any, alone: bool = False) -> bool:
    """Tensors or arrays of all samples; unless `alone`, also in tuples and mappings."""
    if isinstance(part, torch.Tensor | np.ndarray):
        return True
    if alone or not isinstance(part, Mapping | tuple | list) or not part:
        return False
    return all(_is_whole(each) for each in (part.values() if isinstance(part, Mapping) else part))


def _tensors(part: Any) -> Any:
    if isinstance(part, np.ndarray):
        tensor = torch.from_numpy(np.ascontiguousarray(part))
        return tensor.float() if tensor.is_floating_point() else tensor
    if isinstance(part, Mapping):
        return {key: _tensors(item) for key, item in part.items()}
    return part if isinstance(part, torch.Tensor) else tuple(_tensors(item) for item in part)


def _whole(name: str, item: Any) -> Table:
    """A table over several tensors of equal length."""
    inputs, targets = checked_pair(name, item)
    classes = not targets.is_floating_point() and targets.dim() == 1

    def take(index: torch.Tensor) -> tuple[Any, torch.Tensor]:
        given = map_tensors(lambda each: each[index], inputs)
        return given, given[LABELS] if kind_of(item) == "labels" else targets[index]

    shape = shape_of(inputs, int(targets.max()) + 1 if classes else 0)
    return Table(name, len(targets), shape, take, usual_loss(kind_of(item), targets), items=kind_of(item))


def _dataset(name: str, data: Any) -> Table:
    if not len(data):
        raise UsageError(f"data {name} is empty")
    known: list[tuple[str, ...]] = []
    kinds: list[Items] = []

    def take(index: torch.Tensor) -> tuple[Any, torch.Tensor]:
        item = collated(name, [data[i] for i in index.tolist()])
        inputs, targets = checked_pair(name, item)
        if not known:
            known.append(names(inputs))
            kinds.append(kind_of(item))
        return arranged(inputs, known[0], f"a sample of {name}"), targets

    randomness = Randomness(0, data)
    with randomness.keyed("shape"):
        inputs, targets = take(torch.zeros(1, dtype=torch.long))
    loss = usual_loss(kinds[0], targets)
    return Table(name, len(data), shape_of(inputs), take, loss, randomness, kinds[0])


def split(table: Table, test_share: float, seed: int) -> tuple[Table, Table]:
    """Train and test parts of one table, by a permutation that depends on nothing but the seed and the size."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(table.size, generator=generator)
    cut = table.size - max(1, round(table.size * test_share))
    if cut < 1:
        raise UsageError(f"data {table.name} has {table.size} samples: too few for a train and a test part")
    return subset(table, order[:cut]), subset(table, order[cut:])


def subset(table: Table, index: torch.Tensor) -> Table:
    text = None if table.text is None else replace(table.text, bytes=table.text.bytes[index])
    return replace(table, size=len(index), take=lambda numbers: table.take(index[numbers]), text=text)
