"""What workers and servers give back, put together: one model of many replicas or keys, one loss of many shares. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ringtmp.model.frozen_parameters import frozen_names
from ringtmp.model.portable_layer import Layer
from ringtmp.runtime.checkpoint import LayerTensors, StateName
from ringtmp.strategies.data_parallel.parameter_keys import Flat
from ringtmp.strategies.data_parallel.replica import views
from ringtmp.wire.messages import Kept, WorkDone


def of_keys(layout: Flat, kept: Sequence[tuple[Kept, list[torch.Tensor]]]) -> LayerTensors:
    """A layer's trainable tensors and their optimizer state, of its keys in order."""
    if not kept:
        return [], {}
    trainable = [each.clone() for each in views(layout, torch.cat([tensors[0] for _, tensors in kept]))]
    state: dict[StateName, torch.Tensor] = {}
    for position, name in enumerate(kept[0][0].state, start=1):
        parts = [tensors[position] for _, tensors in kept]
        if parts[0].dim() == 0:
            found = [parts[0].clone() for _ in layout.slots]
        else:
            found = [each.clone() for each in views(layout, torch.cat(parts))]
        state.update({(slot.name, name): each for slot, each in zip(layout.slots, found, strict=True)})
    return trainable, state


def without_frozen(layer: Layer, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """What training changes; holes for what everyone has and nobody changes."""
    frozen = frozen_names(layer)
    return [None if each.name in frozen else tensor for each, tensor in zip(layer.tensors, tensors, strict=True)]


def mean_loss(dids: Sequence[WorkDone], otherwise: float) -> float:
    done = [did for did in dids if not did.skipped]
    share = sum(did.share for did in done)
    return sum(did.loss * did.share for did in done) / share if share else otherwise


def mean_of(lists: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """What is not trained: statistics are each worker's own, and their mean is as good as one gets; counters are the
    first's. Where all have the same, frozen parameters above all, that is it: the mean of three equal numbers is another."""
    found = []
    for position, tensor in enumerate(lists[0]):
        others = [each[position] for each in lists[1:]]
        alike = not tensor.is_floating_point() or all(each.equal(tensor) for each in others)
        found.append(tensor if alike else torch.stack([tensor, *others]).mean(0))
    return found
