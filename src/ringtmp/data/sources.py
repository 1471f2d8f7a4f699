"""Where samples come from.

A `Table` holds samples one can index: every batch is a pure function of seed and step. A `Stream` is anything that
yields ready batches in order of arrival: a DataLoader, a generator, a sensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ringtmp.data.randomness import Randomness, not_ours, restart_workers
from ringtmp.errors import UsageError


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

    def __init__(self, name: str, batches: Iterable[Any], loss: str | None = None, seed: int = 0) -> None:
        self.name = name
        self._batches = batches
        self.once = isinstance(batches, Iterator)
        #: Why the order of batches cannot be reproduced; None: another reading gives the same.
        self.not_ours = not_ours(batches)
        self._randomness = Randomness(seed, None if self.once else batches)
        restart_workers(batches)
        self._iterator: Iterator[Any] | None = None
        self._first: tuple[Any, torch.Tensor] | None = None
        first = self._pull()
        if first is None:
            raise UsageError(f"data {name} is empty")
        self._first = first
        inputs, targets = first
        self.batch_size = leaves(inputs)[0].shape[0]
        self.loss = loss or ("cross_entropy" if not targets.is_floating_point() else "mse")
        sample = leaves(inputs)[0]
        self.shape = Shape(tuple(sample.shape[1:]), sample.is_floating_point(), 0)

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
        return checked_pair(self.name, item)


Source = Table | Stream


def leaves(inputs: Any) -> list[torch.Tensor]:
    """The tensors in an input that may be a tensor or a tuple of inputs."""
    if isinstance(inputs, torch.Tensor):
        return [inputs]
    if isinstance(inputs, tuple | list) and inputs:
        return [leaf for item in inputs for leaf in leaves(item)]
    raise UsageError(f"inputs must be tensors or tuples of tensors, not {type(inputs).__name__}")


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], inputs: Any) -> Any:
    if isinstance(inputs, torch.Tensor):
        return function(inputs)
    return tuple(map_tensors(function, item) for item in inputs)


def checked_pair(name: str, item: Any) -> tuple[Any, torch.Tensor]:
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise UsageError(f"data {name} must give (inputs, targets) pairs, not {type(item).__name__}")
    inputs, targets = item
    if not isinstance(targets, torch.Tensor):
        raise UsageError(f"data {name}: targets must be a tensor, not {type(targets).__name__}")
    sizes = {leaf.shape[0] if leaf.dim() else 0 for leaf in (*leaves(inputs), targets)}
    if len(sizes) != 1 or 0 in sizes:
        raise UsageError(f"data {name}: inputs and targets of one batch have different lengths: {sorted(sizes)}")
    return inputs, targets


def tensors(name: str, inputs: torch.Tensor, targets: torch.Tensor, outputs: int | None = None) -> Table:
    """A table over two tensors of equal length. Integer targets are classes."""
    if len(inputs) != len(targets) or not len(inputs):
        raise UsageError(
            f"data {name} has {len(inputs)} inputs and {len(targets)} targets: it needs the same number of each, at least one"
        )
    classes = not targets.is_floating_point()
    if classes:
        targets = targets.long()
        below = (targets < 0) & (targets != -100)  # torch's cross-entropy leaves -100 out
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
    """What a user passes to `fit`: a pair of tensors, a map-style Dataset, a DataLoader, any iterable of batches."""
    if isinstance(data, Table | Stream):
        return data
    if isinstance(data, tuple | list) and len(data) == 2 and all(isinstance(each, np.ndarray) for each in data):
        data = tuple(torch.from_numpy(np.ascontiguousarray(each)) for each in data)
        data = tuple(each.float() if each.is_floating_point() else each for each in data)
    if isinstance(data, tuple | list) and len(data) == 2 and all(isinstance(each, torch.Tensor) for each in data):
        return tensors(name, data[0], data[1])
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, tuple | list):
        return _dataset(name, data)
    if isinstance(data, Iterable):
        return Stream(name, data, seed=seed)
    raise UsageError(
        f"a {type(data).__name__} is not data: give (inputs, targets) tensors, a Dataset, a DataLoader or an "
        "iterable of (inputs, targets) batches"
    )


def _dataset(name: str, data: Any) -> Table:
    from torch.utils.data import default_collate

    if not len(data):
        raise UsageError(f"data {name} is empty")

    def take(index: torch.Tensor) -> tuple[Any, torch.Tensor]:
        inputs, targets = checked_pair(name, default_collate([data[i] for i in index.tolist()]))
        return inputs, targets

    randomness = Randomness(0, data)
    with randomness.keyed("shape"):
        inputs, targets = take(torch.zeros(1, dtype=torch.long))
    sample = leaves(inputs)[0]
    shape = Shape(tuple(sample.shape[1:]), sample.is_floating_point(), 0)
    loss = "cross_entropy" if not targets.is_floating_point() else "mse"
    return Table(name, len(data), shape, take, loss, randomness)


def split(table: Table, test_share: float, seed: int) -> tuple[Table, Table]:
    """Train and test parts of one table, by a permutation that depends on nothing but the seed and the size."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(table.size, generator=generator)
    cut = table.size - max(1, round(table.size * test_share))
    if cut < 1:
        raise UsageError(f"data {table.name} has {table.size} samples: too few for a train and a test part")
    return subset(table, order[:cut]), subset(table, order[cut:])


def subset(table: Table, index: torch.Tensor) -> Table:
    return replace(table, size=len(index), take=lambda numbers: table.take(index[numbers]))
