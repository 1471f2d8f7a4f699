"""A worker's copy of the model: every layer a stage of its own, its trainable tensors views of one flat vector."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from ringtmp.errors import ProtocolError
from ringtmp.model.portable_layer import Layer, Value
from ringtmp.model.recompute import changed_buffers
from ringtmp.plan.route import Visit
from ringtmp.runtime.checkpoint import LayerTensors, StateName
from ringtmp.runtime.segment_run import Crossings
from ringtmp.runtime.stage import Stage
from ringtmp.strategies.data_parallel import parameter_keys
from ringtmp.strategies.data_parallel.parameter_keys import Flat
from ringtmp.wire.messages import Recipe


def layer_flat(layer: Layer) -> Flat:
    """Where the layer's trainable tensors lie in its flat vector."""
    return parameter_keys.flat([(each.name, each.shape) for each in layer.tensors if each.trainable])


def views(layout: Flat, vector: torch.Tensor) -> list[torch.Tensor]:
    return [vector[slot.start : slot.stop].view(slot.shape) for slot in layout.slots]


def flatten(layout: Flat, tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """The tensors end to end; zeros for a hole."""
    vector = torch.zeros(layout.size)
    for view, tensor in zip(views(layout, vector), tensors, strict=True):
        if tensor is not None:
            view.copy_(tensor.detach())
    return vector


def _all(index: int, layer: Layer, training: bool) -> Crossings:
    """What a layer takes leaves it again: deeper layers may use it, too, and their gradients come first."""
    takes = layer.takes(index, training)
    given = tuple((index + 1, place) for place in range(len(layer.graph(training).outputs)))
    return Crossings(takes, (*given, *takes))


class Replica:
    """With `layerwise` a layer's parameters are here only between `hold` and `drop`, and what is needed to go backward is
    computed again from what entered the layer. Of the layers in `factored` backward gives what their gradients are made of."""

    def __init__(self, recipe: Recipe, node: int, layerwise: bool = False, factored: Collection[int] = ()) -> None:
        self._recipe = recipe
        self._node = node
        self._layerwise = layerwise
        self.factored = frozenset(factored)
        self.layers: list[Layer] = []
        self.stages: list[Stage] = []
        self.layouts: list[Flat] = []
        self.values: list[torch.Tensor] = []  # the flat parameters of every layer; empty while they are not here
        self._parameters: list[list[torch.Tensor]] = []
        self._changing: list[tuple[int, ...]] = []  # positions of the tensors a forward pass changes: statistics
        self._needed: dict[tuple[int, bool], frozenset[Value]] = {}
        self._marked: tuple[int, list[dict[int, torch.Tensor]]] = (-1, [])
        self._kept: tuple[int, list[LayerTensors]] = (-1, [])
        self._own: dict[int, dict[int, torch.Tensor]] = {}  # by layer: what is there again when the evaluation is over

    def place(
        self, index: int, layer: Layer, tensors: Sequence[torch.Tensor | None], state: dict[StateName, torch.Tensor]
    ) -> None:
        """Layers come in order. A hole is a trainable tensor whose values come later."""
        if index != len(self.stages):
            raise ProtocolError(f"layer {index} came after {len(self.stages)} layers")
        layout = layer_flat(layer)
        vector = torch.zeros(layout.size)
        mine = views(layout, vector)
        trainable = iter(mine)
        placed: list[torch.Tensor] = []
        for each, tensor in zip(layer.tensors, tensors, strict=True):
            if each.trainable:
                view = next(trainable)
                if tensor is not None:
                    view.copy_(tensor)
                placed.append(view)
            elif tensor is None:
                raise ProtocolError(f"layer {layer.name} came without its tensor {each.name}")
            else:
                placed.append(tensor)
        stage = self.stage(index, layer)
        stage.place(index, layer, placed, state)
        self.layers.append(layer)
        self.stages.append(stage)
        self.layouts.append(layout)
        self.values.append(vector)
        self._parameters.append(mine)
        changed = changed_buffers(layer.train)
        self._changing.append(tuple(at for at, each in enumerate(layer.tensors) if each.name in changed))
        if self._layerwise:
            self.drop(index)

    def stage(self, index: int, layer: Layer, updated: Sequence[torch.Tensor] = ()) -> Stage:
        """One for a layer that is still to move in; `updated` as a stage has it."""
        recompute = (lambda saved_bytes: True) if self._layerwise else None
        crossings = None if layer.train_takes is None else {each: _all(index, layer, each) for each in (True, False)}
        visit = Visit(index, self._node, index, index + 1)
        return Stage(
            visit, self._recipe,
            recompute=recompute, crossings=crossings, catch=index in self.factored, updated=updated,
        )  # fmt: skip

    def needed_after(self, layer: int, training: bool) -> frozenset[Value]:
        """What a layer behind this one takes. All layers are here."""
        key = layer, training
        if key not in self._needed:
            behind = list(enumerate(self.layers))[layer + 1 :]
            self._needed[key] = frozenset(value for index, each in behind for value in each.takes(index, training))
        return self._needed[key]

    def hold(self, layer: int) -> None:
        """Memory for the layer's parameters, if there is none."""
        if self.values[layer].numel() < self.layouts[layer].size:
            self.values[layer] = torch.empty(self.layouts[layer].size)
            for parameter, view in zip(self._parameters[layer], self._views(layer), strict=True):
                parameter.data = view

    def drop(self, layer: int) -> None:
        self.values[layer] = torch.empty(0)
        for parameter in self._parameters[layer]:
            parameter.data = self.values[layer]

    def _views(self, layer: int) -> list[torch.Tensor]:
        return views(self.layouts[layer], self.values[layer])

    def collect_gradients(self, layer: int) -> torch.Tensor:
        """A fresh flat vector in which the layer's gradients add up from now on."""
        vector = torch.zeros(self.layouts[layer].size)
        self.give_gradients(layer, vector)
        return vector

    def give_gradients(self, layer: int, vector: torch.Tensor, there: Sequence[bool] = ()) -> None:
        """The layer's gradients are these; `there`: which of its parameters have one, if not all."""
        given = views(self.layouts[layer], vector)
        for parameter, view, has in zip(self._parameters[layer], given, there or [True] * len(given), strict=True):
            parameter.grad = view if has else None

    def let_go_of_gradients(self, layer: int) -> None:
        """Whoever has the vector has them."""
        for parameter in self._parameters[layer]:
            parameter.grad = None

    def mark(self, step: int) -> None:
        """A training step begins: remember the statistics, which its forward pass will change."""
        marked = []
        for layer, changing in enumerate(self._changing):
            tensors = self.stages[layer].layer_state(layer)[0] if changing else []
            marked.append({at: tensors[at].clone() for at in changing})
        self._marked = (step, marked)

    def keep(self, step: int) -> None:
        """Remember everything as it is before this step, for as long as nothing newer is kept."""
        kept = []
        for layer, stage in enumerate(self.stages):
            tensors, state = stage.layer_state(layer)
            kept.append(
                ([each.detach().clone() for each in tensors], {name: each.clone() for name, each in state.items()})
            )
        self._kept = (step, kept)

    def before(self, step: int, layer: int) -> LayerTensors:
        """The layer as it was before a step: the newest whose update has been made, the one under way, or the one kept."""
        if self._kept[0] == step:
            return self._kept[1][layer]
        self.take_back(layer)
        tensors, state = self.stages[layer].layer_state(layer)
        if self._marked[0] == step:
            for at, tensor in self._marked[1][layer].items():
                tensors[at] = tensor
        return tensors, state

    def lend(self, layer: int, tensors: Sequence[torch.Tensor | None]) -> None:
        """Evaluate the layer with these; what is its own is there again after `take_back`."""
        self.take_back(layer)
        mine, _ = self.stages[layer].layer_state(layer)
        self._own[layer] = {}
        with torch.no_grad():
            for at, (own, lent) in enumerate(zip(mine, tensors, strict=True)):
                if lent is not None:
                    self._own[layer][at] = own.clone()
                    own.copy_(lent)

    def lent(self, layer: int) -> bool:
        return layer in self._own

    def take_back(self, layer: int | None = None) -> None:
        """The layer's own values; without a number, those of every layer."""
        for each in list(self._own) if layer is None else [layer]:
            mine, _ = self.stages[each].layer_state(each)
            with torch.no_grad():
                for at, own in self._own.pop(each, {}).items():
                    mine[at].copy_(own)

    def layer_state(self, layer: int) -> LayerTensors:
        """The layer's own tensors and their optimizer state."""
        self.take_back(layer)
        return self.stages[layer].layer_state(layer)

    def buffers(self, layer: int) -> list[torch.Tensor | None]:
        """The layer's tensors in its own order, without the trainable ones."""
        tensors, _ = self.layer_state(layer)
        return [
            None if each.trainable else tensor for each, tensor in zip(self.layers[layer].tensors, tensors, strict=True)
        ]
