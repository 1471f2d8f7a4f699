"""Folders as other libraries have them, with everything beside the weights that loading them needs.

transformers    config.json, generation_config.json, the tokeniser's files, model.safetensors
PEFT            adapter_config.json, adapter_model.safetensors
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from ringtmp.errors import RingError, UsageError
from ringtmp.model.pretrained import PREFIX, is_pretrained, library_of
from ringtmp.run.saved_model import SavedModel, largest_difference, predicted
from ringtmp.run.write_weights import adapter_names, all_names, compare_weights, trained_modules, write_weights

WEIGHTS, ADAPTERS = "model.safetensors", "adapter_model.safetensors"
CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
#: With these beside each other a library would load both: one export takes the place of the other.
REPLACED = (WEIGHTS, ADAPTERS, CONFIG, ADAPTER_CONFIG)
#: What a tokeniser, a processor of images and generation read, as `save_pretrained` writes them. No code, no pickle.
_BESIDE = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
    "chat_template.jinja", "chat_template.json", "preprocessor_config.json", "processor_config.json",
)  # fmt: skip


def require_source(model: SavedModel, to: Path) -> Path:
    """The files that the run's model came from."""
    if not is_pretrained(model.name):
        raise UsageError(
            f"--to {to}: the model {model.name} has no configuration of transformers; give a file that ends in .safetensors, "
            ".onnx or .pt2"
        )
    source = Path(model.name.removeprefix(PREFIX)).expanduser()
    config = source / CONFIG if source.is_dir() else source
    if not config.is_file():
        raise UsageError(f"--to {to}: {config}, which the model was made from, is gone")
    return config


def write_transformers(model: SavedModel, folder: Path, config: Path, merge: bool) -> tuple[int, float | None, str]:
    if config.suffix == ".gguf":
        _from_gguf(model, folder, config)
    else:
        said = {**json.loads(config.read_bytes()), "dtype": "float32"}
        said.pop("torch_dtype", None)  # its older name
        (folder / CONFIG).write_text(json.dumps(said, indent=2) + "\n")
        for name in _BESIDE:
            if (config.parent / name).is_file():
                shutil.copyfile(config.parent / name, folder / name)
    names = all_names(model, merge, once=True)  # the library ties what it ties
    tensors = write_weights(model, folder / WEIGHTS, names, merge)
    reason = model.why_not_predicted()
    if reason is not None:
        return tensors, None, f"every tensor read back; predictions not compared: {reason}"
    return tensors, _compared(model, folder), "every tensor read back, and predictions of transformers"


def write_adapters(model: SavedModel, folder: Path) -> tuple[int, float | None, str]:
    lora = model.lora
    assert lora is not None
    names = adapter_names(model)
    base = str(Path(model.name.removeprefix(PREFIX)).expanduser()) if is_pretrained(model.name) else ""
    config: dict[str, Any] = {
        "peft_type": "LORA", "base_model_name_or_path": base, "r": lora.r, "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout, "target_modules": list(lora.on), "bias": "none", "inference_mode": True,
    }  # fmt: skip
    if modules := trained_modules(names):
        config["modules_to_save"] = modules
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    tensors = write_weights(model, folder / ADAPTERS, names)
    return tensors, *compare_weights(model, folder / ADAPTERS, names)


def _compared(model: SavedModel, folder: Path) -> float:
    """What transformers predicts with the folder alone."""
    _, own = model.loaded()
    batches = model.batches()
    expected = [predicted(own, each) for each in batches]
    del own  # one of the two is in memory at a time
    library = library_of(f"--to {folder.name}")
    kind = getattr(library, json.loads((folder / CONFIG).read_bytes())["architectures"][0])
    try:
        again = kind.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True).eval()
    except Exception as error:  # the library has many kinds
        raise RingError(f"transformers cannot read back what was written: {error}") from error
    with torch.no_grad():
        given = [again(**each) for each in batches]
    found = [{name: each[name] for name in expected[0] if name in each} for each in given]
    return largest_difference(expected, found, "transformers")


def _from_gguf(model: SavedModel, folder: Path, file: Path) -> None:
    """The configuration and the tokeniser as transformers reads them from the file."""
    library = library_of(f"--to {folder.name}")
    where: dict[str, Any] = {"gguf_file": file.name, "trust_remote_code": False, "local_files_only": True}
    try:
        config = library.AutoConfig.from_pretrained(str(file.parent), **where)
        kind = library.AutoModelForCausalLM._model_mapping[type(config)]
    except Exception as error:  # the library has many kinds
        raise UsageError(f"the configuration in {file} cannot be read: {error}") from error
    config.architectures, config.dtype = [kind.__name__], "float32"
    config.tie_word_embeddings = any(name != first for name, first in model.state)
    config.save_pretrained(str(folder))
    try:
        library.AutoTokenizer.from_pretrained(str(file.parent), **where).save_pretrained(str(folder))
    except Exception as error:  # a file without one, or one of a kind that the library does not read
        raise UsageError(f"the tokeniser in {file} cannot be read: {error}") from error
