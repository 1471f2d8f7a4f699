"""Bytes from a peer become typed values, or a ProtocolError: no other exception escapes a decoder."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from ringtmp.errors import ProtocolError

T = TypeVar("T")


def decode(decoder: msgspec.msgpack.Decoder[T], data: bytes | memoryview, what: str, limit_bytes: int) -> T:
    if len(data) > limit_bytes:
        raise ProtocolError(f"not {what}: {len(data)} bytes are over the limit of {limit_bytes}")
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise ProtocolError(f"not {what}: {error}") from None
