"""Layers whose forward pass changes buffers: running statistics, which depend on the order in which microbatches pass."""

from __future__ import annotations

from collections.abc import Sequence

from ringtmp.errors import UsageError
from ringtmp.model.portable_layer import Layer
from ringtmp.model.recompute import changed_buffers


def changes_statistics(layers: Sequence[Layer]) -> bool:
    return any(changed_buffers(layer.train) for layer in layers)


def refuse_statistics(layers: Sequence[Layer], why: str, instead: str) -> None:
    """UsageError, by name, where there is no such order, and so no bits to keep. `why`; `instead`: what else can be used."""
    for layer in layers:
        if changed := changed_buffers(layer.train):
            names = sorted(layer.full_name(each) for each in layer.tensors if each.name in changed)
            raise UsageError(
                f"layer {layer.name!r} changes {', '.join(names)} in forward (BatchNorm?), which goes by the order of "
                f"microbatches, and {why}: the bits cannot be kept. Use LayerNorm or GroupNorm, or {instead}"
            )
