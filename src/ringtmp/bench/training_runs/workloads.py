"""The work that every case of `speed` does: model, data, batch. Plain SGD on float32."""

from __future__ import annotations

import msgspec


class Workload(msgspec.Struct, frozen=True):
    """Also what a peer is told, as JSON, so that it builds the same model and takes the same batches."""

    name: str
    model: str
    settings: dict[str, int]
    data: str
    batch_size: int
    pipeline_microbatches: int  # what suits a pipeline: more fill it better, but small products are inefficient
    lr: float = 0.01
    optimizer: str = "sgd"  # peers have plain SGD alone
    seed: int = 0
    steps: int = 0


#: 8 blocks, width 256, sequence 128 on bytes; 784-1024x9-10; and 16 blocks, for 8 devices.
WORKLOADS = {
    "gpt": Workload("gpt", "gpt", {"depth": 8, "width": 256, "heads": 4, "context": 128}, "pysource", 32, 8),
    "mlp": Workload("mlp", "mlp", {"depth": 9, "width": 1024}, "random:784x10", 512, 4),
    "gpt16": Workload("gpt16", "gpt", {"depth": 16, "width": 256, "heads": 4, "context": 128}, "pysource", 32, 16),
}

#: The same shapes in small: whether every case works, not how fast.
QUICK = {
    "gpt": Workload("gpt", "gpt", {"depth": 8, "width": 32, "heads": 2, "context": 16}, "pysource", 16, 8),
    "mlp": Workload("mlp", "mlp", {"depth": 9, "width": 64}, "random:16x4", 64, 4),
    "gpt16": Workload("gpt16", "gpt", {"depth": 16, "width": 32, "heads": 2, "context": 16}, "pysource", 16, 8),
}


def train_flags(work: Workload, microbatches: int | str) -> list[str]:
    sizes = [word for key, value in work.settings.items() for word in ("--set", f"{key}={value}")]
    return [
        "--model", work.model, *sizes, "--data", work.data, "--optimizer", work.optimizer, "--lr", str(work.lr),
        "--batch-size", str(work.batch_size), "--microbatches", str(microbatches),
        "--steps", str(work.steps), "--seed", str(work.seed),
    ]  # fmt: skip
