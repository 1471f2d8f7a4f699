"""The table of docs/exactness.md: what a delay of one update does to training, by optimizer and learning rate.

    python scripts/measure_staleness.py [--seeds 1] [--models convnet,gpt]        about ten minutes on one core

Everything runs in this process: with staleness 1 the weights do not depend on the number of nodes.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from ringtmp import Watcher
from ringtmp.api import start
from ringtmp.config import KeepPart, ModelPart, RingPart, RunConfig, TrainingPart
from ringtmp.errors import LossNotFinite


class Work(NamedTuple):
    settings: dict[str, int | float]
    data: str
    batch_size: int
    steps: int


WORKS = {
    "convnet": Work({}, "digits", 32, 135),
    "gpt": Work({"depth": 4, "width": 64, "context": 64}, "pysource", 16, 120),
}
OPTIMIZERS: dict[str, tuple[str, dict[str, float], tuple[float, ...]]] = {
    "sgd": ("sgd", {}, (0.03, 0.1, 0.3, 1.0, 3.0)),
    "sgd, momentum 0.9": ("sgd", {"momentum": 0.9}, (0.003, 0.01, 0.03, 0.1, 0.3)),
    "adam": ("adam", {}, (0.0005, 0.002, 0.008, 0.03, 0.1)),
    "adamw": ("adamw", {}, (0.0005, 0.002, 0.008, 0.03, 0.1)),
    "nadam": ("nadam", {}, (0.0005, 0.002, 0.008, 0.03, 0.1)),
    "nadam, beta1 0.99": ("nadam", {"beta1": 0.99}, (0.0005, 0.002, 0.008, 0.03, 0.1)),
    "muon": ("muon", {}, (0.0005, 0.002, 0.008, 0.03, 0.1)),
    "lion": ("lion", {}, (0.0001, 0.0003, 0.001, 0.003, 0.01)),
}


def final_loss(model: str, optimizer: str, settings: dict[str, Any], staleness: int, seed: int) -> float:
    """Of the test part after the last step; inf where it is no number any more."""
    work = WORKS[model]
    training = TrainingPart(
        data=work.data, steps=work.steps, batch_size=work.batch_size, microbatches=2, optimizer=optimizer,
        optimizer_settings=settings, seed=seed, staleness=staleness,
    )  # fmt: skip
    config = RunConfig(ModelPart(model, work.settings), training, RingPart(nodes=1), KeepPart(protect="off"))
    with tempfile.TemporaryDirectory() as folder:
        try:
            loss = start(config, run_dir=Path(folder) / "run", watcher=Watcher()).summary.test_loss
        except LossNotFinite:
            return math.inf
    return loss if loss is not None and math.isfinite(loss) else math.inf


def row(model: str, name: str, seeds: int, few: int) -> str:
    """Each rate with the test loss without delay and with; the median over seeds."""
    optimizer, settings, rates = OPTIMIZERS[name]
    rates = rates[1 : 1 + few] if few else rates
    cells = []
    for rate in rates:
        losses = [
            median(final_loss(model, optimizer, {**settings, "lr": rate}, delay, seed) for seed in range(seeds))
            for delay in (0, 1)
        ]
        cells.append(f"{rate:g}: " + " → ".join(f"{each:.3g}" if math.isfinite(each) else "nan" for each in losses))
    return f"| {model} | {name} | " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--models", default=",".join(WORKS))
    parser.add_argument("--optimizers", default="", help="names of rows, with semicolons; else all")
    parser.add_argument("--few", type=int, default=0, metavar="N", help="N rates from the second on, instead of all")
    arguments = parser.parse_args()
    print("| model | optimizer | learning rate: test loss without delay → with | | | | |\n" + "|---" * 7 + "|")
    for model in arguments.models.split(","):
        for name in arguments.optimizers.split(";") if arguments.optimizers else OPTIMIZERS:
            print(row(model, name, arguments.seeds, arguments.few), flush=True)


if __name__ == "__main__":
    main()
