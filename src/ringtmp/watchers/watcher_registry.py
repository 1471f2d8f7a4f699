"""Watchers by name, for a command line: `csv:FILE`, `jsonl:FILE`, `tensorboard:DIR`, `mlflow:EXPERIMENT`."""

from __future__ import annotations

from collections.abc import Callable

from ringtmp.errors import UsageError, unknown
from ringtmp.run.what_to_train import Watcher
from ringtmp.watchers.files import CSVWatcher, JSONLinesWatcher
from ringtmp.watchers.mlflow import MLflowWatcher
from ringtmp.watchers.tensorboard import TensorBoardWatcher

KINDS: dict[str, tuple[Callable[[str], Watcher], str]] = {
    "csv": (CSVWatcher, "FILE"),
    "jsonl": (JSONLinesWatcher, "FILE"),
    "tensorboard": (TensorBoardWatcher, "DIR"),
    "mlflow": (MLflowWatcher, "EXPERIMENT"),
}


def watcher_named(text: str) -> Watcher:
    kind, colon, where = text.partition(":")
    if kind not in KINDS:
        raise unknown("log", kind, KINDS)
    make, what = KINDS[kind]
    if not colon or not where:
        raise UsageError(f"--log {kind} needs to know where: --log {kind}:{what}")
    return make(where)
