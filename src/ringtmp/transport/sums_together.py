"""Vectors summed over all ranks by the library itself: the all-reduce of torch.distributed, on the connections of a transport.

Every rank must start the same sums in the same order. They are under way while the rank computes; a thread waits for them,
outside the interpreter lock. A sum of which another rank died never ends: the transport says who is gone.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

#: What a sum is for: a round and a bucket.
Name = tuple[int, int]


class SumsTogether:
    def __init__(self, group: Any, news: Callable[[], None]) -> None:
        """`group`: a process group of all nodes. `news` is called, from another thread, when a sum is there."""
        self.ranks = int(group.size())
        self._group: Any = group
        self._news = news
        self._under_way: queue.SimpleQueue[tuple[Name, torch.Tensor, Any] | None] = queue.SimpleQueue()
        self._there: deque[tuple[Name, torch.Tensor]] = deque()
        self._thread: threading.Thread | None = None

    def start(self, name: Name, vector: torch.Tensor) -> None:
        """The vector becomes the sum, and must not be touched before it is `there`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._wait_for_all, daemon=True)
            self._thread.start()
        self._under_way.put((name, vector, self._group.allreduce([vector])))

    def there(self) -> list[tuple[Name, torch.Tensor]]:
        """Sums that have come since this was asked last, in the order of their starts."""
        found = []
        while self._there:
            found.append(self._there.popleft())
        return found

    @property
    def any_there(self) -> bool:
        return bool(self._there)

    def close(self) -> None:
        """Nobody waits for a sum any more. The thread ends when those under way have; `ended` waits for that."""
        self._under_way.put(None)

    def ended(self, limit_s: float) -> bool:
        """Whether the thread has."""
        if self._thread is not None:
            self._thread.join(limit_s)
        return self._thread is None or not self._thread.is_alive()

    def forget_group(self) -> None:
        """Nothing is under way, and nothing will be."""
        self._group = None

    def _wait_for_all(self) -> None:
        while (sum_ := self._under_way.get()) is not None:
            name, vector, work = sum_
            try:
                work.wait()
            except RuntimeError:  # another rank has died, and Gloo gives up
                return
            self._there.append((name, vector))
            self._news()
