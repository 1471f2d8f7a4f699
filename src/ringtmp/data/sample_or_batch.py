"""An item of the data, a sample or a batch: a pair of inputs and targets, or one mapping with `labels` in it.

Mappings are what tokenizers and their collators make. The labels in one are the targets; they stay among the inputs only
for a model that computes its own loss from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch

from ringtmp.data.nested_inputs import leaves, map_tensors, names
from ringtmp.errors import UsageError

#: The entry of a mapping that holds the targets.
LABELS = "labels"
#: The name of the loss that the model computes itself.
OWN_LOSS = "model"
#: A label that torch's cross-entropy leaves out.
IGNORED = -100
#: What an item of the data is: (inputs, targets), a mapping with labels, or a mapping without.
Items = Literal["pairs", "labels", "inputs"]


def without_labels(name: str, inputs: Any, targets: torch.Tensor) -> tuple[Any, torch.Tensor]:
    rest = {key: item for key, item in inputs.items() if key != LABELS}
    if not rest:
        raise UsageError(f"data {name} has {LABELS!r} and no inputs beside them")
    return rest, targets


def checked_pair(name: str, item: Any) -> tuple[Any, torch.Tensor]:
    if isinstance(item, Mapping):
        inputs: Any = map_tensors(_as_it_is, item) if leaves(item) else item
        targets = inputs.get(LABELS, leaves(inputs)[0])
    elif not isinstance(item, tuple | list) or len(item) != 2:
        raise UsageError(
            f"data {name} must give (inputs, targets) pairs, or dicts with {LABELS!r}, not {type(item).__name__}"
        )
    else:
        inputs, targets = item
    if not isinstance(targets, torch.Tensor):
        raise UsageError(f"data {name}: targets must be a tensor, not {type(targets).__name__}")
    sizes = [leaf.shape[0] if leaf.dim() else 0 for leaf in (*leaves(inputs), targets)]
    if len(set(sizes)) != 1 or 0 in sizes:
        each = zip((*(each or "inputs" for each in names(inputs)), "targets"), sizes, strict=True)
        raise UsageError(
            f"data {name}: inputs and targets of one batch have different lengths: "
            f"{', '.join(f'{what} {size}' for what, size in dict(each).items())}"
        )
    return inputs, targets


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def kind_of(item: Any) -> Items:
    if not isinstance(item, Mapping):
        return "pairs"
    return "labels" if LABELS in item else "inputs"


def usual_loss(items: Items, targets: torch.Tensor) -> str:
    if items != "pairs":
        return OWN_LOSS
    return "mse" if targets.is_floating_point() else "cross_entropy"


def collated(name: str, samples: list[Any]) -> Any:
    from torch.utils.data import default_collate

    if isinstance(samples[0], Mapping):
        samples = [_sample(name, each, samples[0]) for each in samples]
    try:
        return default_collate(samples)
    except RuntimeError as error:
        if "equal size" not in str(error):
            raise
        keys = samples[0] if isinstance(samples[0], Mapping) else ()
        uneven = [key for key in keys if len({getattr(each[key], "shape", ()) for each in samples}) > 1]
        which = f" in {', '.join(map(repr, uneven))}" if uneven else ""
        raise UsageError(f"data {name}: samples differ in shape{which}: pad them to one length") from error


def _sample(name: str, sample: Any, first: Mapping[str, Any]) -> dict[str, Any]:
    """One sample as a dict of tensors; lists of numbers, as in a column of a table, become tensors."""
    if not isinstance(sample, Mapping) or sample.keys() != first.keys():
        given = list(sample) if isinstance(sample, Mapping) else type(sample).__name__
        raise UsageError(f"data {name}: one sample has {list(first)}, another {given}: all must have the same keys")
    found: dict[str, Any] = {}
    for key, value in sample.items():
        if isinstance(value, list | tuple | np.ndarray) and not any(isinstance(each, torch.Tensor) for each in value):
            try:
                value = torch.as_tensor(np.asarray(value))
            except (TypeError, ValueError) as error:
                raise UsageError(f"data {name}: {key!r} of a sample is not made of numbers: leave it out") from error
        if value is None or isinstance(value, str):
            raise UsageError(
                f"data {name}: {key!r} of a sample is a {type(value).__name__}, not a tensor: leave it out"
            )
        found[key] = value
    return found
