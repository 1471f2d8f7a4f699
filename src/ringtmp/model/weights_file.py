"""First weights from a safetensors file, or from a folder of them with an index, one tensor in memory at a time; or none:
mapped, a file's pages come when they are read and go when others need the room.

Never from a pickle: reading one may run whatever its author wrote into it. All that does not fit is told at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from ringtmp.errors import UsageError, some_of

_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class WeightsFile:
    """`fill` every module, then `finish`. `mapped`: the module's tensors are the file's own, where their kind is the same. The
    system reads them when they are used; what is written to them stays in memory and never reaches the file."""

    def __init__(
        self,
        path: Path,
        said: str,
        mapped: bool = False,
        key: Callable[[str], str | None] = lambda name: name,
    ) -> None:
        """`said`: what the user wrote to name it, for errors. `key`: what a tensor of the model is called in the file; None: it
        is not there."""
        self._said = said
        self._key = key
        self._mapped = mapped
        self._opened: dict[Path, Any] = {}
        self._files = dict(_found(path, said))  # name -> the file it is in
        self._names = {name: name for name in self._files}  # in the model -> in the file
        self._used: set[str] = set()
        self._missing: list[str] = []
        self._other: list[str] = []

    @property
    def names(self) -> list[str]:
        return list(self._files)

    def rename(self, own: Mapping[str, str], unused: Collection[str]) -> None:
        """`own`: what tensors of the file are called in the model. `unused`: of the file, not wanted and not missed."""
        self._names = {given: name for name, given in own.items()}
        self._used.update(unused)

    def fill(self, prefix: str, module: nn.Module) -> None:
        """Every parameter and persistent buffer gets its values, under its name in `state_dict`. A tensor that has several
        names may lie in the file under any of them."""
        tensors = own_tensors(module)
        known: dict[int, str] = {}
        wanting: dict[int, str] = {}
        for name, tensor in tensors.items():
            called = self._key(f"{prefix}{name}")
            if called is None:
                continue
            full = self._names.get(called)
            if full is None:
                wanting.setdefault(id(tensor), called)
                continue
            self._used.add(full)
            file = self._file(full)
            shape = tuple(file.get_slice(full).get_shape())
            if shape != tuple(tensor.shape):
                self._other.append(f"{full} ({_sizes(shape)} in the file, {_sizes(tuple(tensor.shape))} in the model)")
                continue
            given = file.get_tensor(full)
            if not _keeps_values(given.dtype, tensor.dtype):
                self._other.append(f"{full} ({_kind(given)} in the file, {_kind(tensor)} in the model)")
                continue
            with torch.no_grad():
                if id(tensor) in known and not torch.equal(tensor, given.to(tensor.dtype)):
                    self._other.append(f"{full} (other values than {known[id(tensor)]}, which is the same tensor)")
                    continue
                known[id(tensor)] = full
                if self._mapped and given.dtype == tensor.dtype:
                    tensor.data = given
                else:
                    tensor.copy_(given)
        self._missing += [name for at, name in wanting.items() if at not in known]

    def _file(self, name: str) -> Any:
        """Kept open if its pages become the module's. Otherwise opened anew for each tensor: what was read of it stays in
        memory until it is closed (402 MiB instead of 2 for a file of 400 MiB). Opening takes a millisecond."""
        path = self._files[name]
        if not self._mapped:
            return safe_open(str(path), framework="pt")
        if path not in self._opened:
            self._opened[path] = safe_open(str(path), framework="pt")
        return self._opened[path]

    def finish(self) -> None:
        """UsageError unless the file and the model have the same names, shapes and kinds of numbers."""
        extra = sorted(self._files.keys() - self._used)
        wrong = [
            f"{what} {some_of(names)}"
            for what, names in (
                ("it lacks", self._missing),
                ("has otherwise", self._other),
                ("has besides", extra),
            )
            if names
        ]
        if wrong:
            raise UsageError(f"{self._said} does not fit the model: {'; '.join(wrong)}")


def own_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers under all their names: the tensors themselves, whatever a hook makes of the names."""
    own = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }  # fmt: skip
    return {name: own[name] for name in module.state_dict() if name in own}


def _keeps_values(given: torch.dtype, own: torch.dtype) -> bool:
    """Whether every number of one kind is one of the other, or is rounded to its nearest."""
    if given == own:
        return True
    return given.is_floating_point and own.is_floating_point and given != torch.float64


def _kind(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def refuse_pickle(path: Path, said: str) -> None:
    if path.suffix in _PICKLED:
        raise UsageError(
            f"{said} is a pickle, which may run code when it is read: save the weights as safetensors "
            "(safetensors.torch.save_file(model.state_dict(), ...))"
        )


def _found(path: Path, said: str) -> Iterator[tuple[str, Path]]:
    refuse_pickle(path, said)
    if path.is_dir():
        yield from _of_folder(path, said)
        return
    yield from ((name, path) for name in _names(path, said))


def _of_folder(folder: Path, said: str) -> Iterator[tuple[str, Path]]:
    """By the index, which says for every name which file it is in; else of all files there."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = sorted(each.name for each in folder.iterdir() if each.suffix in _PICKLED)
        hint = (
            f"only pickled weights ({', '.join(pickled[:3])}), which may run code when read"
            if pickled
            else "no weights"
        )
        raise UsageError(f"{said} has {hint}: it needs *.safetensors")
    index = next(iter(sorted(folder.glob("*.safetensors.index.json"))), None)
    if index is None:
        places: dict[str, Path] = {}
        for file in files:
            for name in _names(file, f"{said}: {file.name}"):
                if name in places:
                    raise UsageError(f"{said}: {name} is in {places[name].name} and in {file.name}")
                places[name] = file
        yield from places.items()
        return
    try:
        listed = json.loads(index.read_bytes())["weight_map"]
        placed = {str(name): folder / str(file) for name, file in listed.items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise UsageError(f"{said}: {index.name} is no index of safetensors files: {error}") from error
    inside = sorted(each for each in set(placed.values()) if each.parent == folder and each.is_file())
    there = {file: set(_names(file, f"{said}: {file.name}")) for file in inside}
    wrong = [name for name, file in placed.items() if name not in there.get(file, ())]
    if wrong:
        raise UsageError(f"{said}: {index.name} names tensors that are not where it says: {some_of(wrong)}")
    yield from placed.items()


def _names(file: Path, said: str) -> list[str]:
    try:
        if file.exists() and not file.is_file():
            raise UsageError(f"{said} is no file")  # a pipe would be waited for
        with safe_open(str(file), framework="pt") as opened:
            return list(opened.keys())
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{said} cannot be read as safetensors: {error}") from error


def _sizes(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "a number"
