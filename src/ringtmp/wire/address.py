"""Where a node listens, and by which key it is known."""

from __future__ import annotations

import msgspec


class Address(msgspec.Struct, frozen=True):
    """Endpoints of the three channels in order (control, tensor, bulk); `key` is empty for Unix sockets."""

    endpoints: tuple[str, str, str]
    key: str = ""


NOWHERE = Address(("", "", ""))
