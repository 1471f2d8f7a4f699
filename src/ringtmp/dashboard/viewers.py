"""Those who look on: each has a short queue, and whoever does not read it is left behind and begins again with the whole.

News are made once, encoded once and put into every queue; nothing here waits for a viewer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

QUEUE = 8
MOST_VIEWERS = 256
#: A whole page goes out in pieces, so that a viewer that does not read it holds up no more than one of them in memory.
PIECE_BYTES = 64 * 2**10
#: A word now and then, so that both ends notice when the other is gone.
QUIET_S = 15.0


class Viewer:
    def __init__(self) -> None:
        self.queue: asyncio.Queue[bytes] = asyncio.Queue(QUEUE)
        self.behind = True  # gets everything first

    def put(self, message: bytes) -> None:
        if self.behind:
            return
        try:
            self.queue.put_nowait(message)
        except asyncio.QueueFull:
            self.behind = True
            while not self.queue.empty():
                self.queue.get_nowait()
            self.queue.put_nowait(b"")  # wakes it, if it ever reads again


class Viewers:
    """`everything` makes the messages that a new viewer gets."""

    def __init__(self, everything: Callable[[], list[bytes]]) -> None:
        self._everything = everything
        self._viewers: set[Viewer] = set()

    def __len__(self) -> int:
        return len(self._viewers)

    @property
    def full(self) -> bool:
        return len(self._viewers) >= MOST_VIEWERS

    def tell(self, message: bytes) -> None:
        for each in self._viewers:
            each.put(message)

    async def stream(self) -> AsyncIterator[bytes]:
        """What one viewer is sent, for as long as it stays."""
        viewer = Viewer()
        self._viewers.add(viewer)
        try:
            yield b"retry: 1000\n\n"
            while True:
                if viewer.behind:
                    viewer.behind = False
                    for message in await asyncio.to_thread(self._everything):
                        for start in range(0, len(message), PIECE_BYTES):
                            yield message[start : start + PIECE_BYTES]
                try:
                    message = await asyncio.wait_for(viewer.queue.get(), QUIET_S)
                except TimeoutError:
                    message = b": still here\n\n"
                if message:
                    yield message
        finally:
            self._viewers.discard(viewer)


def event(name: str, data: bytes) -> bytes:
    """As server-sent events are written. `data` is JSON, so it has no line breaks."""
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"
