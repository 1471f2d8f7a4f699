"""A layer's state as one run of bytes with a label: what a snapshot consists of.

Writing copies, so training may change the tensors at once. The digest is of the bytes; unpacking refuses others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import BinaryIO

import msgspec
import torch

from ringtmp.errors import ProtocolError, SnapshotUnusable
from ringtmp.runtime.checkpoint import LayerTensors, StateName
from ringtmp.wire.tensors import Landing, TensorSpec, payload, raw_bytes


class Label(msgspec.Struct, frozen=True, array_like=True):
    """What a snapshot holds: the layer's tensors in its own order, then its optimizer state by name."""

    step: int
    layer: int
    state: tuple[StateName, ...]
    specs: tuple[TensorSpec, ...]
    size: int
    digest: bytes = b""  # known when the last byte has been seen


def laid_out(
    step: int, layer: int, tensors: Sequence[torch.Tensor], state: dict[StateName, torch.Tensor]
) -> tuple[Label, list[memoryview]]:
    """A label, without a digest yet, and the bytes where they lie: nothing is copied unless a tensor has holes."""
    specs, views = payload([*tensors, *state.values()])
    # Whoever unpacks gets fresh memory, which begins on a boundary as everything a stage owns does.
    aligned = tuple(msgspec.structs.replace(each, offset=0) for each in specs if each is not None)
    return Label(step, layer, tuple(state), aligned, sum(map(len, views))), [memoryview(each) for each in views]


class Writing:
    """Bytes on their way into a snapshot, in order, in memory or into a file; their digest is taken as they pass."""

    def __init__(self, label: Label, file: BinaryIO | None = None) -> None:
        self.label = label
        self.file = file
        self._body = torch.empty(0 if file is not None else label.size, dtype=torch.uint8)
        self._digest = hashlib.blake2b(digest_size=16)
        self._size = 0

    def add(self, piece: memoryview) -> None:
        """OSError if the file does not take it, ProtocolError if there is more than was said."""
        if self._size + len(piece) > self.label.size:
            raise ProtocolError(
                f"layer {self.label.layer} has more bytes than the {self.label.size} it was said to have"
            )
        self._digest.update(piece)
        if self.file is not None:
            self.file.write(piece)
        elif len(piece):
            raw_bytes(self._body)[self._size : self._size + len(piece)] = piece
        self._size += len(piece)

    @property
    def whole(self) -> bool:
        return self._size == self.label.size

    def sealed(self) -> Label:
        """The label with the digest of what has passed."""
        return msgspec.structs.replace(self.label, digest=self._digest.digest())

    def finished(self) -> LayerSnapshot:
        """Of one in memory."""
        return LayerSnapshot(self.sealed(), self._body)


class LayerSnapshot:
    def __init__(self, label: Label, body: torch.Tensor) -> None:
        self.label = label
        self.body = body

    def check(self) -> None:
        """Raises SnapshotUnusable if the bytes are not those that were packed."""
        label = self.label
        if self.body.numel() != label.size or digest_of(self.body) != label.digest:
            raise SnapshotUnusable(
                f"layer {label.layer} in the snapshot of step {label.step} does not match its digest"
            )

    def unpack(self) -> LayerTensors:
        self.check()
        label = self.label
        memory, start = raw_bytes(self.body), 0
        tensors: list[torch.Tensor] = []
        for spec in label.specs:
            landing = Landing(spec)
            landing.place(0, memory[start : start + landing.size])
            start += landing.size
            tensors.append(landing.finish())
        own = len(tensors) - len(label.state)
        return tensors[:own], dict(zip(label.state, tensors[own:], strict=True))


def digest_of(body: torch.Tensor) -> bytes:
    return hashlib.blake2b(raw_bytes(body) if body.numel() else b"", digest_size=16).digest()
