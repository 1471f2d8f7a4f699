"""A run's result taken away: files that are used without ringtmp, read back and compared with what the ring predicts.

    model.safetensors    every weight under its name in the model's state_dict
    FOLDER/              as transformers has it: config.json and model.safetensors; of a run with adapters those alone, as PEFT
                         has them: adapter_config.json and adapter_model.safetensors

With `merge`, adapters are added to the weights beside which they were trained.
"""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ringtmp.errors import UsageError
from ringtmp.model.lora import Lora, parse_lora
from ringtmp.model.output_tree import leaves_of
from ringtmp.model.pretrained import PREFIX, is_pretrained
from ringtmp.model.run_graph import dtype_of
from ringtmp.run.result import Result
from ringtmp.runtime.checkpoint import latest, named_weights
from ringtmp.runtime.run_directory import LayerIndex, RunDirectory

SAMPLES = 2
_BASE, _A, _B = ".base_layer.", ".lora_A.", ".lora_B."


@dataclass(frozen=True)
class Exported:
    files: tuple[Path, ...]
    step: int
    tensors: int
    difference: float | None  # the largest between what the ring predicts and what the files give; None: not compared


def export_weights(run_dir: Path, to: Path, merge: bool = False) -> Exported:
    run = RunDirectory(run_dir)
    saved = run.read_config()
    index, layers = run.read_layers()
    checkpoint, _ = latest(run.checkpoints, index.run)
    lora = None if saved.config.training.lora is None else parse_lora(saved.config.training.lora)
    if merge and lora is None:
        raise UsageError(f"--merge: {run_dir} has no adapters to merge")
    as_folder = to.suffix == "" or to.is_dir()
    if not as_folder and to.suffix != ".safetensors":
        raise UsageError(f"--to {to}: give a file that ends in .safetensors, or a folder")
    state = {name: tensor.clone() for name, tensor in named_weights(checkpoint, layers, index.state)}
    adapters = lora is not None and not merge and as_folder
    if merge and lora is not None:
        state = merged(state, lora)
    if not as_folder:
        files: tuple[Path, ...] = (_write(state, to),)
    elif adapters and lora is not None:
        files = _adapters(state, lora, to, saved.config.model.name)
    else:
        files = _whole(state, to, saved.config.model.name)
    back = load_file(files[-1])
    difference = _compare(
        run_dir, index, {name.removeprefix("base_model.model."): each for name, each in back.items()}, lora
    )
    return Exported(files, checkpoint.progress.step, len(back), difference)


def merged(state: dict[str, torch.Tensor], lora: Lora) -> dict[str, torch.Tensor]:
    """The names of the model before adapters were added. The largest matrices are added to in place."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        if _A in name or _B in name:
            continue
        layer, _, kind = name.partition(_BASE)
        if kind == "weight":
            added = (state[f"{layer}{_B}weight"] @ state[f"{layer}{_A}weight"]) * (lora.alpha / lora.r)
            tensor += added if added.shape == tensor.shape else added.T
        found[f"{layer}.{kind}" if kind else name] = tensor
    return found


def _write(state: dict[str, torch.Tensor], path: Path) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, path, metadata={"format": "pt"})
    except OSError as error:
        raise UsageError(f"--to {path} cannot be written: {error.strerror}") from error
    return path


def _whole(state: dict[str, torch.Tensor], folder: Path, model: str) -> tuple[Path, ...]:
    if not is_pretrained(model) or model.endswith(".gguf"):
        raise UsageError(
            f"--to {folder}: the model {model} has no configuration of transformers; give a .safetensors file"
        )
    source = Path(model.removeprefix(PREFIX)).expanduser()
    config = source / "config.json" if source.is_dir() else source
    if not config.is_file():
        raise UsageError(f"--to {folder}: the configuration {config} is gone")
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(config, folder / "config.json")
    return folder / "config.json", _write(state, folder / "model.safetensors")


def _adapters(state: dict[str, torch.Tensor], lora: Lora, folder: Path, model: str) -> tuple[Path, ...]:
    base = str(Path(model.removeprefix(PREFIX)).expanduser()) if is_pretrained(model) else ""
    config: dict[str, Any] = {
        "peft_type": "LORA", "base_model_name_or_path": base, "r": lora.r, "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout, "target_modules": list(lora.on), "bias": "none", "inference_mode": True,
    }  # fmt: skip
    own = {f"base_model.model.{name}": each for name, each in state.items() if _A in name or _B in name}
    file = _write(own, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return folder / "adapter_config.json", file


def _compare(run_dir: Path, index: LayerIndex, back: dict[str, torch.Tensor], lora: Lora | None) -> float | None:
    """What the files give, in a model without the run's weights, against the run's own predictions."""
    inputs = _inputs(index)
    if inputs is None:
        return None
    expected = Result(run_dir).model
    model = copy.deepcopy(expected)
    state = model.state_dict()
    for name, tensor in state.items():
        plain = name.replace(_BASE, ".")
        if name in back:
            tensor.copy_(back[name])
        elif plain in back:
            tensor.copy_(back[plain])
        elif _B in name and lora is not None:
            tensor.zero_()  # merged
    with torch.no_grad():
        one, two = (leaves_of(_called(each, inputs)) for each in (expected, model))
    pairs = [(a, b) for a, b in zip(one, two, strict=True) if a.is_floating_point() and a.numel()]
    return max((float((a - b).abs().max()) for a, b in pairs), default=0.0)


def _called(model: Any, inputs: Any) -> Any:
    return model(**inputs) if isinstance(inputs, dict) else model(inputs)


def _inputs(index: LayerIndex) -> Any:
    """Made up, in the shapes the model takes; None where they are nested more deeply than a dict."""
    generator = torch.Generator().manual_seed(0)
    made = {}
    for name, each in zip(index.input_names, index.inputs, strict=False):
        shape, dtype = (SAMPLES, *each.rest) if each.per_sample else tuple(each.rest), dtype_of(each.dtype)
        if not all(isinstance(size, int) and size >= 0 for size in shape):
            return None
        values = torch.randn(shape, generator=generator) if dtype.is_floating_point else torch.ones(shape)
        made[name] = values.to(dtype)
    if list(made) == [""]:
        return made[""]
    return made if made and all(name.isidentifier() for name in made) else None
