"""What a master shows to whoever wants to join: the line to type, a code, and the line as a QR code for a camera."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from ringtmp.errors import UsageError
from ringtmp.launch.announce import can_announce
from ringtmp.launch.key_store import Rings
from ringtmp.launch.pairing_code import MasterSide, shown

#: Two modules of a QR code, one above the other, in one character; light ones are drawn, as terminals are mostly dark.
_HALVES = {(0, 0): "█", (0, 1): "▀", (1, 0): "▄", (1, 1): " "}


def pairing_for(rings: Rings, ring: str, host: str, say: Callable[[str], None]) -> MasterSide | None:
    """None where the ring cannot be announced: devices then need a token. The lab knows its devices, and lends them no time to
    look around."""
    if os.environ.get("RINGTMP_EMULATED") == "1" or not can_announce(host):
        return None
    return MasterSide(ring, rings.open(ring).public, lambda: rings.new_secret(ring, 1), say, clock=time.monotonic)


def ways_to_join(line: str, ring: str, pairing: MasterSide | None, qr: bool) -> str:
    parts = [f"on each device, run:\n\n    {line}\n"]
    if pairing is not None:
        parts.append(f"or run only: ringtmp node, and type the code {shown(pairing.code)} of ring {ring}\n")
    if qr:
        parts.append(qr_code(line))
    return "\n".join(parts)


def qr_code(text: str) -> str:
    try:
        import segno
    except ImportError:
        raise UsageError("a QR code needs segno: pip install 'ringtmp[discovery]'") from None
    rows = [list(row) for row in segno.make(text, error="l", micro=False).matrix_iter(border=2)]
    if len(rows) % 2:
        rows.append([0] * len(rows[0]))
    pairs = zip(rows[::2], rows[1::2], strict=True)
    return "\n".join("".join(_HALVES[bool(a), bool(b)] for a, b in zip(*pair, strict=True)) for pair in pairs) + "\n"
