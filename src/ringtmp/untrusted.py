"""What a peer sends becomes typed values within their ranges, and text that is only text; or a ProtocolError, and nothing else.

Bytes go through `decode`, numbers through `number` and `whole`, text through `line` (or `lines`, where a traceback needs
several). Every message, event, label and fact of another node comes this way before anything is done with it.
"""

from __future__ import annotations

import math
from typing import Protocol, TypeVar

import msgspec

from ringtmp.errors import ProtocolError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
#: Text of another node is cut after so many characters, and lines of a traceback after so many.
MOST_CHARACTERS = 200
MOST_LINES = 60
#: Counts and sizes beyond this are no honest node's.
MOST = 2**53


class Decoder(Protocol[T_co]):
    def decode(self, data: bytes | memoryview, /) -> T_co: ...


def decode(decoder: Decoder[T], data: bytes | memoryview, what: str, limit_bytes: int) -> T:
    if len(data) > limit_bytes:
        raise ProtocolError(f"not {what}: {len(data)} bytes are over the limit of {limit_bytes}")
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError, ValueError) as error:
        raise ProtocolError(f"not {what}: {line(str(error))}") from None


def number(value: float, what: str, least: float = 0.0, most: float = float(MOST)) -> None:
    """A finite number in this range."""
    if not (math.isfinite(value) and least <= value <= most):
        raise ProtocolError(f"{what} is {value:.6g}, which is not from {least:.6g} to {most:.6g}")


def whole(value: int, what: str, least: int = 0, most: int = MOST) -> None:
    """A whole number in this range."""
    if not least <= value <= most:
        raise ProtocolError(f"{what} is {value}, which is not from {least} to {most}")


def line(text: str, limit: int = MOST_CHARACTERS) -> str:
    """Printable, one line, not too long. What is not printable (an escape sequence, a line break, a character that turns the
    direction of text) is shown as a code, so that it moves no cursor and makes no line of its own."""
    text = text[: limit + 1]
    shown = text if text.isprintable() else "".join(map(_shown, text))
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def lines(text: str, limit: int = MOST_LINES) -> str:
    """Several lines, each as `line` would have it and set in, so that none looks like one of ours."""
    rows = text[-limit * MOST_CHARACTERS :].splitlines()
    if len(rows) > limit:
        rows = ["...", *rows[-limit:]]
    return "\n".join(f"    {line(row)}" for row in rows)


def printable(text: str) -> str:
    """Our own text, in which something from outside may have been quoted, for a terminal: line breaks stay."""
    return text if text.isprintable() else "".join(each if each in "\n\t" else _shown(each) for each in text)


def _shown(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape", "replace").decode()
