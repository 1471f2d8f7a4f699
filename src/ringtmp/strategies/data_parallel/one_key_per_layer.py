"""A layer's tensors and optimizer state as keys on servers: by ranges of the flat vector (back: `collected_model.py`), or by
whole tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from ringtmp.runtime.checkpoint import LayerTensors, StateName
from ringtmp.strategies.data_parallel.parameter_keys import Flat, Key
from ringtmp.strategies.data_parallel.replica import flatten
from ringtmp.wire.messages import Kept

#: Names of a key's optimizer state; its values, then that state.
KeyTensors = tuple[tuple[str, ...], list[torch.Tensor]]


def by_range(
    layout: Flat, keys: Sequence[Key], trainable: Sequence[torch.Tensor], state: Mapping[StateName, torch.Tensor]
) -> Iterator[KeyTensors]:
    vector = flatten(layout, trainable)
    names = sorted({key for _, key in state})
    flats: dict[str, torch.Tensor] = {}
    for name in names:
        given = [state.get((slot.name, name)) for slot in layout.slots]
        counter = next(each for each in given if each is not None)
        # A counter is one for the whole layer; a parameter that never had a gradient has no state yet.
        flats[name] = counter if counter.dim() == 0 else flatten(layout, given)
    for key in keys:
        parts = [vector[key.start : key.stop].clone()]
        for name in names:
            whole = flats[name]
            parts.append(whole.clone() if whole.dim() == 0 else whole[key.start : key.stop].clone())
        yield tuple(names), parts


def by_tensor(
    layout: Flat, keys: Sequence[Key], trainable: Sequence[torch.Tensor], state: Mapping[StateName, torch.Tensor]
) -> Iterator[KeyTensors]:
    """A parameter that never had a gradient has no state."""
    for slot, tensor in zip(layout.slots, trainable, strict=True):
        own = {key: value for (name, key), value in sorted(state.items()) if name == slot.name}
        values = [each.clone() if each.dim() == 0 else each.reshape(-1).clone() for each in own.values()]
        yield tuple(own), [tensor.detach().reshape(-1).clone(), *values]


def from_tensors(layout: Flat, kept: Sequence[tuple[Kept, list[torch.Tensor]]]) -> LayerTensors:
    trainable: list[torch.Tensor] = []
    state: dict[StateName, torch.Tensor] = {}
    for slot, (message, tensors) in zip(layout.slots, kept, strict=True):
        trainable.append(tensors[0].reshape(slot.shape).clone())
        for name, value in zip(message.state, tensors[1:], strict=True):
            state[slot.name, name] = value.clone() if value.dim() == 0 else value.reshape(slot.shape).clone()
    return trainable, state
