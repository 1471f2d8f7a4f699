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
from torch.func import functional_call
from torch.utils import _pytree as pytree

from ringtmp.errors import UsageError
from ringtmp.model.export import EXAMPLE_BATCH, Exporter
from ringtmp.model.layers import Model, layers_of
from ringtmp.model.portable import Layer


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
    example, small, large, single = sample(EXAMPLE_BATCH), sample(smallest), sample(largest), sample(1)
    one_sample = True
    for name, module in layers_of(model, seed):
        _refuse_what_cannot_travel(name, module)
        _try_eager(name, module, small)
        one_sample = one_sample and _takes(module, single)
        layer, tensors = exporter.export(name, module, example)
        if layer.train.changes_inputs or layer.evaluate.changes_inputs:
            _refuse_shared_inputs(name, module, example)
        example, small, large, single = (_run(module.eval(), each) for each in (example, small, large, single))
        module.train()
        yield BuiltLayer(layer, tensors, large, one_sample)
        del module, tensors


def _refuse_what_cannot_travel(name: str, module: nn.Module) -> None:
    for local, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.device.type != "cpu":
            raise UsageError(f"{name}.{local} lies on {tensor.device}: move the model to the CPU first")
        if nn.parameter.is_lazy(tensor):
            raise UsageError(f"{name}.{local} is lazy and has no shape yet: run the model once on a sample first")


def _refuse_shared_inputs(name: str, module: nn.Module, example: Any) -> None:
    """In one process a change in place would show in both tensors; after a cut they are two. Refuse rather than differ."""
    starts = [leaf.data_ptr() for leaf in pytree.tree_leaves(example)]
    if len(set(starts)) < len(starts):
        raise UsageError(
            f"layer {name!r} ({type(module).__name__}) changes its input in place while another tensor shares its "
            "memory, so a cut would change the result: use inplace=False there"
        )


def _run(module: nn.Module, sample: Any) -> Any:
    """The layer's output, as eager mode gives it, without leaving a trace in its buffers or in the sample."""
    buffers = {key: value.clone() for key, value in module.named_buffers()}
    copies: dict[int, torch.Tensor] = {}  # two leaves that are one tensor stay one
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        copied = pytree.tree_map(lambda leaf: copies.setdefault(leaf.data_ptr(), leaf.clone()), sample)
        return functional_call(module, buffers, (copied,))


def _try_eager(name: str, module: nn.Module, sample: Any) -> None:
    try:
        _run(module.train(), sample)
    except Exception as error:  # the layer is the user's: whatever it raises is the answer
        shapes = ", ".join(str(tuple(leaf.shape)) for leaf in pytree.tree_leaves(sample))
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(
            f"layer {name!r} ({type(module).__name__}) refuses a microbatch of shape {shapes}: {reason}. "
            "Check the shape of the data; if it is the number of samples, use fewer --microbatches or another --batch-size"
        ) from error


def _takes(module: nn.Module, sample: Any) -> bool:
    """Whether eager mode would train on it: a BatchNorm refuses a single value per channel, its exported graph does not."""
    try:
        _run(module.train(), sample)
    except Exception:  # the layer is the user's: whatever it raises is a no
        return False
    return True
