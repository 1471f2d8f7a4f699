"""Train one neural network on a ring of small computers, with the bits of a single process.

from ringtmp import Ring
result = Ring(nodes=4).fit(model, train_data, loss="cross_entropy", optimizer=("adam", {"lr": 1e-3}), epochs=3)
model = result.model
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

# isort: off
from ringtmp.errors import CheckpointError, DoesNotFit, Interrupted, LinkLost, LossNotFinite, NodeFailed, NodeLost
from ringtmp.errors import ProtocolError, RingError, UsageError, WaitTimeout
# isort: on

if TYPE_CHECKING:
    from ringtmp.api import Ring, text_data
    from ringtmp.metrics.events import Evaluated, StepDone
    from ringtmp.run.generate import Generated
    from ringtmp.run.result import Result
    from ringtmp.run.what_to_train import Watcher

__version__ = "0.1.0"
#: What is public, each described in docs/api.md. Everything else may change without notice.
__all__ = [
    "CheckpointError", "DoesNotFit", "Evaluated", "Generated", "Interrupted", "LinkLost", "LossNotFinite", "NodeFailed",
    "NodeLost", "ProtocolError", "Result", "Ring", "RingError", "StepDone", "UsageError", "WaitTimeout", "Watcher",
    "__version__", "text_data",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    # torch takes a second to import; `ringtmp --help` must not.
    if name not in __all__:
        raise AttributeError(f"module 'ringtmp' has no attribute {name!r}")
    from ringtmp.system.platforms import require_supported

    require_supported()
    from ringtmp import api
    from ringtmp.metrics import events

    return getattr(api if hasattr(api, name) else events, name)
