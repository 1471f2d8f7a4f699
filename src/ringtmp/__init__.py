"""Train one neural network on a ring of small computers, with the bits of a single process.

from ringtmp import Ring
result = Ring(nodes=4).fit(model, train_data, loss="cross_entropy", optimizer=("adam", {"lr": 1e-3}), epochs=3)
model = result.model
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Result", "Ring", "RingError", "Watcher", "__version__"]

if TYPE_CHECKING:
    from ringtmp.api import Ring
    from ringtmp.errors import RingError
    from ringtmp.run.job import Watcher
    from ringtmp.run.result import Result


def __getattr__(name: str) -> Any:
    # torch takes a second to import; `ringtmp --help` must not.
    if name in ("Ring", "Result", "Watcher"):
        from ringtmp.system.platforms import require_supported

        require_supported()
        from ringtmp import api

        return getattr(api, name)
    if name == "RingError":
        from ringtmp.errors import RingError

        return RingError
    raise AttributeError(f"module 'ringtmp' has no attribute {name!r}")
