"""One run at a time in a process, because torch has one of many things in a process, and a run needs them for itself.

The random generator, which is seeded anew before every random operator: a second run in another thread would change the
bits of the first without a word. The number of threads and the deterministic kernels. And what is put in the place of
torch's own functions while a model is exported.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ringtmp.errors import UsageError

_under_way = threading.RLock()


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """UsageError while another thread of this process is inside. The same thread may come again: a watcher that looks at
    a run between two of its steps."""
    if not _under_way.acquire(blocking=False):
        raise UsageError(
            "another run is under way in this process, in another thread, and torch has one random generator for both: wait "
            "until it has ended, or start this one in a process of its own"
        )
    try:
        yield
    finally:
        _under_way.release()
