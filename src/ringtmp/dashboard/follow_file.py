"""Follows the events of a run while they are written. A file that was replaced or emptied is read again from its beginning.

What is damaged is passed over and counted: a line that is not an event at all, be it cut short by a crash or bent. Lines of
a kind that only a later version knows are passed over too, and counted apart.
"""

from __future__ import annotations

import os
import zlib
from itertools import accumulate
from pathlib import Path

import msgspec

from ringtmp.metrics import events

#: Taken from the file at once. Of larger pieces the allocator hands every one back, and processors' caches hold less.
CHUNK_BYTES = 120 * 2**10
#: A line longer than this is nobody's event.
MOST_LINE_BYTES = 16 * 2**20
#: Steps recorded in full whose places in the file are remembered.
MOST_DETAILED = 4096


class Kind(msgspec.Struct):
    """Of any event, its kind."""

    type: str


_kind = msgspec.json.Decoder(Kind)


class Mark(msgspec.Struct):
    """How far a file has been read. `rest`: of a line that was not whole yet; it begins at `at`."""

    read: int = 0
    crc: int = 0  # of all that was read
    at: int = 0
    rest: bytes = b""
    damaged: int = 0
    unknown: int = 0
    #: By step: where in the file are the lines that tell every span of it.
    detailed: dict[int, list[int]] = {}


class Follower:
    """`mark` is how much of the file has been taken, `size` how much there is."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begin()
        self._identity: tuple[int, int] | None = None

    def _begin(self) -> None:
        self.mark = Mark()
        self.size = 0

    @property
    def read(self) -> int:
        return self.mark.read

    def restart(self) -> None:
        """From the beginning again."""
        self._begin()

    def go_on_from(self, mark: Mark) -> None:
        """Of another follower of the same file."""
        self.mark = mark

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

    def more(self) -> list[events.Event]:
        """The next events, of at most a chunk; none while there is no file."""
        mark = self.mark
        try:
            with self._path.open("rb") as file:
                file.seek(mark.read)
                taken = file.read(CHUNK_BYTES)
        except OSError:
            return []
        mark.read += len(taken)
        mark.crc = zlib.crc32(taken, mark.crc)
        self.size = max(self.size, mark.read)
        lines = (mark.rest + taken).split(b"\n")
        mark.rest = lines.pop()
        if len(mark.rest) > MOST_LINE_BYTES:
            mark.at += len(mark.rest)
            mark.rest = b""
            mark.damaged += 1
        found = self._decoded(lines)
        mark.at += sum(map(len, lines)) + len(lines)
        return found

    def _decoded(self, lines: list[bytes]) -> list[events.Event]:
        """Without what is damaged. Remembers where steps are told in full."""
        try:
            found = list(map(events.decode, lines))
        except (msgspec.DecodeError, UnicodeDecodeError):
            return self._decoded_one_by_one(lines)
        in_full = [
            (line, each.step) for line, each in enumerate(found) if isinstance(each, events.NodeStep) and each.spans
        ]
        if in_full:
            begins = list(accumulate(map(len, lines), lambda at, length: at + length + 1, initial=self.mark.at))
            for line, step in in_full:
                self._remember(step, begins[line])
        return found

    def _decoded_one_by_one(self, lines: list[bytes]) -> list[events.Event]:
        found, at = [], self.mark.at
        for line in lines:
            place = at
            at += len(line) + 1
            try:
                event = events.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError):
                self._passed_over(line)
                continue
            if isinstance(event, events.NodeStep) and event.spans:
                self._remember(event.step, place)
            found.append(event)
        return found

    def _passed_over(self, line: bytes) -> None:
        if not line:
            return
        try:
            _kind.decode(line)
            self.mark.unknown += 1
        except (msgspec.DecodeError, UnicodeDecodeError):
            self.mark.damaged += 1

    def _remember(self, step: int, place: int) -> None:
        self.mark.detailed.setdefault(step, []).append(place)
        if len(self.mark.detailed) > MOST_DETAILED:
            del self.mark.detailed[next(iter(self.mark.detailed))]

    def spans_of(self, step: int) -> list[events.NodeStep]:
        """A step that was recorded in full, read again from the file; what was done last counts."""
        found: dict[int, events.NodeStep] = {}
        try:
            with self._path.open("rb") as file:
                for place in self.mark.detailed.get(step, ()):
                    file.seek(place)
                    event = events.decode(file.readline(MOST_LINE_BYTES).rstrip(b"\n"))
                    if isinstance(event, events.NodeStep) and event.step == step:
                        found[event.node] = event
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return []
        return [found[node] for node in sorted(found)]
