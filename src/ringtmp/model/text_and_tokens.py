"""Text to token numbers and back: a model's own tokeniser, from files on this machine alone, or bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from ringtmp.data.chat_template import chat_template, rendered
from ringtmp.data.tokenizer import read_tokenizer
from ringtmp.errors import UsageError
from ringtmp.model.pretrained import PREFIX, is_pretrained

#: Size of a vocabulary of bytes.
BYTES = 256


class Tokenizer(Protocol):
    ends: frozenset[int]  # tokens after which a text is at its end

    def encode(self, text: str, chat: bool = False) -> list[int]:
        """`chat`: as what a person says in a conversation, to be answered."""
        ...

    def decode(self, tokens: Sequence[int]) -> str: ...


class Bytes:
    ends: frozenset[int] = frozenset()

    def encode(self, text: str, chat: bool = False) -> list[int]:
        if chat:
            raise UsageError("--chat needs a model with a chat template, and this one reads bytes: leave it out")
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")


class OfTransformers:
    def __init__(self, found: Any, ends: Sequence[int]) -> None:
        self._found = found
        own = getattr(found, "eos_token_id", None)
        self.ends = frozenset([*ends, *([own] if isinstance(own, int) else [])])

    def encode(self, text: str, chat: bool = False) -> list[int]:
        if not chat:
            return list(self._found(text)["input_ids"])
        if chat_template(self._found) is None:
            raise UsageError("--chat: the model's tokeniser has no chat template; leave it out")
        said = [{"role": "user", "content": text}]
        asked = rendered(self._found, "--chat", said, add_generation_prompt=True)
        return list(self._found(asked, add_special_tokens=False)["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._found.decode(list(tokens), skip_special_tokens=True))


def load_tokenizer(model_name: str, tokenizer_path: str | None = None) -> Tokenizer | None:
    """The tokeniser in the given directory, .gguf or tokenizer.json, or else the one beside a model of transformers. None: the
    model has no name that leads to one."""
    if tokenizer_path is None and not is_pretrained(model_name):
        return None
    path = Path(tokenizer_path or model_name.removeprefix(PREFIX)).expanduser()
    said = f"--tokenizer {path}" if tokenizer_path else f"the model hf:{path}"
    if tokenizer_path is None and path.suffix == ".json":
        path = path.parent  # of a configuration
    found = read_tokenizer(str(path), said)
    return OfTransformers(found, _ends(path if path.is_dir() else path.parent))


def _ends(folder: Path) -> list[int]:
    """What the model's settings for generation say."""
    try:
        said = json.loads((folder / "generation_config.json").read_bytes()).get("eos_token_id")
    except (OSError, ValueError, AttributeError):
        return []
    listed = said if isinstance(said, list) else [said]
    return [each for each in listed if isinstance(each, int)]
