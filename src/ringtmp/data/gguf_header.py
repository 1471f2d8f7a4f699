"""What a GGUF file has in it, and whether it has all that its header says, before a library reads it.

    magic, version, number of tensors, number of fields
    fields     name, kind, value; an array has the kind of its values and how many there are
    tensors    name, sizes, kind, where it begins behind the header

The gguf package believes every length. Past the end of the file it reads nothing, without an error, as often as it was told:
one damaged number fills the memory, or takes years. And it makes two objects of every word of a vocabulary: of 49,152 words and
48,900 merges, 156 MiB. Who asks for no words gives it a copy of the header without them.
"""

from __future__ import annotations

import importlib
import math
import mmap
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

#: Bytes of each kind of number, as GGUF counts the kinds.
_NUMBERS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_UINT32, _STRING, _ARRAY = 4, 8, 9
_FLOAT32_TENSOR = 0
#: In all arrays together: the gguf package makes an object of each value. A vocabulary of 262,144 has 1.3 million.
MOST_VALUES = 2**22
MOST_DIMENSIONS, MOST_NESTED = 4, 4
DEFAULT_ALIGNMENT = 32
#: Longer arrays are vocabularies and what belongs to them; a number for every layer stays in a copy of the header.
MOST_KEPT = 1024
_TOKENS = b"tokenizer.ggml.tokens"


@dataclass(frozen=True)
class StoredTensor:
    name: str
    shape: tuple[int, ...]  # as in torch: rows first
    kind: int  # of its numbers, as GGUF counts the kinds
    begin: int  # its first byte in the file
    size_bytes: int


@dataclass(frozen=True)
class GgufHeader:
    tensors: tuple[StoredTensor, ...]
    vocabulary: int  # words; 0: the file has none
    #: Whether its numbers are written in this machine's order.
    own_order: bool
    #: A file of its own, with every tensor's name, no weights, and no array longer than MOST_KEPT.
    without_words: bytes


def check_gguf(path: Path) -> GgufHeader:
    """ValueError that says what is wrong; OSError where it cannot be opened."""
    sizes: Mapping[int, tuple[int, int]] = importlib.import_module("gguf").GGML_QUANT_SIZES
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError("it is no GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _Header(content, sizes).read()


class _Header:
    def __init__(self, content: mmap.mmap, sizes: Mapping[int, tuple[int, int]]) -> None:
        """`sizes`: for every kind of tensor, how many values make a block, and how many bytes that takes."""
        self._content = content
        self._sizes = sizes
        self._at = 4
        self._order = "<"
        self._values = 0
        self._vocabulary = 0
        self._longest = 0  # array of the field that is read

    def read(self) -> GgufHeader:
        version = self._number("I")
        if version & 0xFFFF == 0:  # written where the other end comes first
            self._order, self._at = ">", 4
            version = self._number("I")
        if version not in (2, 3):
            raise ValueError(f"it is of version {version} of GGUF, and 2 and 3 can be read")
        tensors, fields = self._number("Q"), self._number("Q")
        alignment = DEFAULT_ALIGNMENT
        known: set[bytes] = set()
        kept: list[bytes] = []
        for _ in range(fields):
            begin, self._longest = self._at, 0
            name = self._new_name(known, "field")
            kind = self._number("I")
            if name == b"general.alignment" and kind == _UINT32:
                alignment = self._number("I")
            else:
                self._value(name, kind)
            if name == _TOKENS:
                self._vocabulary = self._longest
            if self._longest <= MOST_KEPT:
                kept.append(self._content[begin : self._at])
        if alignment == 0 or alignment & (alignment - 1):
            raise ValueError(f"its alignment is {alignment}, which is no power of two")
        known = set()
        found = [self._tensor(self._new_name(known, "tensor")) for _ in range(tensors)]
        behind = math.ceil(self._at / alignment) * alignment
        stored = tuple(replace(each, begin=behind + each.begin) for each in found)
        for each in stored:
            missing = each.begin + each.size_bytes - len(self._content)
            if missing > 0:
                raise ValueError(f"it is damaged or cut off: {each.name[:80]} ends {missing} bytes behind its end")
        copy = self._without_words(version, kept, sorted(known), alignment)
        return GgufHeader(stored, self._vocabulary, (self._order == "<") == (sys.byteorder == "little"), copy)

    def _without_words(self, version: int, fields: list[bytes], tensors: list[bytes], alignment: int) -> bytes:
        """Every tensor is one number, the same one."""

        def packed(form: str, *numbers: int) -> bytes:
            return struct.pack(f"{self._order}{form}", *numbers)

        header = b"GGUF" + packed("IQQ", version, len(tensors), len(fields)) + b"".join(fields)
        for name in tensors:
            header += packed("Q", len(name)) + name + packed("IQIQ", 1, 1, _FLOAT32_TENSOR, 0)
        return header + bytes(-len(header) % alignment + alignment)

    def _tensor(self, name: bytes) -> StoredTensor:
        """`begin`: behind the header."""
        dimensions = self._number("I")
        if dimensions > MOST_DIMENSIONS:
            raise ValueError(f"{_text(name)} has {dimensions} dimensions, and at most {MOST_DIMENSIONS} can be read")
        shape = [self._number("Q") for _ in range(dimensions)]
        kind, offset = self._number("I"), self._number("Q")
        said = f"{_text(name)} ({'x'.join(map(str, reversed(shape)))})"
        if 0 in shape:
            raise ValueError(f"{said} is empty")
        if kind not in self._sizes:
            raise ValueError(f"{said} is in quantisation {kind}, which the gguf package does not know")
        block, block_bytes = self._sizes[kind]
        if (shape[0] if shape else 1) % block:
            raise ValueError(f"{said} has rows that are no multiple of {block}, as its quantisation needs")
        size_bytes = math.prod(shape) // block * block_bytes
        return StoredTensor(name.decode("utf-8", "replace"), tuple(reversed(shape)), kind, offset, size_bytes)

    def _value(self, name: bytes, kind: int, nested: int = 0) -> None:
        if kind in _NUMBERS:
            self._skip(_NUMBERS[kind], name)
        elif kind == _STRING:
            self._strings(1, name)
        elif kind == _ARRAY and nested < MOST_NESTED:
            self._array(name, nested)
        else:
            raise ValueError(f"{_text(name)} is of kind {kind}, which is not known or too deep in arrays")

    def _array(self, name: bytes, nested: int) -> None:
        kind, count = self._number("I"), self._number("Q")
        self._require(_NUMBERS.get(kind, 8) * count, name)  # strings and arrays have at least a length
        self._values += count
        self._longest = max(self._longest, count)
        if self._values > MOST_VALUES:
            raise ValueError(f"{_text(name)} has {count} values, and {MOST_VALUES} in all can be read")
        if kind in _NUMBERS:
            self._skip(_NUMBERS[kind] * count, name)
        elif kind == _STRING:
            self._strings(count, name)
        else:
            for _ in range(count):
                self._value(name, kind, nested + 1)

    def _strings(self, count: int, name: bytes) -> None:
        """There may be a million."""
        length, at, last = struct.Struct(f"{self._order}Q").unpack_from, self._at, len(self._content) - 8
        for _ in range(count):
            if at > last:
                break
            at += 8 + int(length(self._content, at)[0])
        else:
            self._skip(at - self._at, name)
            return
        self._require(at + 8 - self._at, name)

    def _new_name(self, known: set[bytes], what: str) -> bytes:
        """So that a stretch of zeros is not taken for a million fields."""
        name = self._string()
        if not name or name in known:
            raise ValueError(
                f"it is damaged: it has two of a {what} {_text(name)}" if name else f"a {what} has no name"
            )
        known.add(name)
        return name

    def _string(self) -> bytes:
        length = self._number("Q")
        begin = self._at
        self._skip(length, b"a name")
        return self._content[begin : begin + length]

    def _number(self, letter: str) -> int:
        begin, form = self._at, f"{self._order}{letter}"
        self._skip(struct.calcsize(form), b"a number")
        return int(struct.unpack_from(form, self._content, begin)[0])

    def _skip(self, size_bytes: int, what: bytes) -> None:
        self._require(size_bytes, what)
        self._at += size_bytes

    def _require(self, size_bytes: int, what: bytes) -> None:
        left = len(self._content) - self._at
        if size_bytes > left:
            raise ValueError(
                f"it is damaged or cut off: {_text(what)} takes {size_bytes} bytes, and {left} are left of the file"
            )


def _text(name: bytes) -> str:
    """Short, whatever is in it."""
    return name[:80].decode("utf-8", "backslashreplace")
