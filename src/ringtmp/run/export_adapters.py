"""What was trained beside a base, as PEFT keeps it: adapter_config.json and adapter_model.safetensors.

`--lora` says what its adapters are. Of a model that PEFT itself made, names, shapes and the evaluation's graph say it: where
an adapter stands, its rank, and the number that its product is multiplied by.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from ringtmp.errors import UsageError, some_of
from ringtmp.model.adapter_folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS, PEFT_PREFIX, base_name
from ringtmp.model.pretrained import is_pretrained, path_named
from ringtmp.model.whole_graph import AdapterUse, adapter_tensor, adapters_in, name_before
from ringtmp.run.saved_model import SavedModel
from ringtmp.run.write_safetensors import Names, compare_weights, is_adapter, write_weights


def write_adapters(model: SavedModel, folder: Path) -> tuple[int, float | None, str]:
    names, config = _of_peft(model) if model.is_peft else _of_lora(model)
    said = {"peft_type": "LORA", "base_model_name_or_path": "", "bias": "none", "inference_mode": True, **config}
    (folder / ADAPTER_CONFIG).write_text(json.dumps(said, indent=2) + "\n")
    tensors = write_weights(model, folder / ADAPTER_WEIGHTS, names)
    return tensors, *compare_weights(model, folder / ADAPTER_WEIGHTS, names)


def _of_lora(model: SavedModel) -> tuple[Names, dict[str, Any]]:
    lora = model.lora
    assert lora is not None
    trained = {first for _, first in model.state} & model.trained
    inside = sorted(name_before(each) for each in trained if name_before(each) != each)
    if inside:
        raise UsageError(f"{inside[0]} was trained beside its adapter, which PEFT's layout cannot say: add --merge")
    adapters = {first for _, first in model.state if is_adapter(first)}
    names = {first: (PEFT_PREFIX + first,) for _, first in model.state if first in trained | adapters}
    config: dict[str, Any] = {
        "r": lora.r, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout, "target_modules": list(lora.on),
    }  # fmt: skip
    if is_pretrained(model.name):
        config["base_model_name_or_path"] = str(path_named(model.name))
    if modules := sorted({each.rpartition(".")[0] for each in names if not is_adapter(each)}):
        config["modules_to_save"] = modules
    return names, config


def _of_peft(model: SavedModel) -> tuple[Names, dict[str, Any]]:
    used = list({each.b: each for each in adapters_in(model.graph)}.values())
    called = sorted({part.name for each in used if (part := adapter_tensor(each.b)) is not None})
    if len(called) != 1:
        raise UsageError(
            f"the run's model uses {len(called)} adapters ({', '.join(called) or 'none'}), and a folder has one: export a "
            ".safetensors file"
        )
    names: dict[str, tuple[str, ...]] = {}
    modules: set[str] = set()
    other: list[str] = []
    marked = f".modules_to_save.{called[0]}."
    for _, first in model.state:
        part = adapter_tensor(first)
        if part is not None and part.name == called[0]:
            names[first] = (f"{part.layer}.lora_{part.side}.weight",)
        elif marked in first:
            names[first] = (first.replace(marked, "."),)
            modules.add(first.removeprefix(PEFT_PREFIX).partition(marked)[0])
        elif first in model.trained:
            other.append(first)
    if other:
        raise UsageError(
            f"beside the adapters {some_of(other)} was trained, which PEFT's layout of plain LoRA cannot say: export a "
            ".safetensors file"
        )
    config = _deduced(model, used)
    if modules:
        config["modules_to_save"] = sorted(modules)
    return names, config


def _deduced(model: SavedModel, used: list[AdapterUse]) -> dict[str, Any]:
    """What PEFT would have to be told to make the same adapters; what most of them have is said once for all."""
    shapes = {layer.full_name(each): each.shape for layer in model.layers for each in layer.tensors}
    ranks = {each.layer.removeprefix(PEFT_PREFIX): shapes[each.a][0] for each in used}
    alphas = {each.layer.removeprefix(PEFT_PREFIX): each.scale * shapes[each.a][0] for each in used}
    rank, alpha = (Counter(each.values()).most_common(1)[0][0] for each in (ranks, alphas))
    config: dict[str, Any] = {
        "r": rank, "lora_alpha": alpha, "lora_dropout": 0.0, "target_modules": _targets(model, set(ranks)),
    }  # fmt: skip
    for key, found, usual in (("rank_pattern", ranks, rank), ("alpha_pattern", alphas, alpha)):
        if others := {name: each for name, each in found.items() if each != usual}:
            config[key] = others
    return config


def _targets(model: SavedModel, adapted: set[str]) -> list[str]:
    """The last part of a name where that means no other module, else the whole name."""
    others = {
        name.rpartition(".")[0].rpartition(".")[2]
        for each, _ in model.state
        if (name := base_name(each)) is not None and name.rpartition(".")[0] not in adapted
    }
    return sorted({name if (last := name.rpartition(".")[2]) in others else last for name in adapted})
