"""The number of the protocol, apart from the messages: an agent names it without loading torch."""

from __future__ import annotations

PROTOCOL = 2
