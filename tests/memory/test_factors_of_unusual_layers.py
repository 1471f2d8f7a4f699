"""Factors where a linear layer has no gradient, where everything goes forward in bfloat16, and where layers are compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ringtmp import api
from ringtmp.config import RingPart, RunConfig, TrainingPart
from ringtmp.data.tables_and_streams import tensors
from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.model import compiled_graph
from ringtmp.runtime import compute_device
from test_strategies import weights


class Aside(nn.Module):
    """A linear layer that nothing comes back to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).detach()


def train(strategy: str, nodes: int, folder: Path, **training: Any) -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 12), Aside(), nn.Linear(12, 3))
    inputs = torch.randn(48, 12, generator=torch.Generator().manual_seed(1))
    part = TrainingPart(
        batch_size=6, microbatches=2, steps=3, optimizer="sgd", optimizer_settings={"lr": 0.05}, **training
    )
    config = RunConfig(training=part, ring=RingPart(strategy=strategy, nodes=nodes))
    data = tensors("t", inputs, inputs[:, :3].argmax(1)), None
    return weights(api.start(config, model, data, run_dir=folder / strategy, pool=InMemoryPool(nodes, 0)))


@pytest.mark.parametrize(
    ("training", "close"),
    [
        pytest.param({}, 1e-6, id="float32"),
        pytest.param({"compute": "bfloat16"}, 1e-3, id="bfloat16"),
        pytest.param({"compile": True}, 1e-6, id="compiled", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("strategy", ["hybcomm:factors", pytest.param("ps:bsp:factors=true", marks=pytest.mark.long)])
def test_factors_end_where_one_process_does(
    strategy: str, training: dict[str, Any], close: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An honest worker was called one that breaks the protocol, or operands had two types."""
    monkeypatch.setattr(compiled_graph, "BACKEND", "aot_eager")
    monkeypatch.setattr(compute_device, "system_units", lambda: "here")
    alone, found = train("ring", 1, tmp_path, **training), train(strategy, 2, tmp_path, **training)
    assert float((found - alone).norm() / alone.norm()) < close


class Asked(nn.Module):
    """A linear layer with as many rows in every microbatch, however many samples it has."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)
        self.register_buffer("asked", torch.randn(rows, 12, generator=torch.Generator().manual_seed(2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.asked).mean(0)


@pytest.mark.parametrize("rows", [6, pytest.param(20, marks=pytest.mark.long)])
def test_workers_whose_shares_make_other_numbers_of_rows_go_the_same_way(rows: int, tmp_path: Path) -> None:
    """Each chose from its own: with three and two samples, one sent factors and the other its gradient."""

    def ends(strategy: str, nodes: int) -> torch.Tensor:
        torch.manual_seed(0)
        inputs = torch.randn(40, 12, generator=torch.Generator().manual_seed(1))
        part = TrainingPart(batch_size=5, microbatches=2, steps=2, optimizer="sgd", optimizer_settings={"lr": 0.05})
        config = RunConfig(training=part, ring=RingPart(strategy=strategy, nodes=nodes))
        data = tensors("t", inputs, inputs[:, :3].argmax(1)), None
        model = nn.Sequential(Asked(rows), nn.Linear(12, 3))
        return weights(api.start(config, model, data, run_dir=tmp_path / strategy, pool=InMemoryPool(nodes, 0)))

    alone, found = ends("ring", 1), ends("hybcomm", 2)
    assert float((found - alone).norm() / alone.norm()) < 1e-6
