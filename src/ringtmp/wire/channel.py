"""Three classes of traffic on separate connections, so that none waits behind another."""

from __future__ import annotations

from enum import IntEnum


class Channel(IntEnum):
    CONTROL = 0
    TENSOR = 1
    BULK = 2
