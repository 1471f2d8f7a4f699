"""What is frozen is written once and is in no snapshot; runs heal, resume and are evaluated with the same bits all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
import torch
from safetensors import safe_open
from torch import nn

from oracle import state_sha256
from ringtmp import Result, api
from ringtmp.config import KeepPart, RingPart, RunConfig, TrainingPart
from ringtmp.data.tables_and_streams import Table, tensors
from ringtmp.errors import CheckpointError
from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.model.export import Exporter
from ringtmp.model.frozen_parameters import frozen_names
from ringtmp.model.portable_layer import Graph, Layer, OutputTree, OwnedTensor
from ringtmp.runtime.checkpoint import latest
from test_healing import Death, Mortal

STEPS, WIDTH = 12, 24


def stack() -> nn.Sequential:
    """Layers of which all is trained, nothing, and a part."""
    torch.manual_seed(2)
    layers: list[nn.Module] = []
    for at in range(6):
        layer = nn.Linear(8 if at == 0 else WIDTH, WIDTH)
        layer.weight.requires_grad_(at in (0, 5))
        layer.bias.requires_grad_(at in (0, 2, 4, 5))
        layers += [layer, nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 3))


def data() -> tuple[Table, Table]:
    x = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
    return tensors("t", x, torch.arange(96) % 3), tensors("t", x[:24], torch.arange(24) % 3)


def run(folder: Path, pool: InMemoryPool, keep: KeepPart | None = None, **ring: Any) -> Result:
    config = RunConfig(
        training=TrainingPart(data="given", steps=STEPS, batch_size=16, microbatches=4, optimizer="adamw"),
        ring=RingPart(**{"nodes": pool.nodes, "all_devices": True, **ring}),
        keep=keep or KeepPart(checkpoint_every=4),
    )
    return api.start(config, stack(), data(), None, run_dir=folder, watcher=api.Watcher(), pool=pool)


def names(folder: Path) -> set[str]:
    found: set[str] = set()
    for path in folder.glob("weights-*.safetensors"):
        with safe_open(str(path), framework="pt") as file:
            found |= set(file.keys())
    return found


FROZEN = {"2.weight", "2.bias", "4.weight", "6.weight", "6.bias", "8.weight"}


def test_checkpoints_after_the_first_hold_what_is_trained(tmp_path: Path) -> None:
    result = run(tmp_path / "run", InMemoryPool(3))
    folder = tmp_path / "run" / "checkpoints"
    assert names(folder / "frozen") == FROZEN
    for step in folder.glob("step-*"):
        assert names(step) == set(stack().state_dict()) - FROZEN, step
    before, after = stack().state_dict(), result.model.state_dict()
    assert {name for name in before if torch.equal(before[name], after[name])} == FROZEN
    assert result.summary.weights_sha256 == state_sha256(result.model)


#: An owner with its holder.
BOTH = (Death(3, 8), Death(2, 8))


@pytest.mark.parametrize(
    "deaths",
    [
        pytest.param((Death(1, 7, 3),), marks=pytest.mark.long),
        pytest.param((Death(2, 6, 1), Death(1, 9, 4)), marks=pytest.mark.long),
        BOTH,
    ],
)
def test_a_lost_node_comes_back_with_what_was_frozen(deaths: tuple[Death, ...], tmp_path: Path) -> None:
    calm = run(tmp_path / "calm", InMemoryPool(4), KeepPart(protect="off"))
    hit = run(tmp_path / "hit", Mortal(4, *deaths), KeepPart(protect="memory"))
    assert hit.summary.weights_sha256 == calm.summary.weights_sha256
    assert hit.summary.recoveries
    if deaths != BOTH:
        assert any(each.step > 0 for each in hit.summary.recoveries), "from a snapshot, not from the first checkpoint"


def test_one_that_held_a_layer_for_another_gets_what_was_frozen_of_it(tmp_path: Path) -> None:
    """After a loss layers may move to the very node that holds their snapshot, and never had what is in none."""

    class Forgetful(Mortal):
        def kill(self, node: int) -> None:
            super().kill(node)
            for each in self._workers:
                each.endpoint.snapshots.forget_frozen(but=())

    calm = run(tmp_path / "calm", InMemoryPool(4), KeepPart(protect="off"))
    hit = run(tmp_path / "hit", Forgetful(4, Death(3, 7, 3)), KeepPart(protect="memory"))
    assert hit.summary.weights_sha256 == calm.summary.weights_sha256
    assert [each.source for each in hit.summary.recoveries] == ["snapshot"]


def test_snapshots_leave_it_out(tmp_path: Path) -> None:
    class Watched(InMemoryPool):
        sizes: ClassVar[dict[int, int]] = {}  # by layer

        def advance(self) -> bool:
            for store in (each.endpoint.snapshots for each in self._workers):
                found = (store.label(*key) for key in store.contents())
                self.sizes.update({label.layer: label.size for label in found if label is not None})
            return super().advance()

    run(tmp_path / "run", Watched(4), KeepPart(protect="memory"))
    assert not Watched.sizes.keys() & {2, 6}, "of these nothing is trained"
    assert Watched.sizes.keys() & {4, 8}
    assert all(Watched.sizes[layer] < 4 * WIDTH * 4 for layer in (4, 8) if layer in Watched.sizes), Watched.sizes


@pytest.mark.long
@pytest.mark.parametrize(
    "strategy", ["ring", *(pytest.param(each, marks=pytest.mark.long) for each in ("ps", "allreduce"))]
)
def test_a_run_goes_on_with_it(strategy: str, tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", InMemoryPool(3), strategy=strategy)
    config = RunConfig(
        training=TrainingPart(data="given", steps=6, batch_size=16, microbatches=4, optimizer="adamw"),
        ring=RingPart(nodes=3, all_devices=True, strategy=strategy), keep=KeepPart(checkpoint_every=4),
    )  # fmt: skip
    api.start(config, stack(), data(), None, run_dir=tmp_path / "half", watcher=api.Watcher(), pool=InMemoryPool(3))
    rest = api.resume(
        tmp_path / "half", {"steps": STEPS}, data(), None, watcher=api.Watcher(), pool=InMemoryPool(3)
    )  # fmt: skip
    assert rest.summary.weights_sha256 == whole.summary.weights_sha256
    for step in (tmp_path / "half" / "checkpoints").glob("step-*"):
        assert not names(step) & FROZEN
    assert api.evaluate(tmp_path / "half", (data()[1].take(torch.arange(24))), 1)["samples"] == 24


class Tied(nn.Module):
    """Its head is its embedding, frozen: a cell at either end reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(400, WIDTH).requires_grad_(False)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return nn.functional.linear(x.mean(1), self.table.weight)


def test_a_copy_of_a_frozen_parameter_is_kept_once_too(tmp_path: Path) -> None:
    ids = torch.arange(96 * 5).view(96, 5) % 400
    source = tensors("t", ids, ids[:, 0])

    def tied(folder: str, pool: InMemoryPool) -> Result:
        config = RunConfig(
            training=TrainingPart(data="given", steps=8, batch_size=16, microbatches=4),
            ring=RingPart(nodes=pool.nodes, all_devices=True), keep=KeepPart(checkpoint_every=4, protect="memory"),
        )  # fmt: skip
        torch.manual_seed(3)
        return api.start(
            config, Tied(), (source, None), None, run_dir=tmp_path / folder, watcher=api.Watcher(), pool=pool
        )

    calm, hit = tied("calm", InMemoryPool(3)), tied("hit", Mortal(3, Death(1, 6, 2)))
    assert hit.summary.recoveries
    assert hit.summary.weights_sha256 == calm.summary.weights_sha256
    for step in (tmp_path / "hit" / "checkpoints").glob("step-*"):
        largest = max(path.stat().st_size for path in step.glob("*.safetensors"))
        assert largest < 400 * WIDTH * 4, f"{step.name} has the table, which has {400 * WIDTH * 4} bytes, once more"


@pytest.mark.parametrize("harm", ["changed", "gone"])
def test_damage_to_it_is_noticed(harm: str, tmp_path: Path) -> None:
    run(tmp_path / "run", InMemoryPool(2))
    path = tmp_path / "run" / "checkpoints" / "frozen" / "weights-0002.safetensors"
    if harm == "gone":
        path.unlink()
    else:
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"frozen/weights-0002\.safetensors is (missing|damaged)"):
        latest(tmp_path / "run" / "checkpoints")


def test_a_frozen_parameter_that_its_layer_changes_itself_is_not_kept_once() -> None:
    table = nn.Embedding(9, 4, max_norm=0.5).requires_grad_(False)
    layer, _ = Exporter().export("x", table, torch.arange(6).view(3, 2))
    assert frozen_names(layer) == frozenset()
    plain, _ = Exporter().export("x", nn.Embedding(9, 4).requires_grad_(False), torch.arange(6).view(3, 2))
    assert frozen_names(plain) == {"weight"}


def test_a_copy_of_an_older_run_stays_where_it_is() -> None:
    """Such a run has it among a checkpoint's other tensors, and its layers do not say that it is a copy."""
    graph = Graph((), (), (), False)
    copy = OwnedTensor("w", "constant", "float32", (2, 2), False, False, full="embed.weight", rank=0)
    assert frozen_names(Layer("head", graph, graph, (copy,), OutputTree("*"))) == frozenset()
    newer = msgspec.structs.replace(copy, copied=True)
    assert frozen_names(Layer("head", graph, graph, (newer,), OutputTree("*"))) == {"w"}
