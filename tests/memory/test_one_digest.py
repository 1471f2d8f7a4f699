"""One digest for every synchronous way to train with `sum_tree`: one process, rings, all-reduce by halving, a server."""

from __future__ import annotations

from collections import OrderedDict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from oracle import plain_loop, state_sha256
from ringtmp import api
from ringtmp.config import RingPart, RunConfig, TrainingPart
from ringtmp.data.batches import TrainingBatches
from ringtmp.data.sources import tensors
from ringtmp.launch.nodes_in_this_process import InMemoryPool
from ringtmp.model import zoo
from ringtmp.runtime.losses import next_byte
from test_same_bits_as_one_process import source

SEED, CLIP, PARTS = 3, 0.3, 4
#: 43 samples in batches of 20: the last batch has 3, in 3 microbatches instead of 8.
BATCH, MICROBATCHES, SAMPLES, STEPS = 20, 8, 43, 5
ADAMW = {"lr": 0.003, "weight_decay": 0.1}
GPT = {"depth": 2, "width": 32, "heads": 2, "context": 16, "dropout": 0.1}


class Idle(nn.Module):
    """It has a weight that gets no gradient: an optimizer leaves that alone, and with zeros it would not."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.used(x) + self.idle(x.detach()).detach()


def data() -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = source("pysource").take(torch.arange(SAMPLES))
    return inputs, targets


def model() -> nn.Sequential:
    torch.manual_seed(SEED)
    built = list(zoo.build("gpt", source("pysource").shape, GPT))
    return nn.Sequential(OrderedDict([*built[:-1], ("idle", Idle()), built[-1]]))


@cache
def plain(parts: int = PARTS) -> str:
    order = TrainingBatches(tensors("t", *data()), BATCH, MICROBATCHES, SEED)
    found = [order.batch(step) for step in range(STEPS)]
    batches = [(torch.cat(list(each.inputs)), torch.cat(list(each.targets))) for each in found if each is not None]
    trained = model()
    plain_loop(
        trained, batches, MICROBATCHES, next_byte, lambda p: torch.optim.AdamW(p, fused=True, **ADAMW), SEED, CLIP,
        sum_tree=parts,
    )  # fmt: skip
    return state_sha256(trained)


def train(folder: Path, nodes: int, strategy: str, **more: Any) -> api.Result:
    training = TrainingPart(
        batch_size=BATCH, microbatches=MICROBATCHES, optimizer="adamw", optimizer_settings=ADAMW, clip_norm=CLIP,
        steps=STEPS, seed=SEED, sum_tree=more.pop("sum_tree", PARTS),
    )  # fmt: skip
    config = RunConfig(training=training, ring=RingPart(nodes=nodes, strategy=strategy, **more))
    return api.start(
        config, model(), (tensors("t", *data()), None), "next_byte", run_dir=folder / "run", pool=InMemoryPool(nodes, nodes)
    )  # fmt: skip


WAYS = [
    pytest.param("ring", 1, {}, id="one process"),
    pytest.param("ring", 4, {"schedule": "zero-bubble"}, id="ring of 4"),
    pytest.param("allreduce:halving", 2, {}, id="halving on 2"),
    pytest.param("allreduce:halving", 4, {}, id="halving on 4"),
    pytest.param("ps:bsp", 5, {}, id="server and 4 workers"),
    pytest.param("allreduce:halving", 3, {}, id="halving on 3"),
    pytest.param("ps:bsp:workers", 4, {}, id="4 servers that work"),
    pytest.param("ps:bsp", 4, {"strategy_settings": {"servers": 2, "fetch": "layerwise"}}, id="layerwise"),
]


@pytest.mark.parametrize(("strategy", "nodes", "more"), WAYS)
def test_every_synchronous_way_ends_in_the_bits_of_one_process(
    strategy: str, nodes: int, more: dict[str, Any], tmp_path: Path
) -> None:
    """Dropout, adamw, clipping, a weight without a gradient, a last batch with fewer microbatches than parts."""
    summary = train(tmp_path, nodes, strategy, **more).summary
    assert summary.weights_sha256 == plain()
    assert summary.exactness == "bits"
