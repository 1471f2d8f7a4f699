"""A layer with its tensors as a stage runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ringtmp.model.frozen_parameters import frozen_names
from ringtmp.model.portable_layer import Layer
from ringtmp.model.recompute import changed_buffers, repeatable
from ringtmp.model.run_graph import Program, dtype_of
from ringtmp.model.shrink_frozen_weights import check_kept
from ringtmp.runtime.gradients_at_segment_edges import copied_alike

#: Among a layer's optimizer state: the weights one update ago, at which the next delayed gradient is taken.
PREVIOUS = "previous"


class StagedLayer:
    """A layer with its tensors, ready to run. With delayed gradients every parameter exists on two sides."""

    def __init__(self, layer: Layer, tensors: Sequence[torch.Tensor], train: Program, evaluate: Program) -> None:
        check_kept(layer)
        self.layer = layer
        self.train = train
        self.evaluate = evaluate
        owned: dict[str, torch.Tensor] = {}
        for each, tensor in zip(layer.tensors, tensors, strict=True):
            if tuple(tensor.shape) != each.shape or tensor.dtype != dtype_of(each.dtype):
                raise ValueError(f"tensor {each.name} of layer {layer.name} is not as its layer describes it")
            owned[each.name] = tensor.requires_grad_(each.trainable)
        self.trainable = [each.name for each in layer.tensors if each.trainable]
        self.frozen = frozen_names(layer)
        self.sides = [owned]
        self.repeatable = repeatable(layer.train)
        self.changed = changed_buffers(layer.train)
        parameters = {each.name for each in layer.tensors if each.kind == "parameter"}  # an optimizer knows these
        self._renewed = {
            training: frozenset() if repeatable(graph) else changed_buffers(graph) - parameters
            for training, graph in ((True, layer.train), (False, layer.evaluate))
        }

    def renew(self, training: bool) -> None:
        """Before a run that reads buffers it changes: it does so to copies. The values of the run before may still be
        needed, for its backward or on their way to a neighbour."""
        fresh = {name: copied_alike(self.sides[0][name]) for name in self._renewed[training]}
        for side in self.sides:
            side.update(fresh)

    def double(self, newest: int, previous: Mapping[str, torch.Tensor]) -> None:
        """The weights one update ago take the other side (today's, when there was no update yet); buffers are shared."""
        (owned,) = self.sides
        other = dict(owned)
        for name in self.trainable:
            other[name] = previous.get(name, owned[name]).detach().clone().requires_grad_()
        self.sides = [owned, other] if newest == 0 else [other, owned]
