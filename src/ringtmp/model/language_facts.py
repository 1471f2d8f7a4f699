"""What a language model says of itself before it is built: how many tokens it knows, and how long a text may be."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ringtmp.errors import told_as_usage
from ringtmp.model.pretrained import PREFIX


@dataclass(frozen=True)
class LanguageFacts:
    """None: nobody knows."""

    vocabulary: int | None = None
    longest: int | None = None


def facts_of(model: nn.Module) -> LanguageFacts:
    """A model of transformers, or one that answers like it."""
    facts = _of_config(getattr(model, "config", None))
    ask = getattr(model, "get_input_embeddings", None)
    weight = getattr(ask(), "weight", None) if callable(ask) else None
    return LanguageFacts(len(weight), facts.longest) if isinstance(weight, torch.Tensor) else facts


def facts_named(name: str) -> LanguageFacts:
    """Of `hf:PATH`, which has passed the checks of `pretrained`; nothing of a GGUF file, which takes as long to look into as
    to read: its model is asked when it is there."""
    path = path_named(name)
    if path.suffix == ".gguf":
        return LanguageFacts()
    with told_as_usage(f"--model {name}"):
        config = importlib.import_module("transformers").AutoConfig.from_pretrained(
            str(path), trust_remote_code=False, local_files_only=True
        )
    return _of_config(config)


def path_named(name: str) -> Path:
    return Path(name.removeprefix(PREFIX)).expanduser()


def _of_config(config: Any) -> LanguageFacts:
    if callable(getattr(config, "get_text_config", None)):
        config = config.get_text_config()
    found = [getattr(config, each, None) for each in ("vocab_size", "max_position_embeddings")]
    vocabulary, longest = (each if isinstance(each, int) and each > 0 else None for each in found)
    return LanguageFacts(vocabulary, longest)
