"""What a master that is killed leaves behind for the next: which snapshot its nodes hold, and under which name they know it.

    RUN/left-with-nodes.json      written whenever a snapshot is whole, before older ones may go; removed when the run has ended

The layers themselves are with the nodes. The file is not synced: a master that lost its power finds its checkpoint.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import msgspec

from ringtmp.runtime import json_with_checksum
from ringtmp.runtime.checkpoint import Progress
from ringtmp.system.files import write_atomic

_NAME = "left-with-nodes.json"


class Left(msgspec.Struct, frozen=True):
    run: str  # as in its index of layers
    ring: str  # the name of the ring on its links, by which agents know whose snapshots they keep
    progress: Progress


def read(run: Path) -> Left | None:
    """None: there is nothing, or nothing that can be used."""
    try:
        return json_with_checksum.decode((run / _NAME).read_bytes(), Left)
    except (OSError, json_with_checksum.Broken):
        return None


def write(run: Path, left: Left) -> None:
    """OSError where it cannot be."""
    write_atomic(run / _NAME, json_with_checksum.encode(left), 0o600, durable=False)


def forget(run: Path) -> None:
    """As far as the disk allows: one that stays is older than the run's checkpoint and is not used."""
    with suppress(OSError):
        (run / _NAME).unlink()
