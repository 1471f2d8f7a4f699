"""A tensor as a description and raw bytes, and back again with the same memory layout.

Layout matters for bits: matrix kernels choose their path by strides and by alignment. So strides travel, and the
distance from a 64-byte boundary too; a received tensor lies in memory as it lay at the sender.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec
import torch

from ringtmp.errors import ProtocolError

ALIGNMENT = 64
_DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
    "complex64": torch.complex64,
}
#: Those Python's own memory views know.
_PLAIN = {torch.float32, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
MAX_DIMENSIONS = 16


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0  # elements past a 64-byte boundary

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Payload on the wire."""
        return self.count * _DTYPES[self.dtype].itemsize

    @property
    def extent(self) -> int:
        """Elements between the first and the last, both included: what must be allocated."""
        if self.count == 0:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))


def describe(tensor: torch.Tensor, copy_up_to: int = 0) -> tuple[TensorSpec, memoryview | bytes]:
    """The description and the tensor's values as bytes: a copy up to so many, else the tensor's own memory unless it has
    holes or overlaps."""
    if not tensor.is_cpu:
        tensor = tensor.detach().cpu()
    start = tensor.data_ptr()
    spec, nbytes = _spec(tensor.dtype, tensor.shape, tensor.stride(), start % ALIGNMENT)
    if nbytes <= copy_up_to and _packed(spec) and not (tensor.is_neg() or tensor.is_conj()):
        return spec, ctypes.string_at(start, nbytes) if nbytes else b""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return spec, raw_bytes(tensor)
    flat = _in_memory_order(tensor) if _packed(spec) else tensor
    return spec, raw_bytes(flat.contiguous())


@lru_cache(maxsize=256)  # the same few tensors leave with every microbatch
def _spec(dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], past: int) -> tuple[TensorSpec, int]:
    """The description of a tensor that begins so many bytes past a boundary, and its bytes."""
    name = _NAMES.get(dtype)
    if name is None:
        raise ProtocolError(f"tensors of {dtype} cannot travel")
    spec = TensorSpec(name, tuple(shape), tuple(strides), past // dtype.itemsize)
    return spec, spec.nbytes


@lru_cache(maxsize=256)
def _packed(spec: TensorSpec) -> bool:
    """Whether its bytes are those of its memory from the first element on: no holes, no overlaps."""
    expected = 1
    for stride, size in sorted(
        (stride, size) for stride, size in zip(spec.strides, spec.shape, strict=True) if size != 1
    ):
        if stride != expected:
            return spec.count == 0
        expected *= size
    return True


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """A contiguous tensor's memory, not copied."""
    if tensor.dtype in _PLAIN and tensor.numel() and tensor.dim():
        plain: Any = tensor.numpy()
        return memoryview(plain).cast("B")  # two steps less than the way for all
    view: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(view)


def check(spec: TensorSpec, limit_bytes: int) -> int:
    """The bytes it will take. Refuses a description no honest peer sends, before memory is taken."""
    needed = _needed(spec)
    if needed > limit_bytes:
        raise ProtocolError(f"a tensor of {needed} bytes is over the limit of {limit_bytes}")
    return needed


@lru_cache(maxsize=256)  # the same few descriptions come with every microbatch
def _needed(spec: TensorSpec) -> int:
    if spec.dtype not in _DTYPES:
        raise ProtocolError(f"unknown dtype {spec.dtype!r}")
    itemsize = _DTYPES[spec.dtype].itemsize
    if len(spec.shape) != len(spec.strides) or len(spec.shape) > MAX_DIMENSIONS:
        raise ProtocolError(f"shape {spec.shape} and strides {spec.strides} do not fit together")
    if any(size < 0 or stride < 0 for size, stride in zip(spec.shape, spec.strides, strict=True)):
        raise ProtocolError(f"negative size or stride in {spec.shape}, {spec.strides}")
    if not 0 <= spec.offset * itemsize < ALIGNMENT:
        raise ProtocolError(f"offset {spec.offset} is not within {ALIGNMENT} bytes")
    return max(spec.extent, spec.count) * itemsize


@lru_cache(maxsize=256)
def _extent_and_count(spec: TensorSpec) -> tuple[int, int]:
    return spec.extent, spec.count


class Landing:
    """Memory for one arriving tensor: fill `place` piece by piece, then `finish`."""

    def __init__(self, spec: TensorSpec) -> None:
        dtype = _DTYPES[spec.dtype]
        extent, count = _extent_and_count(spec)
        if spec.offset == 0 and extent == count:
            self._tensor = torch.empty_strided(spec.shape, spec.strides, dtype=dtype)
        else:
            storage = torch.empty(spec.offset + extent, dtype=dtype)
            self._tensor = storage.as_strided(spec.shape, spec.strides, spec.offset)
        self.size = count * dtype.itemsize
        self._dense = None if _packed(spec) else torch.empty(spec.shape, dtype=dtype)
        self._bytes: memoryview | None = None

    def place(self, start: int, piece: memoryview | bytes) -> None:
        if self._bytes is None:
            flat = self._tensor if self._dense is None else self._dense
            self._bytes = raw_bytes(flat if flat.is_contiguous() else _in_memory_order(flat))
        self._bytes[start : start + len(piece)] = piece

    def fill(self, data: bytes) -> None:
        """All of it at once."""
        if len(data) != self.size:
            raise ProtocolError("other tensor bytes than the message announced")
        if self._dense is None:
            ctypes.memmove(self._tensor.data_ptr(), data, self.size)
        else:
            self.place(0, data)

    def finish(self) -> torch.Tensor:
        if self._dense is not None:
            # An expanded tensor has one element in many places: write each once.
            one = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in self._tensor.stride())
            try:
                self._tensor[one].copy_(self._dense[one])
            except RuntimeError as error:
                raise ProtocolError(f"strides {self._tensor.stride()} make elements overlap") from error
        return self._tensor


def _in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda axis: (-strides[axis], axis))
    return tensor.permute(order)


def payload(
    tensors: Sequence[torch.Tensor | None], copy_up_to: int = 0
) -> tuple[tuple[TensorSpec | None, ...], list[memoryview | bytes]]:
    """Descriptions (None for a hole, such as a gradient nobody needs) and the bytes of those that are there; small ones are
    copied."""
    specs: list[TensorSpec | None] = []
    views: list[memoryview | bytes] = []
    for tensor in tensors:
        if tensor is None:
            specs.append(None)
        else:
            spec, view = describe(tensor, copy_up_to)
            specs.append(spec)
            views.append(view)
    return tuple(specs), views
