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
    from ringtmp.kv import KeyValueStore
    from ringtmp.metrics.events import Evaluated, Regrouped, RunEnded, RunStarted, StepDone
    from ringtmp.run.generate import Generated
    from ringtmp.run.result import Result
    from ringtmp.run.what_to_train import Watcher
    from ringtmp.sklearn_estimators import RingClassifier, RingRegressor
    from ringtmp.watchers.files import CSVWatcher, JSONLinesWatcher
    from ringtmp.watchers.mlflow import MLflowWatcher
    from ringtmp.watchers.tensorboard import TensorBoardWatcher

__version__ = "0.1.0"
#: What is public, each described in docs/api.md. Everything else may change without notice.
__all__ = [
    "CSVWatcher", "CheckpointError", "DoesNotFit", "Evaluated", "Generated", "Interrupted", "JSONLinesWatcher",
    "KeyValueStore", "LinkLost", "LossNotFinite", "MLflowWatcher", "NodeFailed", "NodeLost", "ProtocolError", "Regrouped",
    "Result", "Ring", "RingClassifier", "RingError", "RingRegressor", "RunEnded", "RunStarted", "StepDone",
    "TensorBoardWatcher", "UsageError", "WaitTimeout", "Watcher", "__version__", "text_data",
]  # fmt: skip
#: Where a name lives that is loaded when it is asked for.
_AT = {
    "api": ("Generated", "Result", "Ring", "Watcher", "text_data"),
    "kv": ("KeyValueStore",),
    "sklearn_estimators": ("RingClassifier", "RingRegressor"),
    "metrics.events": ("Evaluated", "Regrouped", "RunEnded", "RunStarted", "StepDone"),
    "watchers.files": ("CSVWatcher", "JSONLinesWatcher"),
    "watchers.mlflow": ("MLflowWatcher",),
    "watchers.tensorboard": ("TensorBoardWatcher",),
}


def __getattr__(name: str) -> Any:
    # torch takes a second to import; `ringtmp --help` must not.
    place = next((place for place, names in _AT.items() if name in names), None)
    if place is None:
        raise AttributeError(f"module 'ringtmp' has no attribute {name!r}")
    from importlib import import_module

    from ringtmp.system.platforms import require_supported

    require_supported()
    return getattr(import_module(f"ringtmp.{place}"), name)
