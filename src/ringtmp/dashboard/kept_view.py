"""What a page knows of a run, kept beside a long log, so that the next page need not read all of it again.

It is believed only if it is whole (its own SHA-256), if this version wrote it, and if the log still begins with the very
bytes that it was made from (how many they are, and their CRC-32). Otherwise, and where there is none, the log is read: that
costs time and nothing else. It is written where there is room, never where the run itself might soon need it.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import zlib
from pathlib import Path

import msgspec

from ringtmp import __version__
from ringtmp.dashboard.follow_file import Mark
from ringtmp.dashboard.seen_so_far import Seen
from ringtmp.system.files import write_atomic

NAME = "page.index"
#: So much of the log is read again in a tenth of a second: not worth a file.
KEEP_EVERY_BYTES = 16 * 2**20
#: Left on the disk.
ROOM_BYTES = 256 * 2**20
#: Changes when what is kept means something else.
FORMAT = 1
READ_BYTES = 2**17


class Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    version: str
    mark: Mark
    seen: Seen


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Kept)


def keep(run: Path, mark: Mark, seen: Seen) -> bool:
    """Whether it was written; a folder that takes nothing is no matter."""
    content = _encoder.encode(Kept(FORMAT, __version__, mark, seen))
    with contextlib.suppress(OSError):
        if shutil.disk_usage(run).free > ROOM_BYTES + len(content):
            write_atomic(run / NAME, hashlib.sha256(content).digest() + content, 0o600, durable=False)
            return True
    return False


def kept(run: Path) -> tuple[Mark, Seen] | None:
    """None: there is none that can be believed."""
    log, index = run / "events.jsonl", run / NAME
    try:
        if index.stat().st_size > log.stat().st_size:
            return None
        read = index.read_bytes()
        digest, content = read[:32], read[32:]
        if hashlib.sha256(content).digest() != digest:
            return None
        found = _decoder.decode(content)
        if (found.format, found.version) != (FORMAT, __version__) or not _begins_with(log, found.mark):
            return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    return found.mark, found.seen


def _begins_with(log: Path, mark: Mark) -> bool:
    crc, left = 0, mark.read
    with log.open("rb") as file:
        while left > 0 and (some := file.read(min(left, READ_BYTES))):
            crc = zlib.crc32(some, crc)
            left -= len(some)
    return left == 0 and crc == mark.crc
