"""What messages are made of: how nodes train, and what crosses a cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ringtmp.wire.formats import BLOCK
from ringtmp.wire.tensors import TensorSpec

Specs = tuple[TensorSpec | None, ...]


class Recipe(msgspec.Struct, frozen=True):
    """How every node trains: the same for all, whatever the number of nodes."""

    seed: int
    threads: int
    optimizer: str
    optimizer_settings: dict[str, Any]
    schedule: dict[str, Any]  # learning rate over steps
    clip_norm: float | None = None
    staleness: int = 0  # 1: every gradient is taken at the weights one update ago


class Crossing(msgspec.Struct, frozen=True, array_like=True):
    """A tensor that crosses a cut, as the plan knows it: everything but the number of samples."""

    dtype: str
    rest: tuple[int, ...]  # the shape behind the samples
    per_sample: bool  # whether the first dimension counts samples; else `rest` is the whole shape

    def allows(self, spec: TensorSpec, wire: str = "float32") -> bool:
        shape = spec.shape[1:] if self.per_sample else spec.shape
        dtype = wire if self.dtype == "float32" else self.dtype
        return spec.dtype == dtype and shape == self.rest and (not self.per_sample or len(spec.shape) > 0)


def fits(crossings: Sequence[Crossing], specs: Specs, wire: str) -> bool:
    """Whether these tensors are what crosses a cut on this wire; any may be missing."""
    width = 2 if wire == "int8" else 1  # values, and their scales
    if len(specs) != width * len(crossings):
        return False
    for position, crossing in enumerate(crossings):
        spec = specs[width * position]
        if spec is not None and not crossing.allows(spec, wire):
            return False
        scales = specs[2 * position + 1] if width == 2 else None
        scaled = width == 2 and spec is not None and crossing.dtype == "float32"
        if (scales is not None) != scaled or (scales and spec and not _scale(spec, scales)):
            return False
    return True


def _scale(values: TensorSpec, scales: TensorSpec) -> bool:
    return scales.dtype == "float32" and scales.shape == (-(-values.count // BLOCK),)
