"""A tokeniser of the transformers library, from files on this machine alone, and text as token numbers.

    DIRECTORY         tokenizer.json and its like, as `save_pretrained` writes them
    FILE.gguf         the tokeniser in a model's file
    FILE.json         a tokenizer.json alone

Nothing is fetched, no code that comes with a tokeniser is run, and no pickle is read.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringtmp.data.gguf_header import check_gguf
from ringtmp.errors import UsageError, told_as_usage

#: One of these lies in a directory that has a tokeniser.
FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def has_tokenizer(path: Path) -> bool:
    return path.suffix == ".gguf" if not path.is_dir() else any((path / name).is_file() for name in FILES)


def open_tokenizer(given: str, said: str | None = None) -> Encoder:
    """`said`: what the user wrote, for errors, where it was not --tokenizer."""
    return Encoder(read_tokenizer(given, said or f"--tokenizer {given}"), given)


def read_tokenizer(given: str, said: str) -> Any:
    """As transformers has it. `said`: what the user wrote, for errors."""
    path = Path(given).expanduser()
    if not path.exists():
        raise UsageError(f"{said}: there is no such file or directory")
    if path.name in FILES:
        path = path.parent
    if path.is_dir() and not has_tokenizer(path):
        raise UsageError(
            f"{said}: {path} has no tokeniser (none of {', '.join(FILES)}): give one with --tokenizer DIRECTORY"
        )
    if path.is_file() and path.suffix not in (".json", ".gguf"):
        raise UsageError(f"{said} is no tokeniser: give a directory with a tokenizer.json, that file, or a .gguf file")
    try:
        library: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise UsageError(f"{said} needs the transformers library: pip install 'ringtmp[hf]'") from error
    if path.suffix == ".gguf" and importlib.util.find_spec("gguf") is None:
        raise UsageError(f"{said} needs the package gguf: pip install gguf")
    with told_as_usage(said):
        if path.is_file() and path.suffix == ".json":
            return library.PreTrainedTokenizerFast(tokenizer_file=str(path))
        if path.suffix == ".gguf":
            check_gguf(path)
        where, more = (path, {}) if path.is_dir() else (path.parent, {"gguf_file": path.name})
        return library.AutoTokenizer.from_pretrained(
            str(where), use_fast=True, trust_remote_code=False, local_files_only=True, **more
        )


@dataclass(frozen=True)
class Encoded:
    """Tokens in order. `spans`: from which character of the text to which each goes; `bytes`: of the text, each once, with
    the token that ends them."""

    ids: NDArray[np.int32]
    spans: NDArray[np.int64]  # (tokens, 2)
    bytes: NDArray[np.int32]


class Encoder:
    """A tokeniser with what is asked of it: numbers and places of tokens, and which ones have a meaning of their own."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        if not getattr(tokenizer, "is_fast", False) or not callable(tokenizer):
            raise UsageError(
                f"the tokeniser {name} is a {type(tokenizer).__name__}, which does not say where its tokens lie in the text: "
                "give a fast one of transformers (one with a tokenizer.json)"
            )
        self.name = name
        self.tokenizer = tokenizer
        #: Every number is below this.
        self.vocabulary = 1 + max(tokenizer.get_vocab().values(), default=-1)
        self.end: int | None = tokenizer.eos_token_id
        added = [number for number, token in tokenizer.added_tokens_decoder.items() if token.special]
        self.special = frozenset((*tokenizer.all_special_ids, *added))
        pad = tokenizer.pad_token_id
        #: Stands where nothing is learned and nobody looks.
        self.padding: int = pad if pad is not None else self.end if self.end is not None else 0
        begin = tokenizer.bos_token_id
        #: Whether the tokeniser itself begins every text with its first token.
        begins = begin is not None and tokenizer("a").input_ids[:1] == [begin]
        self.begin: tuple[int, ...] = (begin,) if begins else ()
        self.longest: int = min(int(tokenizer.model_max_length), 2**31 - 1)

    def encode(self, text: str) -> Encoded:
        """Without the tokens that a tokeniser puts around a text."""
        found = self.tokenizer(
            text, add_special_tokens=False, truncation=False, padding=False, return_offsets_mapping=True,
            return_attention_mask=False, verbose=False,
        )  # fmt: skip
        ids = np.asarray(found["input_ids"], np.int32)
        spans = np.asarray(found["offset_mapping"], np.int64).reshape(-1, 2)
        return Encoded(ids, spans, _bytes_of(text, ids, spans[:, 1], self.special))


def _bytes_of(
    text: str, ids: NDArray[np.int32], ends: NDArray[np.int64], special: frozenset[int]
) -> NDArray[np.int32]:  # fmt: skip
    """Of several tokens that make one character, the first has its bytes. Special tokens are no text."""
    if not len(ids):
        return np.zeros(0, np.int32)
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    sizes = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
    place = np.concatenate(([0], np.cumsum(sizes)))
    reached = np.maximum.accumulate(place[ends])
    reached[-1] = place[-1]  # what a tokeniser strips at the end is text, too
    bytes_ = np.diff(reached, prepend=0).astype(np.int32)
    bytes_[np.isin(ids, list(special))] = 0
    return bytes_
