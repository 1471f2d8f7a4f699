"""All-reduce of a model that torch's fully_shard cuts over the ranks; here over one, in this process. Two and more ranks are in
`test_sharded_ranks.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

from ringtmp import api
from ringtmp.config import KeepPart, RingPart, RunConfig, TrainingPart
from ringtmp.data.tables_and_streams import tensors
from ringtmp.errors import UsageError
from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.plan.memory_forecast import MemoryForecast
from ringtmp.strategies.allreduce import AllReduceSettings
from ringtmp.strategies.allreduce.sharded_replica import ShardedReplica
from ringtmp.transport.base import Transport, TransportWrapper
from test_training_loop import blobs, stack


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield DeviceMesh("cpu", [0])
    distributed.destroy_process_group()


class AtOnce:
    """Sums over one rank."""

    ranks = 1

    def __init__(self) -> None:
        self._there: list[Any] = []

    def start(self, name: tuple[int, int], vector: torch.Tensor) -> None:
        self._there.append((name, vector))

    def there(self) -> list[Any]:
        found, self._there = self._there, []
        return found


class WithMesh(TransportWrapper):
    def __init__(self, inner: Transport, mesh: DeviceMesh) -> None:
        super().__init__(inner)
        self.sums, self.mesh = AtOnce(), mesh


class Ranks(InMemoryPool):
    ranks_of_torch = True


def config(strategy: dict[str, Any], **training: Any) -> RunConfig:
    base = {"epochs": 2, "batch_size": 16, "microbatches": 4, "optimizer": "adamw", "optimizer_settings": {"lr": 0.01}}
    return RunConfig(
        training=TrainingPart(data="given", **{**base, **training}),
        ring=RingPart(nodes=1, strategy="allreduce", strategy_settings=strategy, all_devices=True),
        keep=KeepPart(checkpoint_every=4),
    )  # fmt: skip


def data() -> Any:
    return tensors("t", *blobs(90)), tensors("t", *blobs(30))


def sharded(folder: Path, mesh: DeviceMesh, **training: Any) -> api.Result:
    pool = Ranks(1, seed=3, wrap=lambda inner: WithMesh(inner, mesh))
    return api.start(
        config({"algorithm": "torch", "shard": True}, **training), stack(), data(), None, run_dir=folder, pool=pool
    )


def replicated(folder: Path, **training: Any) -> api.Result:
    return api.start(config({}, **training), stack(), data(), None, run_dir=folder, pool=InMemoryPool(1))


@pytest.mark.parametrize("training", [{}, pytest.param({"clip_norm": 0.5}, marks=pytest.mark.long)])
def test_one_rank_has_the_bits_of_a_replica_and_lets_go_of_every_layer(
    training: dict[str, Any], mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BatchNorm, dropout, a smaller last batch, evaluation, a checkpoint on the way."""
    most: list[int] = []

    def hold(self: ShardedReplica, layer: int) -> None:
        held(self, layer)
        whole = [each for one in self.stages for each in one.parameters[0]]
        most.append(sum(each.untyped_storage().nbytes() > 0 for each in whole))

    held = ShardedReplica.hold
    monkeypatch.setattr(ShardedReplica, "hold", hold)
    found, expected = (
        sharded(tmp_path / "cut", mesh, **training).summary,
        replicated(tmp_path / "whole", **training).summary,
    )
    assert found.weights_sha256 == expected.weights_sha256 is not None
    assert (found.loss, found.accuracy) == (expected.loss, expected.accuracy)
    assert max(most) <= 4, "no more than two layers' tensors at a time: the last one goes backward at once"


def test_a_run_goes_on_cut_where_it_was_whole_and_back(mesh: DeviceMesh, tmp_path: Path) -> None:
    replicated(tmp_path / "run", epochs=1)
    pool = Ranks(1, seed=3, wrap=lambda inner: WithMesh(inner, mesh))
    changes = {"strategy_settings": {"algorithm": "torch", "shard": True}, "epochs": 2}
    api.resume(tmp_path / "run", changes, data(), None, pool=pool)
    changes = {"strategy_settings": {"algorithm": "ring", "shard": False}, "epochs": 3}
    last = api.resume(tmp_path / "run", changes, data(), None, pool=InMemoryPool(1)).summary
    assert last.weights_sha256 == replicated(tmp_path / "whole", epochs=3).summary.weights_sha256


def test_what_cannot_be_cut_is_refused(mesh: DeviceMesh, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="shard=true .* goes with allreduce:torch only, not with algorithm=ring"):
        AllReduceSettings(shard=True)
    with pytest.raises(UsageError, match="muon needs whole matrices"):
        sharded(tmp_path / "muon", mesh, optimizer="muon", optimizer_settings={})
    with pytest.raises(UsageError, match="--compile does not go with shard=true"):
        sharded(tmp_path / "compiled", mesh, compile=True)


def test_a_forecast_of_four_ranks_has_a_quarter_of_what_is_trained() -> None:
    whole = MemoryForecast("d", 0, 0, 1000.0, 800.0, 1600.0, 0, 800.0, 0)
    cut = whole.in_shares(4, 100.0)
    assert (cut.weight_bytes, cut.gradient_bytes, cut.optimizer_bytes) == (200 + 200 + 100, 200 + 100, 400)
