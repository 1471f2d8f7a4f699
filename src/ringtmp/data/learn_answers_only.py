"""Which tokens of a conversation, or of a prompt with its completion, are learned: what the assistant says, to the end of
its turn.

A chat template is the tokeniser's own. Where it marks what the assistant says (`{% generation %}`), that counts.
Otherwise the conversation is rendered up to each answer, with and without it, or with another in its place: the answer
begins where the two differ.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringtmp.data.chat_template import chat_template, rendered
from ringtmp.data.text_files import ASSISTANT, Answered, Chat
from ringtmp.data.tokenizer import Encoded, Encoder
from ringtmp.errors import UsageError

Tokens = tuple[Encoded, NDArray[np.bool_]]  # with which of them are learned
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


def of_completion(encoder: Encoder, item: Answered) -> Tokens:
    """A token that covers the end of the prompt and the beginning of the completion is learned. The end token too."""
    text = encoder.encode(item.prompt + item.completion)
    learned = text.spans[:, 1] > len(item.prompt)
    begin, end = list(encoder.begin), [] if encoder.end is None else [encoder.end]
    return (
        Encoded(
            np.concatenate((np.array(begin, np.int32), text.ids, np.array(end, np.int32))),
            np.zeros((0, 2), np.int64),
            np.concatenate((np.zeros(len(begin), np.int32), text.bytes, np.zeros(len(end), np.int32))),
        ),
        np.concatenate((np.zeros(len(begin), np.bool_), learned, np.ones(len(end), np.bool_))),
    )


def of_chat(encoder: Encoder, item: Chat) -> Tokens:
    template = _template(encoder, item.where)
    text: str = _rendered(encoder, item, item.messages)
    found = encoder.encode(text)
    if _MARKED.search(template):
        return found, _as_marked(encoder, item, found)
    learned = np.zeros(len(found.ids), np.bool_)
    for place, message in enumerate(item.messages):
        if message["role"] == ASSISTANT:
            start, stop = _span(encoder, item, text, place)
            learned |= (found.spans[:, 1] > start) & (found.spans[:, 0] < stop)
    return found, learned


def _template(encoder: Encoder, where: str) -> str:
    found = chat_template(encoder.tokenizer)
    if found is None:
        raise UsageError(
            f"{where} has messages, and the tokeniser {encoder.name} has no chat template to write them with: give prompt and "
            "completion instead, or a tokeniser with one (--tokenizer)"
        )
    return found


def _rendered(encoder: Encoder, item: Chat, messages: Sequence[dict[str, Any]], **more: Any) -> Any:
    return rendered(encoder.tokenizer, item.where, messages, **more)


def _span(encoder: Encoder, item: Chat, text: str, place: int) -> tuple[int, int]:
    """From the first character of an answer to the last of the mark that ends it."""
    plain = _rendered(encoder, item, item.messages[:place]) if place else ""
    before = _rendered(encoder, item, item.messages[:place], add_generation_prompt=True) if place else ""
    after = _rendered(encoder, item, item.messages[: place + 1])
    if before == plain or not after.startswith(before):
        # The template has no words that ask for an answer, or answers do not begin with them.
        before = _before(encoder, item, after, place)
    if not text.startswith(before) or not text.startswith(after) or not after.startswith(before):
        raise UsageError(
            f"{item.where}: the chat template writes the beginning of this conversation otherwise when more follows, so the "
            f"answer in message {place + 1} cannot be found: cut the conversation after it, or mark answers in the template "
            "with {% generation %}"
        )
    return len(before), max(len(before), len(after.rstrip()))


def _before(encoder: Encoder, item: Chat, after: str, place: int) -> str:
    """What a template writes before an answer, whatever it is: the text with another answer, as far as both are the same.
    The other one is a character that the text does not have, so that the first of the answer is where they part."""
    other = next(each for each in map(chr, range(ord("0"), sys.maxunicode)) if each not in after)
    instead = {**item.messages[place], "content": other}
    otherwise = _rendered(encoder, item, (*item.messages[:place], instead))
    if other not in otherwise:
        raise UsageError(f"{item.where}: the chat template does not write the answer in message {place + 1}")
    pairs = enumerate(zip(after, otherwise, strict=False))
    return after[: next((at for at, (one, another) in pairs if one != another), len(after))]


def _as_marked(encoder: Encoder, item: Chat, found: Encoded) -> NDArray[np.bool_]:
    """The template's own mark, and the token that ends a turn where it lies just behind."""
    marked = _rendered(
        encoder, item, item.messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )  # fmt: skip
    learned = np.asarray(marked["assistant_masks"], np.bool_).reshape(-1)
    if len(learned) != len(found.ids):
        raise UsageError(f"{item.where}: the tokeniser {encoder.name} gives other tokens when it marks the answers")
    special = np.isin(found.ids, list(encoder.special))
    ends = special[1:] & learned[:-1] & ~special[:-1]
    learned[1:] |= ends
    return learned
