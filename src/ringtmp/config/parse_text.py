"""Settings as text on a command line: key=value pairs and learning-rate schedules."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ringtmp.errors import UsageError


def parse_pairs(flag: str, items: Iterable[str]) -> dict[str, Any]:
    """('width=256', 'dropout=0.1') -> {'width': 256, 'dropout': 0.1}"""
    pairs: dict[str, Any] = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise UsageError(f"{flag} {item!r}: write it as key=value")
        pairs[key.strip()] = _number(value.strip())
    return pairs


def parse_schedule(text: str) -> dict[str, Any]:
    """'cosine:warmup=10,floor=0.1' -> {'kind': 'cosine', 'warmup': 10, 'floor': 0.1}"""
    kind, _, rest = text.partition(":")
    return {"kind": kind, **parse_pairs("--lr-schedule", rest.split(",") if rest else ())}


def _number(text: str) -> Any:
    if text.lower() in ("true", "yes"):
        return True
    if text.lower() in ("false", "no"):
        return False
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
