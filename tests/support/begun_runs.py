"""Runs of ordinary models that are built once and then gone on with from step 0, with whatever settings a test likes."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from oracle import plain_loop, state_sha256
from ordinary_models import ORDINARY, class_loss, targets_for
from ringtmp import api
from ringtmp.config import KeepPart, RingPart, RunConfig, TrainingPart
from ringtmp.data.batches import TrainingBatches
from ringtmp.data.tables_and_streams import Source, from_python
from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.runtime.run_directory import RunDirectory

BATCH, PARTS, STEPS, RATE = 8, 4, 6, 0.01
LOSSES = {"tied": "next_byte"}


class Begun:
    """A model as a run directory at step 0."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self._runs = 0
        make, sample = ORDINARY[name]
        torch.manual_seed(1)
        self.model = make()
        self.inputs = sample(3 * BATCH)
        self.targets = targets_for(copy.deepcopy(self.model), self.inputs)
        training = TrainingPart(
            data="given", steps=1, batch_size=BATCH, microbatches=PARTS, loss=LOSSES.get(name, "cross_entropy"),
            optimizer="adamw", optimizer_settings={"lr": RATE},
        )  # fmt: skip
        config = RunConfig(training=training, ring=RingPart(nodes=1), keep=KeepPart())
        base = folder / "base"
        api.start(config, self.model, self.data(), None, run_dir=base, watcher=api.Watcher(), pool=InMemoryPool(1))
        shutil.rmtree(base / "checkpoints" / "step-00000001")
        (base / "events.jsonl").unlink()
        self.layers = RunDirectory(base).read_layers()[1]

    def data(self) -> tuple[Source, Source]:
        part = self.rows(slice(BATCH)), self.targets[:BATCH]
        return from_python((self.inputs, self.targets)), from_python(part)

    def rows(self, which: slice) -> Any:
        """Some of the inputs."""
        if isinstance(self.inputs, tuple):
            return tuple(each[which] for each in self.inputs)
        return self.inputs[which]

    def run(
        self, pool: InMemoryPool, ring: dict[str, Any] | None = None, keep: KeepPart | None = None, steps: int = STEPS,
        **training: Any,
    ) -> api.Result:  # fmt: skip
        self._runs += 1
        run = RunDirectory(self.folder / str(self._runs))
        shutil.copytree(self.folder / "base", run.path)
        saved = run.read_config()
        config = msgspec.structs.replace(
            saved.config,
            ring=RingPart(nodes=pool.nodes, **{"all_devices": True, **(ring or {})}),
            keep=keep or KeepPart(checkpoint_every=4),
            training=msgspec.structs.replace(saved.config.training, **training),
        )
        run.write_config(msgspec.structs.replace(saved, config=config))
        return self.resume(run.path, pool, steps=steps)

    def resume(self, run: Path, pool: InMemoryPool, **changes: Any) -> api.Result:
        return api.resume(run, changes, self.data(), None, watcher=api.Watcher(), pool=pool, model=self.model)

    def plain(self, steps: int = STEPS, microbatches: int = PARTS, **more: Any) -> tuple[nn.Module, list[float]]:
        """What a plain loop makes of the model, and its losses."""
        model = copy.deepcopy(self.model)
        source = TrainingBatches(self.data()[0], BATCH, microbatches, 0)
        batches = []
        for step in range(steps):
            batch = source.batch(step)
            assert batch is not None
            batches.append((_joined(batch.inputs), torch.cat(list(batch.targets))))
        more.setdefault("optimizer", lambda each: torch.optim.AdamW(each, lr=RATE, fused=True))
        losses = plain_loop(model, batches, microbatches, class_loss, **more)
        return model, losses

    def plain_digest(self, **more: Any) -> str:
        return state_sha256(self.plain(**more)[0])


def _joined(parts: Any) -> Any:
    if isinstance(parts[0], tuple):
        return tuple(torch.cat(list(column)) for column in zip(*parts, strict=True))
    return torch.cat(list(parts))
