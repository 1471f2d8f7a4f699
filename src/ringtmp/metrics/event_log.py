"""The file that events are written to, a line each: it outlives a full disk and its own removal."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import msgspec

from ringtmp.metrics.events import Event, NodeStep, NodeTimes, Warned, decode, decoded, encode

#: Written at once when it is more than this, else at the end of a step.
BUFFER_BYTES = 64 * 2**10
LINES_AT_ONCE = 1000
#: At most so much is kept in memory while the disk takes nothing.
KEPT_BYTES = 32 * 2**20
_NODE_STEP = b'{"type":"node_step"'
_BEGINNINGS = (b'{"type":"run"', b'{"type":"node"')
_times = msgspec.json.Decoder(NodeTimes)


class EventLog:
    """Appends events to a file, a line each, flushed at every step so that a reader can follow.

    A full disk must not end the training. What it does not take stays here, in order, and goes out with the next flush that
    finds room: the file is always the beginning of the whole, `unwritten` the rest. Nor must a file that somebody removed:
    as long as it is open all of it can be read, and is written again under its name. Where that cannot be, `unwritten` is the
    whole, and `gone` says so at the end.
    """

    def __init__(self, path: Path, kept_bytes: int = KEPT_BYTES) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        self._lines: deque[bytes] = deque()  # not yet on the disk
        self._begun = 0  # bytes of the first of them that are
        self._kept_bytes = kept_bytes
        self.waiting_bytes = 0
        self.gone = False
        self._began: list[bytes] = []  # the lines without which those after them mean nothing
        self._dropped = 0
        self._trouble: str | None = None
        self._news: str | None = None
        self._busy_s = 0.0
        self._idle_s = 0.0
        #: Nodes that only serve: their idleness is told apart.
        self.servers: frozenset[int] = frozenset()
        #: Told of every node's share of every step.
        self.listener: Callable[[NodeTimes], None] | None = None
        status = os.fstat(self._file)
        size = status.st_size
        self._keeps = stat.S_ISREG(status.st_mode)  # no device
        self._wrote_some = False
        if size and os.pread(self._file, 1, size - 1) != b"\n":  # of a master that was killed while it wrote
            self._append(b"")

    def touch(self) -> None:
        """For who looks at the time of the last event: there will be others."""
        with contextlib.suppress(OSError):
            os.utime(self._file)

    def write(self, event: Event) -> None:
        self.write_encoded(encode(event))

    def write_encoded(self, line: bytes) -> None:
        if line.startswith(_BEGINNINGS):
            self._began.append(line + b"\n")
        self._append(line)
        if line.startswith(_NODE_STEP):
            times = _times.decode(line)
            if self.listener is not None:
                self.listener(times)
            if times.node not in self.servers:
                self._busy_s += times.busy_s
                self._idle_s += times.idle_s

    @property
    def idle_share(self) -> float:
        """Of all nodes' time in training steps so far."""
        return self._idle_s / max(1e-9, self._busy_s + self._idle_s)

    @property
    def unwritten(self) -> list[Event]:
        """What the file lacks of the whole."""
        return list(decoded(self._lines))

    def news(self) -> str | None:
        """What there is to say of the disk, once."""
        news, self._news = self._news, None
        return news

    def flush(self) -> None:
        try:
            if not self._is_there():
                self._write_again()
            elif self._wrote_some and os.fstat(self._file).st_size == 0:
                self._begin_again()
            while self._lines:
                some = b"".join(islice(self._lines, LINES_AT_ONCE))
                self._wrote(os.write(self._file, some[self._begun :]))
        except OSError as error:
            if self._trouble is None:
                self._trouble = os.strerror(error.errno or 0)
                self._news = f"events cannot be written: {self._trouble}; they are kept in memory until there is room"
            return
        if self._trouble is not None:
            self._trouble = None
            missing = f"{self._dropped} are missing" if self._dropped else "none is missing"
            self._news = f"events are written again, {missing}"
            self._say_what_was_dropped()

    def close(self) -> None:
        self._say_what_was_dropped()
        self.flush()
        if not self._is_there():
            self.gone = True
            written = b"".join(self._written())[: -self._begun or None]
            self._lines.extendleft(reversed(written.splitlines(keepends=True)))
        with contextlib.suppress(OSError):
            os.close(self._file)
        self._file = -1

    def _is_there(self) -> bool:
        """Whether the open file is the one under its name."""
        try:
            named, ours = os.stat(self._path), os.fstat(self._file)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # not to be known: the open file takes events all the same
            return True
        return (named.st_dev, named.st_ino) == (ours.st_dev, ours.st_ino)

    def _written(self) -> Iterator[bytes]:
        place = 0
        while some := os.pread(self._file, 2**20, place):
            place += len(some)
            yield some

    def _write_again(self) -> None:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        aside = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        fresh = os.open(aside, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            for some in self._written():
                left = memoryview(some)
                while left:
                    left = left[os.write(fresh, left) :]
            aside.rename(self._path)
        except OSError:
            os.close(fresh)
            aside.unlink(missing_ok=True)
            raise
        os.close(self._file)
        self._file = fresh
        self._news = f"{self._path} was removed or replaced; it has been rewritten with every event"

    def _begin_again(self) -> None:
        self._begun = 0
        self._lines.extendleft([line for line in reversed(self._began) if line not in self._lines])
        self.waiting_bytes = sum(map(len, self._lines))
        self._wrote_some = False
        self._news = f"{self._path} was emptied: earlier events are missing from it"

    def _append(self, line: bytes) -> None:
        self._lines.append(line + b"\n")
        self.waiting_bytes += len(line) + 1
        if self.waiting_bytes > BUFFER_BYTES and self._trouble is None:
            self.flush()
        if self.waiting_bytes > self._kept_bytes:
            self._thin_out()

    def _wrote(self, count: int) -> None:
        self._begun += count
        self._wrote_some = self._keeps
        while self._lines and self._begun >= len(self._lines[0]):
            self._begun -= len(self._lines[0])
            self.waiting_bytes -= len(self._lines.popleft())

    def _thin_out(self) -> None:
        """What nodes did goes first: its spans, then all of it, the oldest first, until half of the room is free. A step's
        loss, a recovery, a warning is small, and stays."""
        first = [self._lines.popleft()] if self._begun else []  # begun on the disk: it must stay as it is
        lines = [_without_spans(line) for line in self._lines]
        size = sum(map(len, lines))
        self._lines = deque(first)
        for line in lines:
            if size > self._kept_bytes // 2 and line.startswith(_NODE_STEP):
                size -= len(line)
                self._dropped += 1
            else:
                self._lines.append(line)
        self.waiting_bytes = sum(map(len, self._lines))
        self._kept_bytes = max(self._kept_bytes, 2 * self.waiting_bytes)

    def _say_what_was_dropped(self) -> None:
        dropped, self._dropped = self._dropped, 0
        if dropped:
            text = (
                f"{dropped} records of what nodes did in a step were dropped while events could not be written: busy and "
                "idle time, bytes and energy are short of them"
            )
            self._append(encode(Warned(time.monotonic(), text)))


def _without_spans(line: bytes) -> bytes:
    if not line.startswith(_NODE_STEP):
        return line
    event = decode(line)
    assert isinstance(event, NodeStep)
    return encode(msgspec.structs.replace(event, spans=())) + b"\n"
