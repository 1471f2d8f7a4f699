"""A run's weights in one safetensors file: streamed from the checkpoint layer by layer, read back tensor by tensor, and
compared with what the run predicts where the model fits into memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from ringtmp.errors import UsageError
from ringtmp.model.adapter_folder import PEFT_PREFIX
from ringtmp.model.tensor_file import Described, TensorFile
from ringtmp.model.whole_graph import ADAPTER_A, ADAPTER_B, name_before
from ringtmp.run.saved_model import SavedModel, largest_difference, predicted
from ringtmp.system.write_files_together import require_room

#: By a tensor's first name in the model: the names it has in the file.
Names = Mapping[str, tuple[str, ...]]


def all_names(model: SavedModel, merge: bool, once: bool = False) -> Names:
    """Those of the `state_dict`; merged, of the model before adapters were added. `once`: the first of each tensor's alone."""
    found: dict[str, tuple[str, ...]] = {}
    for name, first in model.state:
        if (once and name != first) or (merge and is_adapter(name)):
            continue
        found[first] = (*found.get(first, ()), name_before(name) if merge else name)
    return found


def adapter_names(model: SavedModel) -> Names:
    """What was trained, as PEFT calls it: adapters, and modules that were trained beside them."""
    trained = {first for _, first in model.state} & model.trained
    inside = sorted(name_before(each) for each in trained if name_before(each) != each)
    if inside:
        raise UsageError(f"{inside[0]} was trained beside its adapter, which PEFT's layout cannot say: add --merge")
    adapters = {first for _, first in model.state if is_adapter(first)}
    return {first: (PEFT_PREFIX + first,) for _, first in model.state if first in trained | adapters}


def trained_modules(names: Names) -> list[str]:
    """Modules of which something was trained beside the adapters."""
    return sorted({each.rpartition(".")[0] for each in names if not is_adapter(each)})


def is_adapter(name: str) -> bool:
    return name.endswith((ADAPTER_A, ADAPTER_B))


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
    used = {each.layer + ADAPTER_B for each in model.adapted.values()}
    unused = {name for name, _ in model.state if name.endswith(ADAPTER_B)} - used
    for name, tensor in model.tensors() if unused else ():
        if name in unused and bool(tensor.any()):
            raise UsageError(
                f"--merge: the model does not use {name}, so it cannot be added to a weight; leave --merge out"
            )


def add_adapter(model: SavedModel, name: str, tensor: torch.Tensor, adapters: Mapping[str, torch.Tensor]) -> None:
    """In place, where the tensor is a weight that has one."""
    if (adapted := model.adapted.get(name)) is not None and model.lora is not None:
        wide, narrow = adapters[adapted.layer + ADAPTER_B], adapters[adapted.layer + ADAPTER_A]
        added = (wide @ narrow) * (model.lora.alpha / model.lora.r)
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
            if name.endswith(ADAPTER_B):
                tensor.zero_()
    difference = largest_difference(expected, [predicted(module, each) for each in batches], path.name)
    return difference, "every tensor read back, and predictions"
