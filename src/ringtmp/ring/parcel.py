"""A layer's state as one run of bytes with a label: what a snapshot consists of.

Packing copies, so training may change the tensors at once. The digest is of the bytes; unpacking refuses others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
import torch

from ringtmp.errors import SnapshotUnusable
from ringtmp.ring.checkpoint import LayerTensors, StateName
from ringtmp.wire.tensors import Landing, TensorSpec, payload, raw_bytes


class Label(msgspec.Struct, frozen=True, array_like=True):
    """What a parcel holds: the layer's tensors in its own order, then its optimizer state by name."""

    step: int
    layer: int
    state: tuple[StateName, ...]
    specs: tuple[TensorSpec, ...]
    size: int
    digest: bytes = b""  # known when the last byte has been seen


def pack(step: int, layer: int, tensors: Sequence[torch.Tensor], state: dict[StateName, torch.Tensor]) -> Parcel:
    specs, views = payload([*tensors, *state.values()])
    body = torch.empty(sum(map(len, views)), dtype=torch.uint8)
    if body.numel():
        memory, start = raw_bytes(body), 0
        for view in views:
            memory[start : start + len(view)] = view
            start += len(view)
    # Whoever unpacks gets fresh memory, which begins on a boundary as everything a stage owns does.
    aligned = tuple(msgspec.structs.replace(each, offset=0) for each in specs if each is not None)
    return Parcel(Label(step, layer, tuple(state), aligned, body.numel()), body)


class Parcel:
    def __init__(self, label: Label, body: torch.Tensor) -> None:
        self.label = label
        self.body = body

    def sealed(self) -> Parcel:
        """With its digest."""
        return Parcel(msgspec.structs.replace(self.label, digest=digest_of(self.body)), self.body)

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
