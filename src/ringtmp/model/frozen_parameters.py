"""Parameters that nothing changes: neither an optimizer nor the layer itself. A run keeps them once, beside its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ringtmp.model.parameters_changed_in_forward import written_parameters
from ringtmp.model.portable_layer import Layer, OwnedTensor


def frozen_names(layer: Layer, aside: bool = True) -> frozenset[str]:
    """None if the run does not keep them `aside`. With copies of what another cell owns, such as a head that is the
    embedding."""
    if not aside:
        return frozenset()
    still = {each.name for each in layer.tensors if _still(each)}
    if not still:
        return frozenset()
    return frozenset(still - written_parameters(layer.train).keys() - written_parameters(layer.evaluate).keys())


def _still(each: OwnedTensor) -> bool:
    """Or a cell's copy of a frozen parameter that another cell owns."""
    return each.copied or (each.kind in ("parameter", "scale") and each.saved and not each.trainable)


def without_frozen(layer: Layer, frozen: frozenset[str]) -> list[OwnedTensor]:
    return [each for each in layer.tensors if each.name not in frozen]


def with_frozen(layer: Layer, others: Sequence[torch.Tensor], frozen: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The layer's tensors in its own order; `others`: those that are not frozen."""
    left = iter(others)
    return [frozen[each.name] if each.name in frozen else next(left) for each in layer.tensors]
