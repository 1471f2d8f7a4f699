"""A run's weights in one safetensors file: streamed from the checkpoint layer by layer, read back tensor by tensor, and
compared with what the run predicts where the model fits into memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from ringtmp.errors import UsageError
from ringtmp.model.adapter_folder import base_name
from ringtmp.model.tensor_file import Described, TensorFile
from ringtmp.model.whole_graph import adapter_tensor, name_before
from ringtmp.run.saved_model import SavedModel, largest_difference, predicted
from ringtmp.system.write_files_together import require_room

#: By a tensor's first name in the model: the names it has in the file.
Names = Mapping[str, tuple[str, ...]]


def all_names(model: SavedModel, merge: bool, once: bool = False) -> Names:
    """Those of the `state_dict`; merged, of the model before adapters were added. `once`: the first of each tensor's alone."""
    found: dict[str, tuple[str, ...]] = {}
    for name, first in model.state:
        given = _merged_name(model, name) if merge else name
        if (once and name != first) or given is None:
            continue
        found[first] = (*found.get(first, ()), given)
    return found


def _merged_name(model: SavedModel, name: str) -> str | None:
    """Before adapters were added to the model; None: it belongs to one, or another tensor stands in for it."""
    if adapter_tensor(name) is not None:
        return None
    return base_name(name) if model.is_peft else name_before(name)


def is_adapter(name: str) -> bool:
    return adapter_tensor(name) is not None


def _is_b(name: str) -> bool:
    part = adapter_tensor(name)
    return part is not None and part.side == "B"


def write_weights(model: SavedModel, path: Path, names: Names, merge: bool = False) -> int:
    """Returns how many tensors the file has. It was read back."""
    described = {
        layer.full_name(each): Described(each.dtype, each.shape)
        for layer in model.layers
        for each in layer.tensors
        if each.saved
    }
    entries = {name: described[first] for first, each in names.items() for name in each}
    require_room(path.parent, sum(each.bytes for each in entries.values()))
    adapters = {name: each for name, each in model.tensors() if is_adapter(name)} if merge else {}
    file = TensorFile(path, entries)
    try:
        for first, tensor in model.tensors():
            if merge:
                add_adapter(model, first, tensor, adapters)
            for name in names.get(first, ()):
                file.put(name, tensor)
    finally:
        file.close()
    file.check()
    return len(entries)


def require_mergeable(model: SavedModel) -> None:
    """UsageError where adapters cannot be added to the weights, or one would be lost that no operator of the graph uses."""
    used = {each.b for each in model.adapted.values()}
    unused = {name for name, _ in model.state if _is_b(name)} - used
    for name, tensor in model.tensors() if unused else ():
        if name in unused and bool(tensor.any()):
            raise UsageError(
                f"--merge: the model does not use {name}, so it cannot be added to a weight; leave --merge out"
            )


def add_adapter(model: SavedModel, name: str, tensor: torch.Tensor, adapters: Mapping[str, torch.Tensor]) -> None:
    """In place, where the tensor is a weight that has one."""
    if (adapted := model.adapted.get(name)) is not None:
        added = (adapters[adapted.b] @ adapters[adapted.a]) * adapted.scale
        with torch.no_grad():
            tensor += added.T if adapted.turned else added


def compare_weights(model: SavedModel, path: Path, names: Names, merge: bool = False) -> tuple[float | None, str]:
    """The largest difference between what the run predicts and what the same graph predicts with the file's tensors."""
    reason = model.why_not_predicted()
    if reason is not None:
        return None, f"every tensor read back; predictions not compared: {reason}"
    _, module = model.loaded()
    batches = model.batches()
    expected = [predicted(module, each) for each in batches]
    own = module.state_dict()  # the tensors themselves: the model is in memory once
    with safe_open(str(path), framework="pt") as file, torch.no_grad():
        for first, found in names.items():
            own[first].copy_(file.get_tensor(found[0]))
    if merge:
        for name, tensor in own.items():
            if _is_b(name):
                tensor.zero_()
    difference = largest_difference(expected, [predicted(module, each) for each in batches], path.name)
    return difference, "every tensor read back, and predictions"
