"""Two homes in one process: a line through memory that can break, and a thread for each home."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ringtmp.wire.home_messages import HomeMessage, Piece, decode


class MemoryLine:
    """One end. `other` is None while nobody is there. `drops` takes a message that is lost on its way."""

    def __init__(self, home: int, drops: Callable[[HomeMessage], bool] = lambda message: False) -> None:
        self.home = home
        self.other: MemoryLine | None = None
        self.open = True
        self.pieces = 0
        self._drops = drops
        self._held: deque[tuple[HomeMessage, memoryview]] = deque()
        self._news = threading.Condition()
        self._spoke = threading.Event()  # the first word was said

    @property
    def connected(self) -> bool:
        return self.other is not None and self.other.open and self.open

    def send(self, message: bytes, payload: bytes | memoryview = b"") -> bool:
        if not self.connected:
            return False
        assert self.other is not None
        said = decode(message)
        self._spoke.set()
        self.pieces += isinstance(said, Piece)
        if not self._drops(said):
            with self.other._news:
                self.other._held.append((said, memoryview(bytes(payload))))
                self.other._news.notify()
        return True

    def receive(self, timeout_s: float) -> list[tuple[HomeMessage, memoryview]]:
        until = time.monotonic() + timeout_s
        with the_others_turn(), self._news:
            if not self._held:
                self._news.wait(max(0.0, until - time.monotonic()))
        found, self._held = list(self._held), deque()
        return found

    def spoken(self, limit_s: float) -> bool:
        """Whether its owner has said a word within this."""
        with the_others_turn():
            return self._spoke.wait(limit_s)

    def close(self) -> None:
        self.open = False


def joined(first: MemoryLine, second: MemoryLine) -> None:
    first.other, second.other = second, first


def pair(**more: Any) -> tuple[MemoryLine, MemoryLine]:
    ends = MemoryLine(0, **more), MemoryLine(1, **more)
    joined(*ends)
    return ends


#: One home works at a time: neither torch's exporter nor msgspec's first look at a type is for several threads.
_TURN = threading.Lock()


@contextmanager
def the_others_turn() -> Iterator[None]:
    _TURN.release()
    try:
        yield
    finally:
        _TURN.acquire()


def together(*homes: Callable[[], Any], limit_s: float = 90) -> list[Any]:
    """What each returned, or raised."""
    found: list[Any] = [None] * len(homes)

    def lead(at: int) -> None:
        with _TURN:
            try:
                found[at] = homes[at]()
            except BaseException as error:
                found[at] = error

    threads = [threading.Thread(target=lead, args=(at,), daemon=True) for at in range(len(homes))]
    for each in threads:
        each.start()
    until = time.monotonic() + limit_s
    for each in threads:
        each.join(max(0.0, until - time.monotonic()))
    assert not any(each.is_alive() for each in threads), f"not done within {limit_s} s: {found}"
    return found
