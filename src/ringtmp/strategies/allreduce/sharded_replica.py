"""A worker's share of the model, as torch's own fully_shard cuts it (FSDP2): every rank keeps a part of each trainable tensor
and of its optimizer state, and has all of a layer only while that layer runs, or the one before it.

J. Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020 (stage 3);
Y. Zhao et al., PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel, VLDB 2023.

    rank 0   [ rows 0 to k of every tensor ]    hold: all rows are gathered      drop: the others' are let go of
    rank 1   [ the other rows              ]    hand_over: gradients are added up over ranks, each gets those of its rows

`hold`, `hand_over` and `collect` wait for all ranks, and nothing is heard meanwhile: whoever calls them, or `expect`, knows
that every rank does, in the same order. Frozen tensors and statistics are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from ringtmp.errors import NodeLost, ProtocolError
from ringtmp.model.portable_layer import Layer
from ringtmp.runtime.checkpoint import LayerTensors, StateName
from ringtmp.strategies.data_parallel.replica import Replica, layer_flat
from ringtmp.wire.messages import Recipe


class _Whole(nn.Module):
    """A layer's trainable tensors as fully_shard wants them. Our stages compute with them; to go through this and back is to
    hand their gradients over."""

    def __init__(self, tensors: Sequence[torch.Tensor], mesh: Any) -> None:
        super().__init__()
        self._names = [f"tensor_{number}" for number in range(len(tensors))]
        self._shapes = [each.shape for each in tensors]
        for name, tensor in zip(self._names, tensors, strict=True):
            self.register_parameter(name, nn.Parameter(tensor.detach().contiguous()))
        sharded: Any = fully_shard(self, mesh=mesh, reshard_after_forward=False)
        sharded.set_force_sum_reduction_for_comms(True)  # Gloo knows no other
        sharded.set_gradient_divide_factor(1.0)  # a microbatch's loss is weighted by its share of the batch already
        sharded.set_reduce_scatter_unused_params(True)  # a rank may have no samples in a small batch
        self._mesh = mesh
        self.shards: list[torch.Tensor] = [each.to_local().detach() for each in self.tensors()]

    def gather(self, wait: bool = True) -> None:
        this: Any = self  # torch has made it a class of its own
        this.unshard(async_op=not wait)

    def let_go(self) -> None:
        this: Any = self
        this.reshard()

    def tensors(self) -> list[Any]:
        """Whole ones while they are held; else what torch keeps of them."""
        return [getattr(self, name) for name in self._names]

    def forward(self, through: torch.Tensor) -> torch.Tensor:
        return through * 1

    def hand_over(self) -> None:
        """The gradients of what is held; those of this rank's shards are theirs now."""
        self(torch.zeros((), requires_grad=True)).backward()
        for shard, tensor in zip(self.shards, self.tensors(), strict=True):
            shard.grad, tensor.grad = tensor.grad.to_local(), None

    def mine(self, number: int, whole: torch.Tensor) -> torch.Tensor:
        """Of something of a tensor's shape: what lies beside this rank's shard of it."""
        rows, first = len(self.shards[number]), -(-len(whole) // self._mesh.size()) * self._mesh.get_local_rank()
        return whole[first : first + rows].clone()

    def gathered(self, number: int, shard: torch.Tensor) -> torch.Tensor:
        shape = self._shapes[number]
        stride = torch.empty(shape, device="meta").stride()
        whole = DTensor.from_local(shard, self._mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
        return whole.full_tensor().detach()


class ShardedReplica(Replica):
    """A replica whose layers are complete between `hold` and `drop` or `hand_over`."""

    def __init__(self, recipe: Recipe, node: int, mesh: Any) -> None:
        """`mesh`: all ranks, as torch knows them."""
        super().__init__(recipe, node)
        self._mesh = mesh
        self._wholes: list[_Whole | None] = []  # None: nothing of the layer is trained
        self._arrived: dict[int, tuple[list[torch.Tensor | None], dict[StateName, torch.Tensor]]] = {}  # and never held
        self._collected: tuple[int, LayerTensors] = (-1, ([], {}))

    def place(
        self, index: int, layer: Layer, tensors: Sequence[torch.Tensor | None], state: dict[StateName, torch.Tensor]
    ) -> None:
        """Layers come in order, and whole: what is not this rank's is let go of here."""
        if index != len(self.stages) or any(each is None for each in tensors):
            raise ProtocolError(f"layer {index} came after {len(self.stages)} layers, or with tensors missing")
        given = [
            tensor for each, tensor in zip(layer.tensors, tensors, strict=True) if each.trainable and tensor is not None
        ]
        whole = _Whole(given, self._mesh) if given else None
        others = [None if each.trainable else tensor for each, tensor in zip(layer.tensors, tensors, strict=True)]
        names = self._names(layer)
        parts = {
            (name, key): each if each.dim() == 0 or whole is None else whole.mine(names.index(name), each)
            for (name, key), each in state.items()
        }
        self._arrived[index] = others, parts
        self._wholes.append(whole)
        self.layers.append(layer)
        self.layouts.append(layer_flat(layer))
        self.stages.append(self.stage(index, layer, () if whole is None else whole.shards))
        if whole is None:
            self.hold(index)

    def hold(self, layer: int) -> None:
        whole = self._wholes[layer]
        if whole is not None:
            with _all_ranks():
                whole.gather()
        if layer in self._arrived:
            others, state = self._arrived.pop(layer)
            held = iter(whole.tensors() if whole is not None else ())
            self.stages[layer].place(layer, self.layers[layer], [next(held) if t is None else t for t in others], state)

    def expect(self, layer: int) -> None:
        """It is held soon: the other ranks' rows may come while this one computes."""
        whole = self._wholes[layer]
        if whole is not None:
            with _all_ranks():
                whole.gather(wait=False)

    def drop(self, layer: int) -> None:
        """Unless some of what leaves the layer lies in its memory: then it stays whole until its gradients are handed over."""
        whole = self._wholes[layer]
        if whole is not None and not self.stages[layer].lends:
            whole.let_go()

    def hand_over(self, layer: int) -> None:
        whole = self._wholes[layer]
        if whole is not None:
            with _all_ranks():
                whole.hand_over()

    def squared_norms(self, step: int) -> list[torch.Tensor]:
        """Of the gradient of every tensor, over all ranks, layer by layer, in float64."""
        parts = [[each.double().square() for each in stage.gradient_norms(step)] for stage in self.stages]
        flat = torch.cat([each for layer in parts for each in layer] or [torch.zeros(0, dtype=torch.float64)])
        with _all_ranks():
            distributed.all_reduce(flat, group=self._mesh.get_group())
        return list(torch.split(flat, [sum(map(len, layer)) for layer in parts]))

    def collect(self, layer: int) -> None:
        """All of a layer, for `layer_state`. The others' part of the last one is let go of."""
        if layer in self._arrived:
            self.hold(layer)
            self.drop(layer)
        whole, (tensors, state) = self._wholes[layer], self.stages[layer].layer_state(layer)
        if whole is not None:
            names = self._names(self.layers[layer])
            with _all_ranks():
                every = {name: whole.gathered(number, whole.shards[number]) for number, name in enumerate(names)}
                state = {
                    (name, key): each if each.dim() == 0 else whole.gathered(names.index(name), each)
                    for (name, key), each in state.items()
                }
            tensors = [every.get(each.name, own) for each, own in zip(self.layers[layer].tensors, tensors, strict=True)]
        self._collected = layer, (tensors, state)

    def layer_state(self, layer: int) -> LayerTensors:
        number, found = self._collected
        assert number == layer, "a layer was asked for that was not collected"
        self._collected = (-1, ([], {}))
        return found

    def collect_gradients(self, layer: int) -> torch.Tensor:
        """They add up where the layer is held."""
        return torch.empty(0)

    def let_go_of_gradients(self, layer: int) -> None:
        """They go when they are handed over."""

    @staticmethod
    def _names(layer: Layer) -> list[str]:
        return [each.name for each in layer.tensors if each.trainable]


@contextmanager
def _all_ranks() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # what Gloo raises when another process has died
        raise NodeLost(f"a rank ended while all exchanged a layer: {str(error).splitlines()[0]}") from error
