"""From live layers to portable ones: check, export, measure; one layer at a time, nothing kept.

The sample that enters the first layer is carried through the model, so every layer sees real shapes. What eager mode
would refuse (a BatchNorm on one value per channel, inputs of the wrong shape) is refused here, before a node starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ringtmp.errors import UsageError
from ringtmp.model.alias import Memory
from ringtmp.model.export import EXAMPLE_BATCH, Exporter
from ringtmp.model.layers import Model, layers_of
from ringtmp.model.operators import resolve
from ringtmp.model.portable import Layer
from ringtmp.model.repeat import changed_buffers
from ringtmp.model.sharing import Sample, refuse_own_writes, refuse_shared_writes, untie


@dataclass(frozen=True)
class BuiltLayer:
    layer: Layer
    tensors: dict[str, torch.Tensor]
    sample_outputs: Any  # of the largest microbatch, in evaluation mode
    takes_one_sample: bool  # in training, as eager mode would


def build_layers(
    model: Model, seed: int, sample: Callable[[int], Any], microbatch_sizes: Sequence[int]
) -> Iterator[BuiltLayer]:
    """`sample(n)` gives n samples of input. The caller is done with a layer when it asks for the next."""
    exporter = Exporter()
    smallest, largest = min(microbatch_sizes), max(microbatch_sizes)
    example, small, large, single = (Sample(sample(size)) for size in (EXAMPLE_BATCH, smallest, largest, 1))
    trained = example  # as it goes through the model in training mode, which may share memory in another way
    one_sample = True
    for name, module in layers_of(model, seed):
        _refuse_what_cannot_travel(name, module)
        _try_eager(name, module, small)
        one_sample = one_sample and _takes(name, module, single)
        layer, tensors = exporter.export(name, module, example.value)
        _refuse_sparse_gradients(layer)
        refuse_own_writes(layer)
        refuse_shared_writes(name, module, example, Memory(layer.evaluate).written_inputs())
        refuse_shared_writes(name, module, trained, Memory(layer.train).written_inputs())
        tensors = untie(name, tensors, changed_buffers(layer.train) | changed_buffers(layer.evaluate))
        trained = trained.through(name, module.train())
        module.eval()
        example, small, large, single = (each.through(name, module) for each in (example, small, large, single))
        module.train()
        yield BuiltLayer(layer, tensors, large.value, one_sample)
        del module, tensors


def _refuse_what_cannot_travel(name: str, module: nn.Module) -> None:
    for local, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.device.type != "cpu":
            raise UsageError(f"{name}.{local} lies on {tensor.device}: move the model to the CPU first")
        if nn.parameter.is_lazy(tensor):
            raise UsageError(f"{name}.{local} is lazy and has no shape yet: run the model once on a sample first")


def _refuse_sparse_gradients(layer: Layer) -> None:
    for op in layer.train.ops:
        schema: Any = getattr(resolve(op.target), "_schema", None)
        for index, each in enumerate(schema.arguments if schema is not None else ()):
            value = op.args[index] if index < len(op.args) else op.kwargs.get(each.name)
            if each.name in ("sparse", "sparse_grad") and value is True:
                raise UsageError(
                    f"layer {layer.name!r} asks {op.target.split('.')[1]} for sparse gradients, which the optimizers here do "
                    f"not take: use {each.name}=False"
                )


def _try_eager(name: str, module: nn.Module, sample: Sample) -> None:
    try:
        sample.through(name, module.train())
    except Exception as error:  # the layer is the user's: whatever it raises is the answer
        shapes = ", ".join(str(tuple(leaf.shape)) for leaf in sample.leaves)
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(
            f"layer {name!r} ({type(module).__name__}) refuses a microbatch of shape {shapes}: {reason}. "
            "Check the shape of the data; if it is the number of samples, use fewer --microbatches or another --batch-size"
        ) from error


def _takes(name: str, module: nn.Module, sample: Sample) -> bool:
    """Whether eager mode would train on it: a BatchNorm refuses a single value per channel, its exported graph does not."""
    try:
        sample.through(name, module.train())
    except Exception:  # the layer is the user's: whatever it raises is a no
        return False
    return True
