"""Randomness while data is read: it comes from the run's seed, and every generator is left as it was.

A DataLoader that shuffles, a sampler that draws, a random transform all use the global generators (torch, random, numpy)
or one of their own. Reading happens between layers, which seed torch's generator too, and after whatever else the process
has drawn. So a stream has states of its own: they are put in place while a batch is read and taken out afterwards.
"""

from __future__ import annotations

import functools
import hashlib
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any, Protocol

import numpy as np
import torch

#: How deep, and over how many objects, generators are looked for in a loader and its dataset.
MOST_DEPTH = 6
MOST_OBJECTS = 10_000
_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class Source(Protocol):
    """Somewhere random numbers come from."""

    def state(self) -> Any: ...
    def put(self, state: Any) -> None: ...
    def seed(self, seed: int) -> None: ...


class _Torch:
    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def state(self) -> Any:
        return self._generator.get_state()

    def put(self, state: Any) -> None:
        self._generator.set_state(state)

    def seed(self, seed: int) -> None:
        self._generator.manual_seed(seed)


class _Python:
    def __init__(self, generator: Any) -> None:  # the module itself, or a random.Random
        self._generator = generator

    def state(self) -> Any:
        return self._generator.getstate()

    def put(self, state: Any) -> None:
        self._generator.setstate(state)

    def seed(self, seed: int) -> None:
        self._generator.seed(seed)


class _NumPyLegacy:
    def __init__(self, generator: Any) -> None:  # numpy.random itself, or a RandomState
        self._generator = generator

    def state(self) -> Any:
        return self._generator.get_state(legacy=False)

    def put(self, state: Any) -> None:
        self._generator.set_state(state)

    def seed(self, seed: int) -> None:
        self._generator.seed(seed % 2**32)


class _NumPy:
    def __init__(self, generator: np.random.Generator) -> None:
        self._bits: Any = generator.bit_generator

    def state(self) -> Any:
        return self._bits.state

    def put(self, state: Any) -> None:
        self._bits.state = state

    def seed(self, seed: int) -> None:
        self._bits.state = type(self._bits)(seed % 2**64).state


def _globals() -> list[Source]:
    return [_Torch(torch.default_generator), _Python(random), _NumPyLegacy(np.random)]


class Randomness:
    """The states with which one stream is read. The global generators start from `seed`; those that a loader or its dataset
    was given start as they are now, because whoever gave them chose their state."""

    def __init__(self, seed: int, data: Any) -> None:
        self._seed = seed
        self._own = [source for each in own_generators(data) if (source := _as_source(each)) is not None]
        self._at_first = [each.state() for each in self._own]
        self._states: list[Any] = []
        self.reset()

    def reset(self) -> None:
        """Back to the beginning."""
        sources = _globals()
        before = [each.state() for each in sources]
        for each in sources:
            each.seed(self._seed)
        self._states = [*(each.state() for each in sources), *self._at_first]
        _put(sources, before)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """What is drawn here comes from this stream's states."""
        sources = [*_globals(), *self._own]
        before = [each.state() for each in sources]
        _put(sources, self._states)
        try:
            yield
        finally:
            self._states = [each.state() for each in sources]
            _put(sources, before)

    @contextmanager
    def keyed(self, *key: object) -> Iterator[None]:
        """What is drawn here depends on the key alone, whatever was drawn before."""
        sources = [*_globals(), *self._own]
        before = [each.state() for each in sources]
        number = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=7).digest(), "big")
        for each in sources:
            each.seed(number)
        try:
            yield
        finally:
            _put(sources, before)


@contextmanager
def left_alone() -> Iterator[None]:
    """The global generators are afterwards as they were."""
    sources = _globals()
    before = [each.state() for each in sources]
    try:
        yield
    finally:
        _put(sources, before)


def _put(sources: Iterable[Source], states: Iterable[Any]) -> None:
    for source, state in zip(sources, states, strict=True):
        source.put(state)


def _as_source(generator: Any) -> Source | None:
    if generator is torch.default_generator:
        return None
    if isinstance(generator, torch.Generator):
        return _Torch(generator)
    if isinstance(generator, np.random.Generator):
        return _NumPy(generator)
    if isinstance(generator, np.random.RandomState):
        return None if generator is np.random.mtrand._rand else _NumPyLegacy(generator)
    return None if isinstance(generator, random.SystemRandom) else _Python(generator)


def own_generators(data: Any) -> list[Any]:
    """Every generator within reach of a loader or dataset: its sampler's, its transforms', in lists and attributes, and what
    its functions know by name."""
    found: dict[int, Any] = {}
    seen: set[int] = set()
    todo: list[tuple[Any, int]] = [(data, 0)]
    while todo and len(seen) < MOST_OBJECTS:
        each, depth = todo.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, _KINDS):
            found[id(each)] = each
        elif depth < MOST_DEPTH:
            todo += [(inner, depth + 1) for inner in _within(each)]
    return list(found.values())


def _within(each: Any) -> Iterable[Any]:
    if isinstance(each, torch.Tensor | np.ndarray | str | bytes | int | float | type):
        return ()
    if isinstance(each, dict):
        return each.values()
    if isinstance(each, list | tuple | set):
        # Of a long list its beginning: samples, not transforms.
        return list(each)[:64] if len(each) > 64 else each
    if isinstance(each, functools.partial):
        return (each.func, *each.args, *each.keywords.values())
    if isinstance(each, MethodType):
        return (each.__self__, each.__func__)
    if isinstance(each, FunctionType):
        return _known_to(each)
    methods = [value for kind in type(each).__mro__ if _of_user(kind) for value in vars(kind).values()]
    return [*getattr(each, "__dict__", {}).values(), *(value for value in methods if isinstance(value, FunctionType))]


def _known_to(function: FunctionType) -> list[Any]:
    """What a function's names stand for, as far as generators may be behind them."""
    found = list(function.__defaults__ or ())
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not filled yet
            continue
    named = (function.__globals__.get(name) for name in function.__code__.co_names)
    return found + [value for value in named if isinstance(value, (*_KINDS, FunctionType))]


def _of_user(kind: type) -> bool:
    root = kind.__module__.partition(".")[0]
    return root == "__main__" or (root not in sys.stdlib_module_names and root not in ("torch", "numpy"))


class Repeatable:
    """Batches whose order depends on nothing but the random numbers drawn while they are read."""


def not_ours(data: Any) -> str | None:
    """Why nobody can promise that these batches come again in this order; None where they do."""
    from torch.utils.data import DataLoader, IterableDataset

    if isinstance(data, list | tuple | Repeatable):
        return None
    if not isinstance(data, DataLoader):
        return f"batches come as a {type(data).__name__} gives them"
    if type(data).__iter__ is not DataLoader.__iter__:
        return f"batches come as a {type(data).__name__}, a DataLoader of your own, gives them"
    if isinstance(data.dataset, IterableDataset):
        return f"samples come as {type(data.dataset).__name__}, an IterableDataset, gives them"
    for sampler in _samplers(data):
        if not (isinstance(sampler, list | tuple | range) or type(sampler).__module__.startswith("torch.utils.data.")):
            return f"the order is that of {type(sampler).__name__}, a sampler of your own"
    if data.num_workers and not getattr(data, "in_order", True):
        return "the DataLoader gives batches in the order in which its workers finish (in_order=False)"
    return None


def _samplers(loader: Any) -> list[Any]:
    """A loader's sampler and batch sampler, and those within."""
    found: list[Any] = []
    todo = [loader.batch_sampler, loader.sampler]
    while todo:
        each = todo.pop()
        if each is None or any(each is other for other in found):
            continue
        found.append(each)
        if not isinstance(each, list | tuple | range):
            todo.append(getattr(each, "sampler", None))
    return found


def restart_workers(data: Any) -> None:
    """Workers that outlive a pass (`persistent_workers`) continue with their random numbers; new ones are seeded again."""
    if getattr(data, "persistent_workers", False) and getattr(data, "_iterator", None) is not None:
        data._iterator = None
