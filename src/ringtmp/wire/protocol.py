"""The number of the protocol, apart from the rest: it is named without loading torch."""

from __future__ import annotations

PROTOCOL = 19
