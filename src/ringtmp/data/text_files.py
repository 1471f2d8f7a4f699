"""What lies in files of text: documents, questions with answers, conversations, each with the place it comes from.

Of `text:PATH` a file is a document, or every file of a folder. Of `jsonl:PATH` every line is {"text": …}, or
{"prompt": …, "completion": …}, or {"messages": [{"role": …, "content": …}, …]}.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringtmp.errors import UsageError

ASSISTANT = "assistant"
#: What a line of a jsonl file may be, by the names it has; the first that fits counts, and other names are passed over.
KINDS = {"messages": ("messages",), "prompt and completion": ("prompt", "completion"), "text": ("text",)}


@dataclass(frozen=True)
class Document:
    """Or a piece of a long one."""

    where: str
    text: str
    begins: bool = True
    ends: bool = True


@dataclass(frozen=True)
class Answered:
    """A prompt, and the completion that is learned."""

    where: str
    prompt: str
    completion: str


@dataclass(frozen=True)
class Chat:
    where: str
    messages: tuple[dict[str, Any], ...]


Item = Document | Answered | Chat


@dataclass(frozen=True)
class TextFiles:
    """Files that were found; `items` reads them in the order of their names, with the bytes read so far."""

    name: str
    paths: tuple[Path, ...]
    lines: bool  # one item per line

    @staticmethod
    def at(name: str, path: Path, lines: bool) -> TextFiles:
        path = path.expanduser()
        if path.is_dir():
            found = [each for each in sorted(path.rglob("*.jsonl" if lines else "*")) if each.is_file()]
        elif path.exists():
            found = [path]
        else:
            raise UsageError(f"data {name}: {path} cannot be read: no such file or folder")
        if not found:
            raise UsageError(f"data {name}: the folder {path} has no {'*.jsonl ' if lines else ''}file")
        return TextFiles(name, tuple(found), lines)

    @property
    def size_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.paths)

    def items(self) -> Iterator[tuple[Item, int]]:
        done = 0
        first: tuple[str, str] | None = None  # the kind of the first line, and where it is
        for path in self.paths:
            try:
                if not self.lines:
                    raw = path.read_bytes()
                    done += len(raw)
                    yield Document(str(path), _decoded(f"{self.name}: {path}", raw)), done
                    continue
                with path.open("rb") as file:
                    for number, line in enumerate(file, start=1):
                        done += len(line)
                        if not line.strip():
                            continue
                        where = f"{path} line {number}"
                        kind, item = _item(f"data {self.name}: {where}", _decoded(f"{self.name}: {where}", line))
                        first = first or (kind, where)
                        if kind != first[0]:
                            raise UsageError(
                                f"data {self.name}: {where} has {kind}, but {first[1]} has {first[0]}: all files of a source "
                                "have one kind of line"
                            )
                        yield item, done
            except OSError as error:
                raise UsageError(f"data {self.name}: {path} cannot be read: {error.strerror}") from error


def _decoded(where: str, raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"data {where} is not UTF-8 text (byte {error.start}): convert it, or leave the file out"
        ) from error


def _item(where: str, line: str) -> tuple[str, Item]:
    try:
        read = json.loads(line)
        json.dumps(read, ensure_ascii=False).encode()  # refuses half of a surrogate pair, which is no character
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not JSON: {error}") from error
    if not isinstance(read, dict):
        raise UsageError(f"{where} is not a JSON object but a {type(read).__name__}")
    kind = next((kind for kind, keys in KINDS.items() if all(key in read for key in keys)), None)
    if kind is None:
        has = ", ".join(map(repr, read)) or "nothing"
        raise UsageError(f"{where} has {has}: it needs {', or '.join(KINDS)}")
    if kind == "messages":
        return kind, Chat(where, _messages(where, read["messages"]))
    for key in KINDS[kind]:
        if not isinstance(read[key], str):
            raise UsageError(f"{where}: {key!r} is a {type(read[key]).__name__}, not text")
    if kind == "text":
        return kind, Document(where, read["text"])
    if not read["completion"]:
        raise UsageError(f"{where}: 'completion' is empty, so there is nothing to learn")
    return kind, Answered(where, read["prompt"], read["completion"])


def _messages(where: str, given: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise UsageError(f"{where}: 'messages' must be a list of at least one message")
    for number, each in enumerate(given, start=1):
        if not isinstance(each, dict) or not all(isinstance(each.get(key), str) for key in ("role", "content")):
            raise UsageError(f"{where}: message {number} needs a 'role' and a 'content', both text")
    if not any(each["role"] == ASSISTANT for each in given):
        raise UsageError(f"{where}: no message has the role {ASSISTANT!r}, so there is nothing to learn")
    return tuple(given)
