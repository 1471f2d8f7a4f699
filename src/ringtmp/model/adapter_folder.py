"""Adapters as PEFT keeps them: a folder with adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ringtmp.errors import UsageError, some_of
from ringtmp.model.lora import Lora, checked_lora
from ringtmp.model.weights_file import WeightsFile
from ringtmp.model.whole_graph import adapter_tensor

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
#: Before the names of tensors in the file.
PEFT_PREFIX = "base_model.model."
#: Read, or of no influence on what the adapter means: where it came from, and settings of what must be off.
_KNOWN = {
    "r", "lora_alpha", "lora_dropout", "target_modules", "auto_mapping", "base_model_name_or_path", "revision", "task_type",
    "inference_mode", "peft_version", "fan_in_fan_out", "megatron_core", "qalora_group_size", "eva_config", "corda_config",
    "loftq_config", "lora_ga_config",
}  # fmt: skip
#: All else that PEFT can do must be off, so that what a later version adds is not taken for plain LoRA.
_OFF: tuple[Any, ...] = (None, False, "", [], {})
#: Unless it is one of these. Other ways to begin (pissa, olora, corda, loftq, ...) change the base when PEFT loads the adapter.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "bias": ("none", None), "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}  # fmt: skip


def lora_of(folder: Path) -> Lora:
    """What the adapter's configuration says. All that is not taken is told at once."""
    path = folder / ADAPTER_CONFIG
    try:
        read = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"--adapter {folder}: {path.name}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--adapter {folder}: {path.name} is no JSON: {error}") from error
    if not isinstance(read, dict):
        raise UsageError(f"--adapter {folder}: {path.name} is no configuration of an adapter")
    wrong = [f"{key}={value!r}" for key, value in read.items() if key not in _KNOWN and not _is_plain(key, value)]
    modules: Any = read.get("target_modules")
    if not (isinstance(modules, list) and modules and all(isinstance(each, str) and each for each in modules)):
        wrong.append(f"target_modules={modules!r}, which must be a list of names")
    numbers = {"r": read.get("r"), **{key: read.get(key, 0.0) for key in ("lora_alpha", "lora_dropout")}}
    wrong += [f"{key}={value!r}" for key, value in numbers.items() if type(value) not in (int, float)]
    if type(numbers["r"]) is float:
        wrong.append(f"r={numbers['r']!r}, which must be a whole number")
    if wrong:
        raise UsageError(
            f"--adapter {folder}: adapters with {some_of(wrong, 20)} are not taken: LoRA on linear layers is"
        )
    found = Lora(
        tuple(sorted(modules)), int(read["r"]), float(read.get("lora_alpha", 8)), float(read.get("lora_dropout", 0.0))
    )
    return checked_lora(found, f"--adapter {folder}")


def _is_plain(key: str, value: Any) -> bool:
    """1 is not True: PEFT takes it for another one."""
    return any(value == each and type(value) is type(each) for each in _PLAIN.get(key, _OFF))


def weights_of(folder: Path) -> WeightsFile:
    pickled = folder / "adapter_model.bin"
    if pickled.exists() and not (folder / ADAPTER_WEIGHTS).exists():
        raise UsageError(
            f"--adapter {folder} has pickled weights alone ({pickled.name}), which may run code when read: save it with "
            "safe_serialization=True"
        )
    return WeightsFile(folder / ADAPTER_WEIGHTS, f"--adapter {folder}: {ADAPTER_WEIGHTS}", key=_key)


def _key(name: str) -> str | None:
    """What a tensor of the model is called in the file; None: it is not there, since it belongs to the base."""
    return f"{PEFT_PREFIX}{name}" if ".lora_A." in name or ".lora_B." in name else None


def base_name(name: str) -> str | None:
    """What a tensor of PEFT's model is called in the base; None: a trained copy stands in for it, or it is an adapter's."""
    if ".original_module." in name or adapter_tensor(name) is not None:
        return None
    return re.sub(r"\.modules_to_save\.[^.]+\.", ".", name.removeprefix(PEFT_PREFIX).replace(".base_layer.", "."))
