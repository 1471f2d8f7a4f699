"""Names of rings and devices: what they may look like."""

from __future__ import annotations

import re

from ringtmp.errors import UsageError

NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")


def checked_name(kind: str, name: str) -> str:
    if not NAME.fullmatch(name):
        raise UsageError(f"{kind} name {name!r}: use 1 to 32 of a-z, 0-9 and '-', not beginning with '-'")
    return name
