"""From live layers to portable ones: check, export, measure; one layer at a time, nothing kept.

The sample that enters the first layer is carried through the model, so every layer sees real shapes. What eager mode
would refuse (a BatchNorm on one value per channel, inputs of the wrong shape) is refused here, before a node starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from ringtmp.errors import UsageError
from ringtmp.model.export import AGAIN_BATCH, EXAMPLE_BATCH, Exporter
from ringtmp.model.layers import Model, layers_of
from ringtmp.model.portable import Layer
from ringtmp.model.trust import Check
from ringtmp.model.watch import refuse_averaging, refuse_hooks
from ringtmp.model.whole import check_whole, fits
from ringtmp.model.written import written_parameters

#: A layer is compared with its graphs at so many microbatch sizes at most.
MOST_SIZES = 4
#: Parameters up to this size are copied for a trial run.
COPIED_BYTES = 64 * 2**20


@dataclass(frozen=True)
class BuiltLayer:
    layer: Layer
    tensors: dict[str, torch.Tensor]
    sample_outputs: Any  # of the largest microbatch, in evaluation mode
    takes_one_sample: bool  # in training, as eager mode would
    checked: str = "layers"  # against eager mode; of the last one "model": in a row, too


def build_layers(
    model: Model,
    seed: int,
    sample: Callable[[int], Any],
    microbatch_sizes: Sequence[int],
    known: Callable[[int], None] = lambda count: None,
) -> Iterator[BuiltLayer]:
    """`sample(n)` gives n samples of input. The caller is done with a layer when it asks for the next. `known` is told the
    number of layers before any work is done on the first, if it can be known."""
    exporter = Exporter()
    row = _Row(known)
    smallest, largest = min(microbatch_sizes), max(microbatch_sizes)
    checked = _spread(sorted(set(microbatch_sizes)))
    samples = {size: sample(size) for size in {1, EXAMPLE_BATCH, AGAIN_BATCH, *checked}}
    one_sample = True
    for index, (name, module) in enumerate(layers_of(model, seed, row.know)):
        _refuse_what_cannot_travel(name, module)
        refuse_hooks(name, module)
        refuse_averaging(name, module)
        _try_eager(name, module, samples[smallest])
        one_sample = one_sample and _takes(module, samples[1])
        check = partial(_check, name, module, samples, checked, index > 0)
        layer, tensors = exporter.export(name, module, samples[EXAMPLE_BATCH], samples[AGAIN_BATCH], check)
        if layer.train.changes_inputs or layer.evaluate.changes_inputs:
            _refuse_shared_inputs(name, module, samples[EXAMPLE_BATCH])
        kept = bool(written_parameters(layer.evaluate))
        samples = {size: _run(module.eval(), each, kept) for size, each in samples.items()}
        module.train()
        whole = row.add(layer, tensors, sample(smallest))
        yield BuiltLayer(layer, tensors, samples[largest], one_sample, "model" if whole else "layers")
        del module, tensors, check


class _Row:
    """A model whose layers are all in memory is checked as a whole, too, when the last one has been exported."""

    def __init__(self, known: Callable[[int], None]) -> None:
        self._known = known
        self._modules: list[nn.Module] = []
        self._layers: list[tuple[Layer, dict[str, torch.Tensor]]] = []

    def know(self, modules: list[nn.Module]) -> None:
        self._known(len(modules))
        if fits(modules):
            self._modules = modules

    def add(self, layer: Layer, tensors: dict[str, torch.Tensor], sample: Any) -> bool:
        """True when that was the last one and the whole model was checked."""
        if not self._modules:
            return False
        self._layers.append((layer, tensors))
        if len(self._layers) < len(self._modules) or any(written_parameters(each.train) for each, _ in self._layers):
            return False
        check_whole(self._modules, self._layers, sample)
        return True


def _check(
    name: str,
    module: nn.Module,
    samples: Mapping[int, Any],
    sizes: Sequence[int],
    asks: bool,
    layer: Layer,
    tensors: dict[str, torch.Tensor],
) -> None:
    """In numbers, at the sizes of the run; evaluation may also see a single sample."""
    check = Check(name, module, layer, tensors, asks)
    for size in sizes:
        check.run(samples[size], training=True)
    for size in {1, sizes[-1]}:
        check.run(samples[size], training=False)
    module.train()


def _spread(sizes: Sequence[int]) -> list[int]:
    """The smallest, the largest and a few between: a run has one or two, a search for the best number of them many."""
    if len(sizes) <= MOST_SIZES:
        return list(sizes)
    return sorted({sizes[round(step * (len(sizes) - 1) / (MOST_SIZES - 1))] for step in range(MOST_SIZES)})


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


def _run(module: nn.Module, sample: Any, keep_parameters: bool = False) -> Any:
    """The layer's output, as eager mode gives it, without leaving a trace in its buffers or in the sample."""
    owned = {key: value.clone() for key, value in module.named_buffers()}
    copies: dict[int, torch.Tensor] = {}  # two leaves that are one tensor stay one
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        if keep_parameters:
            owned.update((key, value.clone()) for key, value in module.named_parameters())
        copied = pytree.tree_map(lambda leaf: copies.setdefault(leaf.data_ptr(), leaf.clone()), sample)
        return functional_call(module, owned, (copied,))


def _may_write(module: nn.Module) -> bool:
    """Before its graph is known: whether parameters are copied for a trial, in case the layer changes them itself."""
    size = sum(each.nbytes for each in module.parameters())
    return size <= COPIED_BYTES or any(getattr(each, "max_norm", None) is not None for each in module.modules())


def _try_eager(name: str, module: nn.Module, sample: Any) -> None:
    try:
        _run(module.train(), sample, _may_write(module))
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
        _run(module.train(), sample, _may_write(module))
    except Exception:  # the layer is the user's: whatever it raises is a no
        return False
    return True
