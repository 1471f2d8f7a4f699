"""Computing in bfloat16: the bits of one process under the same autocast, for any number of nodes and any schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from harness import Built, recipe, ring_in_memory
from oracle import plain_loop, state_sha256
from ordinary_models import TiedLanguageModel
from ringtmp import api
from ringtmp.config import RingPart, RunConfig, TrainingPart
from ringtmp.data.tables_and_streams import tensors
from ringtmp.errors import UsageError
from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.model.compute_formats import going_forward
from ringtmp.run.evaluate_predict_generate import evaluate, predict
from ringtmp.runtime import compute_device
from test_training_loop import blobs, stack

BATCH, STEPS, PARTS = 8, 3, 4
MODE = "bfloat16"


class Under(nn.Module):
    """Everything goes forward under autocast, whose cache is off."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *given: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            return self.module(*given)


def pictures() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3, stride=2),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(16, 24), nn.GELU(), nn.LayerNorm(24), nn.Linear(24, 3),
    )  # fmt: skip


def sentences() -> nn.Module:
    """Attention, an embedding that is the head, too."""
    return TiedLanguageModel(blocks=1)


def made(make: Any) -> Any:
    torch.manual_seed(1)
    return make()


def batches(make: Any) -> list[tuple[Any, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    if make is sentences:
        return [
            (torch.randint(30, (BATCH, 6), generator=generator), torch.randint(30, (BATCH, 6), generator=generator))
            for _ in range(STEPS)
        ]
    sizes = [BATCH] * (STEPS - 1) + [5]
    return [(torch.randn(size, 64, generator=generator), torch.arange(size) % 3) for size in sizes]


def loss_of(make: Any) -> Any:
    def of_tokens(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    return of_tokens if make is sentences else F.cross_entropy


def expected(make: Any, **more: Any) -> tuple[str, list[float]]:
    model = made(make)

    def loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            return loss_of(make)(outputs, targets)

    losses = plain_loop(Under(model), batches(make), PARTS, loss, lambda each: torch.optim.SGD(each, lr=0.1), **more)
    return state_sha256(model), losses


def built(folder: Path, make: Any) -> Built:
    sample = batches(make)[0][0]
    with going_forward(MODE):
        return Built(folder, made(make), lambda count: sample[:count], [1, 2])


@pytest.mark.parametrize("make", [pictures, sentences])
def test_one_to_four_nodes_have_the_bits_of_one_process_under_autocast(make: Any, tmp_path: Path) -> None:
    model, oracle = built(tmp_path, make), expected(make)
    plain = ring_in_memory(model, recipe(), batches(make), PARTS, loss_of(make), 1)
    assert plain[0] != oracle[0], "float32 gives other bits"
    how = recipe(compute=MODE)
    for nodes, schedule, recompute in [(1, "1f1b", "none"), (2, "zero-bubble", "none"), (4, "1f1b", "all")]:
        found = ring_in_memory(
            model, how, batches(make), PARTS, loss_of(make), nodes, schedule=schedule, recompute=recompute
        )
        assert found == oracle, (nodes, schedule, recompute)


@pytest.mark.long
@pytest.mark.parametrize("make", [pictures, sentences])
@pytest.mark.parametrize("nodes", [1, 2, 3, 4])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero-bubble"])
def test_every_schedule_with_clipping_and_delay(make: Any, nodes: int, schedule: str, tmp_path: Path) -> None:
    model, oracle = built(tmp_path, make), expected(make, clip_norm=0.1, delayed=True)
    how = recipe(compute=MODE, clip_norm=0.1, staleness=1)
    assert ring_in_memory(model, how, batches(make), PARTS, loss_of(make), nodes, schedule=schedule) == oracle


def trained(folder: Path, nodes: int, compute: str = MODE, strategy: str = "ring", **training: Any) -> api.Result:
    config = RunConfig(
        training=TrainingPart(
            data="given", steps=4, batch_size=8, microbatches=4, optimizer="sgd", optimizer_settings={"lr": 0.1},
            compute=compute, **training,
        ),
        ring=RingPart(nodes=nodes, strategy=strategy, all_devices=True),
    )  # fmt: skip
    data = tensors("t", *blobs(40)), tensors("t", *blobs(16))
    return api.start(config, stack(), data, None, run_dir=folder, pool=InMemoryPool(nodes, seed=nodes))


@pytest.fixture
def with_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor without units for bfloat16 computes the same, slower."""
    monkeypatch.setattr(compute_device, "system_units", lambda: "AMX")


@pytest.mark.usefixtures("with_units")
def test_a_run_says_its_mode_sends_bfloat16_and_is_evaluated_in_it(tmp_path: Path) -> None:
    alone, ring = trained(tmp_path / "one", 1), trained(tmp_path / "three", 3)
    plain = trained(tmp_path / "plain", 3, "float32")
    assert alone.summary.weights_sha256 == ring.summary.weights_sha256 != plain.summary.weights_sha256
    assert (ring.summary.exactness, ring.summary.numeric_mode) == ("bits", "bfloat16 compute")
    assert plain.summary.numeric_mode == "float32"
    sent = [sum(each.bytes_sent for each in run.summary.per_node) for run in (ring, plain)]
    assert sent[0] < 0.6 * sent[1], "activations and gradients travel with two bytes a number"
    told = evaluate(tmp_path / "three", blobs(16), 3, pool=InMemoryPool(3, seed=1))
    assert told["loss"] == ring.summary.test_loss == alone.summary.test_loss
    found = predict(tmp_path / "three", blobs(16)[0], 3, pool=InMemoryPool(3, seed=1))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        assert torch.equal(found, ring.model.eval()(blobs(16)[0]).float())
    assert ring.model[0].weight.dtype == torch.float32


@pytest.mark.usefixtures("with_units")
@pytest.mark.parametrize("strategy", ["allreduce", pytest.param("ps", marks=pytest.mark.long)])
def test_strategies_with_the_whole_model_on_every_node_compute_so_too(strategy: str, tmp_path: Path) -> None:
    found = trained(tmp_path / "two", 2, strategy=strategy).summary
    assert found.weights_sha256 == trained(tmp_path / "again", 2, strategy=strategy).summary.weights_sha256
    assert found.numeric_mode == "bfloat16 compute"
    near = trained(tmp_path / "ring", 1).summary
    assert found.loss.last == pytest.approx(near.loss.last, rel=1e-2)


def test_a_processor_without_units_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compute_device, "system_units", lambda: "")
    with pytest.raises(UsageError, match="--compute bfloat16: this machine .* has no units for bfloat16"):
        trained(tmp_path / "run", 2)
    assert not (tmp_path / "run").exists()


def test_a_node_without_units_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(["AMX", "AMX", ""])  # the master for itself, then two nodes in their hellos
    monkeypatch.setattr(compute_device, "system_units", lambda: next(answers))
    with pytest.raises(UsageError, match="--compute bfloat16: node [12] has no units"):
        trained(tmp_path / "run", 3)


def test_other_numbers_to_compute_in_are_refused() -> None:
    with pytest.raises(UsageError, match="float16.*bfloat16"):
        api.start(
            RunConfig(training=TrainingPart(compute="float16")), stack(), None, None, pool=InMemoryPool(1, seed=1)
        )
