"""Follows the events of a run while they are written. A file that was replaced or emptied is read again from its beginning.

What is damaged is passed over and counted: a line that is not an event at all, be it cut short by a crash or bent. Lines of
a kind that only a later version knows are passed over too, and counted apart.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ringtmp.metrics import events

#: Taken from the file at once, so that a large one does not keep others waiting.
CHUNK_BYTES = 512 * 2**10
#: A line longer than this is nobody's event.
MOST_LINE_BYTES = 16 * 2**20
#: Steps recorded in full whose places in the file are remembered.
MOST_DETAILED = 4096


class Kind(msgspec.Struct):
    """Of any event, its kind."""

    type: str


_kind = msgspec.json.Decoder(Kind)


class Follower:
    """`read` is how much of the file has been taken, `size` how much there is."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begin()
        self._identity: tuple[int, int] | None = None

    def _begin(self) -> None:
        self.read = 0
        self.size = 0
        self.damaged = 0
        self.unknown = 0
        self._rest = b""
        self._at = 0  # where the rest begins in the file
        #: By step: where in the file are the lines that tell every span of it.
        self.detailed: dict[int, list[int]] = {}

    def restart(self) -> None:
        """From the beginning again."""
        self._begin()

    def replaced(self) -> bool:
        """Whether the file is another than the one read so far; then it is read from its beginning."""
        try:
            found = os.stat(self._path)
        except OSError:
            return False
        identity = (found.st_dev, found.st_ino)
        other = self._identity is not None and (identity != self._identity or found.st_size < self.read)
        self._identity, self.size = identity, found.st_size
        if other:
            self._begin()
            self.size = found.st_size
        return other

    def more(self) -> Iterator[events.Event]:
        """The next events, of at most a chunk; none while there is no file."""
        try:
            with self._path.open("rb") as file:
                file.seek(self.read)
                taken = file.read(CHUNK_BYTES)
        except OSError:
            return
        self.read += len(taken)
        self.size = max(self.size, self.read)
        lines = (self._rest + taken).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > MOST_LINE_BYTES:
            self._at += len(self._rest)
            self._rest = b""
            self.damaged += 1
        decode, at = events.decode, self._at
        for line in lines:
            place = at
            at += len(line) + 1
            try:
                event = decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError):
                self._passed_over(line)
                continue
            if isinstance(event, events.NodeStep) and event.spans:
                self._remember(event.step, place)
            yield event
        self._at = at

    def _passed_over(self, line: bytes) -> None:
        if not line:
            return
        try:
            _kind.decode(line)
            self.unknown += 1
        except (msgspec.DecodeError, UnicodeDecodeError):
            self.damaged += 1

    def _remember(self, step: int, place: int) -> None:
        self.detailed.setdefault(step, []).append(place)
        if len(self.detailed) > MOST_DETAILED:
            del self.detailed[next(iter(self.detailed))]

    def spans_of(self, step: int) -> list[events.NodeStep]:
        """A step that was recorded in full, read again from the file; what was done last counts."""
        found: dict[int, events.NodeStep] = {}
        try:
            with self._path.open("rb") as file:
                for place in self.detailed.get(step, ()):
                    file.seek(place)
                    event = events.decode(file.readline(MOST_LINE_BYTES).rstrip(b"\n"))
                    if isinstance(event, events.NodeStep) and event.step == step:
                        found[event.node] = event
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return []
        return [found[node] for node in sorted(found)]
