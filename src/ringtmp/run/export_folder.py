"""Folders as other libraries have them, with everything beside the weights that loading them needs.

transformers    config.json, generation_config.json, the tokeniser's files, model.safetensors
PEFT            adapter_config.json, adapter_model.safetensors (`export_adapters.py` writes them)
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from ringtmp.errors import RingError, UsageError, told_as_usage
from ringtmp.model.adapter_folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from ringtmp.model.pretrained import is_pretrained, library_of, path_named
from ringtmp.run.saved_model import SavedModel, largest_difference, predicted
from ringtmp.run.write_safetensors import all_names, write_weights

CONFIG, WEIGHTS = "config.json", "model.safetensors"
#: What a tokeniser, a processor of images and generation read, as `save_pretrained` writes them. No code, no pickle.
_BESIDE = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
    "chat_template.jinja", "chat_template.json", "preprocessor_config.json", "processor_config.json",
)  # fmt: skip


def refuse_own_files(model: SavedModel, to: Path, folder: bool) -> None:
    """UsageError where the run, or what its model was made from, would be overwritten. --force does not help."""
    if folder and to.resolve() == model.run_dir.resolve():
        raise UsageError(f"--to {to} is the run itself: choose another folder")
    if not is_pretrained(model.name):
        return
    source = _source(model)
    from_folder = (source if source.is_dir() else source.parent).resolve()
    if to.resolve() == from_folder:
        raise UsageError(f"--to {to} is the folder which the run's model was made from: choose another folder")
    # not to.resolve(): a link in that folder would be replaced, wherever it leads
    if to.suffix == ".safetensors" and to.exists() and to.parent.resolve() == from_folder and source.suffix != ".gguf":
        raise UsageError(f"--to {to} lies in the folder which the run's model was made from: choose another name")


def refuse_other_kind(to: Path, adapters: bool) -> None:
    """UsageError where a folder has a whole model and is to get adapters, or the other way round."""
    others = [
        name for name in ((CONFIG, WEIGHTS) if adapters else (ADAPTER_CONFIG, ADAPTER_WEIGHTS)) if (to / name).exists()
    ]
    if others:
        kinds = ("a whole model", "adapters") if adapters else ("adapters", "a whole model")
        raise UsageError(
            f"--to {to} has {', '.join(others)}, of {kinds[0]}: with {kinds[1]} beside it a library would load both; choose "
            "another folder"
        )


def _source(model: SavedModel) -> Path:
    return path_named(model.name)


def require_source(model: SavedModel, to: Path) -> Path:
    """The files that the run's model came from."""
    if not is_pretrained(model.name):
        raise UsageError(
            f"--to {to}: the model {model.name} has no configuration of transformers; give a file that ends in .safetensors, "
            ".onnx or .pt2"
        )
    source = _source(model)
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
    with told_as_usage(f"the configuration in {file}"):
        config = library.AutoConfig.from_pretrained(str(file.parent), **where)
        kind = library.AutoModelForCausalLM._model_mapping[type(config)]
    config.architectures, config.dtype = [kind.__name__], "float32"
    config.tie_word_embeddings = any(name != first for name, first in model.state)
    config.save_pretrained(str(folder))
    with told_as_usage(
        f"the tokeniser in {file}"
    ):  # a file without one, or one of a kind that the library does not read
        library.AutoTokenizer.from_pretrained(str(file.parent), **where).save_pretrained(str(folder))
