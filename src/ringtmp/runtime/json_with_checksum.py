"""JSON files that know whether they are still what was written: each holds a SHA-256 over the rest of itself.

A seal inside the file is replaced with it in one rename, so no crash can part the two. Files of versions before seals have
none and are read as they are; `sealed` says that there must be one, so that damage to its name does not pass for age.
"""

from __future__ import annotations

import hashlib
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


class Broken(ValueError):  # noqa: N818
    """Not what was written; the text goes on after the file's name."""


def encode(document: msgspec.Struct) -> bytes:
    held = {"sealed": 1, **msgspec.json.decode(msgspec.json.encode(document))}
    return msgspec.json.format(msgspec.json.encode({**held, "seal": _digest(held)}))


def decode(raw: bytes, kind: type[T]) -> T:
    try:
        held: Any = msgspec.json.decode(raw)
        document = msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Broken(f"is damaged or from another version: {error}") from error
    seal = held.pop("seal", None)
    if (seal is not None or "sealed" in held) and seal != _digest(held):
        raise Broken("has changed since it was written (its SHA-256 does not match)")
    return document


def _digest(held: dict[str, Any]) -> str:
    """Over names and values, whatever the order and the spaces between them."""
    return hashlib.sha256(msgspec.json.encode(held, order="sorted")).hexdigest()
