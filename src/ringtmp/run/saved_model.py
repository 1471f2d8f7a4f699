"""The model of a run's newest checkpoint, to be written to other files: its parts, made-up inputs, what it predicts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ringtmp.data.sample_or_batch import LABELS
from ringtmp.errors import RingError, UsageError
from ringtmp.model.adapter_folder import PEFT_PREFIX
from ringtmp.model.lora import Lora, parse_lora
from ringtmp.model.output_tree import named_tensors
from ringtmp.model.portable_layer import Graph
from ringtmp.model.portable_model import PortableModel, is_cut
from ringtmp.model.random_operators import random_count
from ringtmp.model.run_graph import dtype_of, layer_bytes
from ringtmp.model.shrink_frozen_weights import enlarged, whole_layer
from ringtmp.model.to_module import revive
from ringtmp.model.whole_graph import Adapted, adapted_weights, adapter_tensor, depends_on, rows_of, whole_graph
from ringtmp.runtime.checkpoint import latest
from ringtmp.runtime.ensemble_members import refuse_members
from ringtmp.runtime.run_directory import RunDirectory
from ringtmp.system.resources import free_memory_bytes
from ringtmp.units import bytes_text

#: A batch of each of these sizes is predicted: any number of samples must do.
BATCHES = (3, 1)
#: Beside its weights a model that predicts for a few samples takes this share of them.
_ROOM = 1.25
#: Other arithmetic gives other roundings. What differs by more than this share of the largest output is another model.
LARGEST_DIFFERENCE = 1e-3
Named = dict[str, torch.Tensor]


class SavedModel:
    def __init__(self, run_dir: Path) -> None:
        run = RunDirectory(run_dir)
        self.run_dir = run_dir
        config = run.read_config().config
        self.name = config.model.name
        self.lora: Lora | None = None if config.training.lora is None else parse_lora(config.training.lora)
        self.index, self._kept = run.read_layers()
        self.layers = [whole_layer(each) for each in self._kept]  # with weights that are kept small in float32
        self.checkpoint, _ = latest(run.checkpoints, self.index.run)
        self.step = self.checkpoint.progress.step
        refuse_members(self.checkpoint, run_dir, "a file of one model")

    @property
    def weight_bytes(self) -> int:
        return sum(map(layer_bytes, self.layers))

    @property
    def state(self) -> list[tuple[str, str]]:
        """Every name of the model's `state_dict`, and the first name of that tensor."""
        saved = (layer.full_name(each) for layer in self.layers for each in layer.tensors if each.saved)
        return list(self.index.state) or [(name, name) for name in saved]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What belongs to the `state_dict`, one layer in memory at a time."""
        for index, layer in enumerate(self.layers):
            for each, tensor in zip(layer.tensors, self._of_layer(index), strict=True):
                if each.saved:
                    yield layer.full_name(each), tensor

    def _of_layer(self, index: int) -> list[torch.Tensor]:
        return enlarged(self._kept[index], self.checkpoint.layer(index, self._kept[index])[0])[1]

    @cached_property
    def is_peft(self) -> bool:
        """Whether it was given as PEFT wraps a model, with adapters in it."""
        names = [name for name, _ in self.state]
        return all(name.startswith(PEFT_PREFIX) for name in names) and any(map(adapter_tensor, names))

    @property
    def has_adapters(self) -> bool:
        return self.lora is not None or self.is_peft

    @property
    def trained(self) -> set[str]:
        return {layer.full_name(each) for layer in self.layers for each in layer.tensors if each.trainable}

    @cached_property
    def graph(self) -> Graph:
        """Its evaluation."""
        return whole_graph(self.layers, len(self.index.inputs) or self.layers[0].evaluate.entering)

    @cached_property
    def adapted(self) -> dict[str, Adapted]:
        """By the weight's first name in the model. UsageError where adapters cannot be added to their weights."""
        return adapted_weights(self.graph)

    @cached_property
    def labels(self) -> int | None:
        """The place of the labels among the inputs, where only a loss needs them: nothing that it gives for every sample."""
        if LABELS not in self.index.input_names or not is_cut(self.layers):
            return None
        place, last = self.index.input_names.index(LABELS), len(self.layers)
        needing = [at for at, needs in enumerate(depends_on(self.graph, place)) if needs]
        return None if any(self.index.crossing(False, (last, at)).per_sample for at in needing) else place

    def why_not_predicted(self) -> str | None:
        """A word on why its predictions cannot be compared here."""
        needed, free = int(self.weight_bytes * _ROOM), free_memory_bytes()
        if needed > free:
            return f"the model takes {bytes_text(needed)} and {bytes_text(free)} are free"
        if random_count(self.graph):
            return "it draws random numbers"
        if self.inputs(1) is None:
            return "the shapes of its inputs are not known"
        return None

    def loaded(self) -> tuple[list[list[torch.Tensor]], nn.Module]:
        """Its tensors by layer, and a module of them."""
        tensors = [self._of_layer(index) for index in range(len(self.layers))]
        pairs = list(zip(self.layers, tensors, strict=True))
        if is_cut(self.layers):
            index = self.index
            return tensors, PortableModel(pairs, self.state, index.input_names, index.without_targets).eval()
        return tensors, revive(pairs).eval()

    def inputs(self, samples: int) -> Named | None:
        """Made up, in the shapes it takes, by name and without labels that it does not need; None where shapes are open."""
        generator = torch.Generator().manual_seed(samples)
        rows = rows_of(self.layers, len(self.index.inputs))
        names = self.index.input_names or tuple(map(str, range(len(self.index.inputs))))
        made: Named = {}
        for place, (name, each) in enumerate(zip(names, self.index.inputs, strict=True)):
            shape, dtype = (samples, *each.rest) if each.per_sample else tuple(each.rest), dtype_of(each.dtype)
            if any(size < 0 for size in shape):
                return None
            if place in rows:
                made[name] = torch.randint(0, rows[place], shape, generator=generator).to(dtype)
            else:
                values = torch.randn(shape, generator=generator) if dtype.is_floating_point else torch.ones(shape)
                made[name] = values.to(dtype)
        if self.labels is not None:
            made.pop(LABELS)
        return made or None

    def batches(self) -> list[Named]:
        return [found for size in BATCHES if (found := self.inputs(size)) is not None]


def predicted(model: nn.Module, inputs: Named) -> Named:
    """By the names of its outputs."""
    values = tuple(inputs.values())
    with torch.no_grad():
        if all(name.isdecimal() or not name for name in inputs):
            given: Any = model(*values) if len(values) == 1 or isinstance(model, PortableModel) else model(values)
        else:
            given = model(**inputs) if not isinstance(model, nn.Sequential) else model(inputs)
    return {name: each.clone() for name, each in named_tensors(given).items()}


def largest_difference(expected: Sequence[Named], found: Sequence[Mapping[str, Any]], what: str) -> float:
    """Between predictions, over what both have. RingError where it is more than rounding."""
    largest = 0.0
    for one, two in zip(expected, found, strict=True):
        pairs = [(one[name], two[name]) for name in one if name in two and one[name].numel()]
        if not pairs:
            raise RingError(f"{what} gives {', '.join(two) or 'nothing'}, and the run predicts {', '.join(one)}")
        for a, b in pairs:
            a, b = a.double(), torch.as_tensor(b).double()
            apart = _apart(a, b) if a.shape == b.shape else float("inf")
            largest_of_all = float(a.masked_fill(~a.isfinite(), 0.0).abs().max())
            if not apart <= LARGEST_DIFFERENCE * max(1.0, largest_of_all):
                raise RingError(
                    f"{what} gives other numbers than the run predicts: they differ by {apart:g}, which is more than rounding; "
                    "nothing was written"
                )
            largest = max(largest, apart)
    return largest


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """What is infinite or no number in both is alike: a run that went wrong is written as it is."""
    alike = (one == other) | (one.isnan() & other.isnan())
    return float((one - other).abs().masked_fill(alike, 0.0).max())


def require_known_inputs(model: SavedModel, to: Path) -> None:
    if not model.index.inputs or model.inputs(1) is None:
        raise UsageError(f"--to {to}: the shapes of the model's inputs are not known; give a .safetensors file")
