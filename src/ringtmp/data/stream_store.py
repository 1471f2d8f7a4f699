"""Where a stream's batches lie as long as somebody may ask for them again: in memory, or as files in the run directory.

A file is a header and the raw memory of each tensor: a batch read back lies as it lay, because arithmetic depends on it.
Written without waiting for the disk: it is there after a killed process. A torn or damaged one is known by its checksums,
that of the header before it and that of the tensors in it, and is as good as none.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec
import torch

from ringtmp.data.tables_and_streams import leaves, map_tensors

MAGIC = b"ringtmp batch 2\n"
MEMORY_LIMIT_BYTES = 256 * 2**20
DISK_LIMIT_BYTES = 4 * 2**30
#: Also where there is little room: every checkpoint lets batches go, and it should not be one per step.
LEAST_LIMIT_BYTES = 8 * 2**20


class Spec(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def span(self) -> int:
        """Values from the first to the last, gaps between them included."""
        return _span(self.shape, self.strides)


class Header(msgspec.Struct, frozen=True):
    step: int
    arrival: int  # which of the stream's batches
    epoch: int
    mark: int  # the checksum of all batches up to this one
    tree: Any  # how inputs are nested: a number is a tensor, a list a tuple, an object a dict
    specs: tuple[Spec, ...]  # of the inputs' tensors, then of the targets
    checksum: int  # of the tensors


@dataclass(frozen=True)
class Kept:
    """A batch as it came, and where in the stream."""

    arrival: int
    epoch: int
    mark: int
    inputs: Any
    targets: torch.Tensor

    @property
    def bytes(self) -> int:
        return sum(each.nbytes for each in (*leaves(self.inputs), self.targets))


class Spool:
    """Batches by step. With `disk` they lie in the folder, and in memory only while the disk does not take them."""

    def __init__(
        self, folder: Path | None = None, memory_bytes: int = MEMORY_LIMIT_BYTES, disk: bool = False
    ) -> None:  # fmt: skip
        self._folder = folder
        self._disk = disk and folder is not None
        self._memory: dict[int, Kept] = {}
        self._files: dict[int, int] = {}  # step -> bytes
        self._memory_limit = memory_bytes
        self._disk_limit = DISK_LIMIT_BYTES
        self.memory_bytes = 0
        self.disk_bytes = 0
        self.trouble: str | None = None  # why the last batch could not be written

    @property
    def full(self) -> bool:
        return self.memory_bytes > self._memory_limit or self.disk_bytes > self._disk_limit

    def open(self, first: int) -> dict[int, tuple[int, int]]:
        """What an earlier process left from step `first` on, without a gap; the rest goes. Step -> arrival and mark."""
        found: dict[int, tuple[int, int]] = {}
        if self._folder is None:
            return found
        if not self._disk:  # the run that is resumed kept them there, and this one does not
            shutil.rmtree(self._folder, ignore_errors=True)
            return found
        with contextlib.suppress(OSError):
            for path in sorted(self._folder.iterdir()):
                header = _header(path)
                expected = header is not None and header.step == first + len(found) and path == self._path(header.step)
                if header is not None and expected and read(path) is not None:
                    found[header.step] = (header.arrival, header.mark)
                    self._files[header.step] = path.stat().st_size
                else:
                    path.unlink()
        with contextlib.suppress(OSError):
            free = shutil.disk_usage(self._folder.parent).free
            self._disk_limit = min(DISK_LIMIT_BYTES, max(LEAST_LIMIT_BYTES, free // 4))
        self.disk_bytes = sum(self._files.values())
        return found

    def put(self, step: int, kept: Kept) -> None:
        self.drop(step)
        if self._disk:
            path = self._path(step)
            try:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                size = write(path, step, kept)
            except OSError as error:
                self.trouble = error.strerror or str(error)
                with contextlib.suppress(OSError):
                    path.unlink()
            else:
                self.trouble = None
                if size is not None:
                    self._files[step] = size
                    self.disk_bytes += size
                    return
        self._memory[step] = kept
        self.memory_bytes += kept.bytes

    def get(self, step: int) -> Kept | None:
        """None if it is not there, or no longer whole."""
        if step in self._files:
            return read(self._path(step))
        return self._memory.get(step)

    def forget(self, before: int) -> None:
        for step in [each for each in (*self._memory, *self._files) if each < before]:
            self.drop(step)

    def drop(self, step: int) -> None:
        if (kept := self._memory.pop(step, None)) is not None:
            self.memory_bytes -= kept.bytes
        if step in self._files:
            self.disk_bytes -= self._files.pop(step)
            with contextlib.suppress(OSError):
                self._path(step).unlink()

    def clear(self) -> None:
        """Nobody will ask again, not even a resumed run."""
        self._memory, self._files = {}, {}
        self.memory_bytes = self.disk_bytes = 0
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self, step: int) -> Path:
        assert self._folder is not None
        return self._folder / f"{step:012d}.batch"


def write(path: Path, step: int, kept: Kept) -> int | None:
    """Bytes written; None if such a batch is better kept in memory. Raises OSError."""
    tensors = [*leaves(kept.inputs), kept.targets]
    if not all(map(_fits_a_file, tensors)):
        return None
    parts = [memory_of(each) for each in tensors]
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    specs = tuple(Spec(str(each.dtype).removeprefix("torch."), tuple(each.shape), each.stride()) for each in tensors)
    tree = _tree(kept.inputs, iter(range(len(tensors))))
    header = msgspec.json.encode(Header(step, kept.arrival, kept.epoch, kept.mark, tree, specs, checksum))
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(MAGIC + _preface(header) + header)
        for part in parts:
            file.write(part)
    return path.stat().st_size


def read(path: Path) -> Kept | None:
    """None if the file is not there or not whole."""
    tensors = []
    checksum = 0
    try:
        with path.open("rb") as file:
            header = _read_header(file)
            if header is None:
                return None
            for spec in header.specs:
                dtype: torch.dtype = getattr(torch, spec.dtype)
                raw = torch.empty(spec.span * dtype.itemsize, dtype=torch.uint8)
                file.readinto(memory_of(raw))
                checksum = zlib.crc32(memory_of(raw), checksum)
                tensors.append(raw.view(dtype).as_strided(spec.shape, spec.strides))
    except (OSError, AttributeError, RuntimeError):
        return None
    if checksum != header.checksum:
        return None
    return Kept(header.arrival, header.epoch, header.mark, _nested(header.tree, tensors), tensors[-1])


def kept_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that lies as the tensor lies, on a boundary: whoever gave it may use its memory again. One with large gaps is not
    copied."""
    if tensor.data_ptr() % 64:
        return tensor.clone()
    if not _fits_a_file(tensor):
        return tensor
    return _line(tensor).clone().as_strided(tuple(tensor.shape), tensor.stride())


def memory_of(tensor: torch.Tensor) -> memoryview:
    raw: Any = _line(tensor).view(torch.uint8).numpy()
    return memoryview(raw)


def _line(tensor: torch.Tensor) -> torch.Tensor:
    """The memory a tensor lies in, from its first value to its last."""
    return tensor.detach().as_strided((_span(tuple(tensor.shape), tensor.stride()),), (1,))


def _span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if math.prod(shape) else 0


def _fits_a_file(tensor: torch.Tensor) -> bool:
    """In plain memory, and without gaps larger than itself."""
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_complex():
        return False
    return _span(tuple(tensor.shape), tensor.stride()) <= 2 * tensor.numel()


def _header(path: Path) -> Header | None:
    try:
        with path.open("rb") as file:
            return _read_header(file)
    except OSError:
        return None


def _preface(header: bytes) -> bytes:
    """Its length and its checksum."""
    return len(header).to_bytes(4, "big") + zlib.crc32(header).to_bytes(4, "big")


def _read_header(file: IO[bytes]) -> Header | None:
    """None if it is not what was written: nothing in it is looked at before its checksum."""
    if file.read(len(MAGIC)) != MAGIC:
        return None
    preface = file.read(8)
    length = int.from_bytes(preface[:4], "big")
    if length > os.fstat(file.fileno()).st_size:
        return None
    encoded = file.read(length)
    if _preface(encoded) != preface:
        return None
    with contextlib.suppress(msgspec.DecodeError):  # of another version
        return msgspec.json.decode(encoded, type=Header)
    return None


def _tree(inputs: Any, numbers: Any) -> Any:
    if isinstance(inputs, Mapping):
        return {key: _tree(each, numbers) for key, each in inputs.items()}
    return next(numbers) if isinstance(inputs, torch.Tensor) else [_tree(each, numbers) for each in inputs]


def _nested(tree: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(tree, dict):
        return {key: _nested(each, tensors) for key, each in tree.items()}
    return tensors[tree] if isinstance(tree, int) else tuple(_nested(each, tensors) for each in tree)


def mapped(function: Callable[[torch.Tensor], torch.Tensor], kept: Kept) -> Kept:
    return Kept(kept.arrival, kept.epoch, kept.mark, map_tensors(function, kept.inputs), function(kept.targets))
