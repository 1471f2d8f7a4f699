"""`--model hf:…`: models of the transformers library, from files on this machine alone.

    hf:DIRECTORY      config.json and *.safetensors, as `save_pretrained` writes them
    hf:FILE.gguf      one quantised file; its weights become float32 (needs the package gguf)
    hf:CONFIG.json    the architecture, with random first weights

Nothing is fetched, no code that comes with a model is run, and no pickle is read.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch import nn

from ringtmp.errors import UsageError, some_of, told_as_usage
from ringtmp.model.build_larger_than_memory import LeftUnfilled
from ringtmp.model.checkpoint_names import names_in_model
from ringtmp.model.gguf_file import GgufFile
from ringtmp.model.weights_file import WeightsFile, refuse_pickle

PREFIX = "hf:"
#: What people type who mean a model on the hub.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w-]*/[\w.-]+")


def is_pretrained(name: str) -> bool:
    return name.startswith(PREFIX)


def path_named(name: str) -> Path:
    return Path(name.removeprefix(PREFIX)).expanduser()


def pretrained(name: str, filled: bool = True) -> Callable[[], nn.Module]:
    """A function that builds the model. What can be refused without building it is refused now. Unless `filled`, its weights
    are random ones: for who has others."""
    build = _builder(name, filled)

    def checked() -> nn.Module:
        with told_as_usage(f"--model {name}"):
            return build()

    return checked


def _builder(name: str, filled: bool) -> Callable[[], nn.Module]:
    path = path_named(name)
    library = library_of(f"--model {name}")
    if name == PREFIX or not path.exists():
        raise UsageError(_not_there(name))
    if path.suffix == ".gguf":
        return _of_gguf(library, path, filled)
    if path.is_file():
        refuse_pickle(path, f"--model {name}")
    config = path / "config.json" if path.is_dir() else path
    kind = _architecture(library, config)
    if path.is_dir():
        WeightsFile(path, f"--model {name}")  # there, and no pickle

    def build() -> nn.Module:
        settings = library.AutoConfig.from_pretrained(str(config), trust_remote_code=False, local_files_only=True)
        settings.dtype = "float32"
        if not (path.is_dir() and filled):
            made: nn.Module = kind(settings)
            return made
        with LeftUnfilled():
            model: nn.Module = kind(settings)
        weights = WeightsFile(path, f"--model {name}", mapped=True)
        names = names_in_model(model, weights.names, f"--model {name}")
        if names.put_together:
            return _read_by_library(kind, path, f"--model {name}")
        weights.rename(names.own, names.unused)
        weights.fill("", model)
        weights.finish()
        return model

    return build


def _not_there(name: str) -> str:
    given = name.removeprefix(PREFIX)
    if not given:
        return f"--model {name} names nothing: give a directory, a config.json or a .gguf file of this machine"
    said = f"--model {name}: there is no such file or directory, and nothing is fetched"
    if _HUB_NAME.fullmatch(given):
        said += f"; to fetch it: hf download {given} --local-dir DIRECTORY, and then --model hf:DIRECTORY"
    return said


def _read_by_library(kind: Any, path: Path, said: str) -> nn.Module:
    """By its own loader, which holds the whole model in memory: tensors of the model are made of several of the files."""
    model: nn.Module
    model, found = kind.from_pretrained(
        str(path), dtype="float32", use_safetensors=True, trust_remote_code=False, local_files_only=True,
        output_loading_info=True,
    )  # fmt: skip
    wrong = [
        f"{what} {some_of(sorted(map(str, found.get(key) or ())))}"
        for what, key in (
            ("it lacks", "missing_keys"), ("has otherwise", "mismatched_keys"), ("has besides", "unexpected_keys"),
        )
        if found.get(key)
    ]  # fmt: skip
    if wrong:
        raise UsageError(f"{said} does not fit the model: {'; '.join(wrong)}")
    return model


def library_of(wanted: str) -> Any:
    """The transformers library. `wanted`: what needs it, for the error."""
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise UsageError(f"{wanted} needs the transformers library: pip install 'ringtmp[hf]'") from error


def _architecture(library: Any, config: Path) -> Any:
    """The class that the configuration names."""
    try:
        if config.exists() and not config.is_file():
            raise UsageError(f"--model hf:{config} is no file")  # a pipe would be waited for
        read = json.loads(config.read_bytes())
        names = read.get("architectures") or []
    except OSError as error:
        raise UsageError(f"--model hf:{config}: {error.strerror}") from error
    except (ValueError, AttributeError, RecursionError) as error:
        raise UsageError(f"--model hf:{config} is no configuration of a model: {error}") from error
    if "auto_map" in read:
        raise UsageError(
            f"--model hf:{config} wants code of its own to be run (auto_map), which is never done: build the model in a file "
            "of yours and give it as FILE.py:factory"
        )
    kind = getattr(library, str(names[0]), None) if names else None
    if not isinstance(kind, type) or not issubclass(kind, library.PreTrainedModel):
        said = f"{names[0]!r}, which this version of transformers does not know" if names else "no architecture"
        raise UsageError(
            f'--model hf:{config} names {said}: it needs one such as "architectures": ["LlamaForCausalLM"]'
        )
    return kind


def _of_gguf(library: Any, path: Path, filled: bool) -> Callable[[], nn.Module]:
    if not path.is_file():
        raise UsageError(f"--model hf:{path} is no file")
    if importlib.util.find_spec("gguf") is None:
        raise UsageError(f"--model hf:{path} needs the package gguf: pip install gguf")
    file = GgufFile(library, path)
    if not file.one_by_one:
        return _of_experts(library, path)

    def build() -> nn.Module:
        file.config.dtype = "float32"
        with LeftUnfilled() if filled else nullcontext():
            model: nn.Module = library.AutoModelForCausalLM.from_config(file.config, trust_remote_code=False)
        if filled:
            file.fill(model)
        return model

    return build


def _of_experts(library: Any, path: Path) -> Callable[[], nn.Module]:
    """By the library's own loader, which holds the whole model in memory."""
    if importlib.util.find_spec("accelerate") is None:
        raise UsageError(f"--model hf:{path} has experts, for which accelerate is needed: pip install accelerate")

    def build() -> nn.Module:
        where: dict[str, Any] = {"gguf_file": path.name, "trust_remote_code": False, "local_files_only": True}
        kind = library.AutoModelForCausalLM
        model: nn.Module = kind.from_pretrained(str(path.parent), dtype="float32", **where)
        return model

    return build
