"""What a language model says of itself before it is built: how many tokens it knows, how long a text may be,
and whether it learns what comes next."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ringtmp.errors import told_as_usage
from ringtmp.model.decoders import base_of
from ringtmp.model.pretrained import path_named


@dataclass(frozen=True)
class LanguageFacts:
    """None: nobody knows."""

    vocabulary: int | None = None
    longest: int | None = None
    #: The class of a model of transformers that does not learn the next token: its labels mean something else.
    otherwise: str | None = None


def facts_of(model: nn.Module) -> LanguageFacts:
    """A model of transformers, or one that answers like it."""
    facts = _of_config(getattr(model, "config", None), type(base_of(model)))
    ask = getattr(model, "get_input_embeddings", None)
    weight = getattr(ask(), "weight", None) if callable(ask) else None
    return replace(facts, vocabulary=len(weight)) if isinstance(weight, torch.Tensor) else facts


def facts_named(name: str) -> LanguageFacts:
    """Of `hf:PATH`, which has passed the checks of `pretrained`; nothing of a GGUF file, which takes as long to look into as
    to read: its model is asked when it is there."""
    path = path_named(name)
    if path.suffix == ".gguf":
        return LanguageFacts()
    library = importlib.import_module("transformers")
    with told_as_usage(f"--model {name}"):
        config = library.AutoConfig.from_pretrained(str(path), trust_remote_code=False, local_files_only=True)
    return _of_config(config, getattr(library, (getattr(config, "architectures", None) or [""])[0], None))


def _of_config(config: Any, kind: Any) -> LanguageFacts:
    otherwise = kind.__name__ if _learns_otherwise(config, kind) else None
    if callable(getattr(config, "get_text_config", None)):
        config = config.get_text_config()
    found = [getattr(config, each, None) for each in ("vocab_size", "max_position_embeddings")]
    vocabulary, longest = (each if isinstance(each, int) and each > 0 else None for each in found)
    return LanguageFacts(vocabulary, longest, otherwise)


def _learns_otherwise(config: Any, kind: Any) -> bool:
    """Of a class of one's own nobody knows."""
    can = getattr(kind, "can_generate", None)
    if not callable(can) or not kind.__module__.startswith("transformers."):
        return False
    return not can() or bool(getattr(config, "is_encoder_decoder", False))
