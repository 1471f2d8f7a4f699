"""A safetensors file written one tensor at a time, in any order, and read back in the same way: the model is never whole
in memory.

    8 bytes    length of the header, little-endian
    header     JSON: name -> dtype, shape, where its bytes begin and end; padded with spaces to a multiple of 8
    bytes      the tensors, those of wide numbers first, so that each starts where its type may start
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from ringtmp.errors import RingError, UsageError
from ringtmp.model.portable_layer import count
from ringtmp.model.run_graph import dtype_of

_KINDS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
}  # fmt: skip


class Described(NamedTuple):
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return count(self.shape) * dtype_of(self.dtype).itemsize


class TensorFile:
    """`put` every tensor, then `close`, then `check`."""

    def __init__(self, path: Path, tensors: Mapping[str, Described]) -> None:
        self._path = path
        self._tensors = dict(tensors)
        self._digests: dict[str, str] = {}
        self._begins: dict[str, int] = {}
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, each in sorted(self._tensors.items(), key=lambda item: -dtype_of(item[1].dtype).itemsize):
            dtype = dtype_of(each.dtype)
            if dtype not in _KINDS:
                raise UsageError(f"{name} is {each.dtype}, which a safetensors file cannot hold")
            self._begins[name], end = end, end + each.bytes
            header[name] = {"dtype": _KINDS[dtype], "shape": each.shape, "data_offsets": [end - each.bytes, end]}
        encoded = json.dumps(header, separators=(",", ":")).encode()
        encoded += b" " * (-len(encoded) % 8)
        self._base = 8 + len(encoded)
        self._file = path.open("wb")
        self._file.write(len(encoded).to_bytes(8, "little") + encoded)
        self._file.truncate(self._base + end)

    def put(self, name: str, tensor: torch.Tensor) -> None:
        expected = self._tensors[name]
        assert (tensor.dtype, tuple(tensor.shape)) == (dtype_of(expected.dtype), expected.shape), name
        content = _bytes(tensor)
        self._digests[name] = hashlib.sha256(content).hexdigest()
        self._file.seek(self._base + self._begins[name])
        self._file.write(content)

    def close(self) -> None:
        self._file.close()

    def check(self) -> None:
        """Reads every tensor again. RingError unless each is what was put there."""
        assert self._digests.keys() == self._tensors.keys()
        try:
            with safe_open(str(self._path), framework="pt") as file:
                wrong = set(file.keys()) ^ self._tensors.keys()
                for name in self._tensors.keys() - wrong:
                    if hashlib.sha256(_bytes(file.get_tensor(name))).hexdigest() != self._digests[name]:
                        wrong.add(name)
        except (OSError, SafetensorError) as error:
            raise RingError(f"{self._path.name} cannot be read back: {error}") from error
        if wrong:
            raise RingError(
                f"{self._path.name} read back differs from what was written: {', '.join(sorted(wrong)[:8])}"
            )


def _bytes(tensor: torch.Tensor) -> memoryview:
    view: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(view)
