"""Every random operator draws by its ordinal in the whole model: the bits of eager mode under the same rule, for any cut."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from harness import Built, recipe, ring_in_memory
from oracle import RandomByOperator, plain_loop, state_sha256
from ringtmp import api
from ringtmp.config import RingPart, RunConfig, TrainingPart
from ringtmp.data.batches import TrainingBatches
from ringtmp.data.tables_and_streams import Source, tensors
from ringtmp.errors import CheckpointError
from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.model import portable_layer
from ringtmp.run import build_model
from ringtmp.run.what_to_train import Watcher
from ringtmp.runtime import json_with_checksum
from ringtmp.runtime.losses import cross_entropy
from ringtmp.runtime.run_directory import LayerIndex, RunDirectory

WIDTH, LONG = 8, 4
SGD = partial(torch.optim.SGD, lr=0.1, fused=True)


class Twice(nn.Module):
    """Two dropouts in one block, and one with nothing to drop between them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.dropout(F.dropout(self.linear(F.dropout(x, 0.3, self.training)), 0.0), 1.0, False)
        return x + F.dropout(y.relu(), 0.4, self.training)


class Attention(nn.Module):
    def __init__(self, weights: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.3, batch_first=True)
        self.weights = weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self.attention(x, x, x, need_weights=self.weights)[0]
        return x + mixed


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return x + F.scaled_dot_product_attention(y, x, y, dropout_p=0.3 if self.training else 0.0)


class Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module], depth: int) -> None:
        super().__init__()
        self.cells = kind(WIDTH, WIDTH, num_layers=depth, dropout=0.3, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.cells(x)[0]
        return y


class Noisy(nn.Module):
    """Draws in evaluation too; one of its draws nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.rand_like(x)
        return x * self.scale + 0.1 * torch.randn_like(x) * torch.bernoulli(torch.full_like(x, 0.5))


class Positive(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.abs() + 0.1


MODELS: dict[str, Callable[[], list[nn.Module]]] = {
    "dropout": lambda: [Twice(), nn.Dropout(0.2), nn.AlphaDropout(0.2), nn.Linear(WIDTH, WIDTH)],
    "attention": lambda: [Attention(True), Twice(), Attention(False), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH)],
    "scaled": lambda: [Scaled(), Twice(), Scaled(), Scaled()],
    "lstm": lambda: [Recurrent(nn.LSTM, 2), Recurrent(nn.GRU, 3), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH)],
    "rrelu": lambda: [nn.Linear(WIDTH, WIDTH), Positive(), nn.RReLU(), Twice(), nn.RReLU(), nn.Linear(WIDTH, WIDTH)],
    "noise": lambda: [Noisy(), Twice(), Noisy(), nn.Linear(WIDTH, WIDTH)],
    "encoder": lambda: [nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.3, batch_first=True) for _ in range(4)],
}


def squared(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return ((outputs - targets) ** 2).mean()


def drawing(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (F.dropout(outputs - targets, 0.2) ** 2).mean() + 0.01 * torch.rand(()) * outputs.mean()


def batches(steps: int = 2) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    made = [torch.randn(8, LONG, WIDTH, generator=generator) for _ in range(2 * steps)]
    return list(zip(made[::2], made[1::2], strict=True))


def expected(build: Callable[[], list[nn.Module]], loss: Any) -> tuple[str, list[float]]:
    torch.manual_seed(1)
    plain = nn.Sequential(*build())
    losses = plain_loop(plain, batches(), 3, loss, SGD, seed=1)
    return state_sha256(plain), losses


def built(folder: Path, build: Callable[[], list[nn.Module]]) -> Built:
    return Built(folder, build, lambda count: torch.zeros(count, LONG, WIDTH), [2, 3], 1)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.long] * (name in ("attention", "lstm", "encoder"))) for name in MODELS],
)
def test_a_ring_of_any_size_draws_what_eager_mode_draws(name: str, tmp_path: Path) -> None:
    wanted = expected(MODELS[name], squared)
    model = built(tmp_path, MODELS[name])
    for nodes, schedule, recompute in (
        (1, "1f1b", "none"), (2, "1f1b", "all"), (3, "zero-bubble", "none"), (3, "gpipe", "all"),
    ):  # fmt: skip
        got = ring_in_memory(
            model, recipe(seed=1), batches(), 3, squared, nodes, schedule, window=3, seed=nodes, recompute=recompute
        )
        assert got == wanted, f"{nodes} nodes, {schedule}, recompute {recompute}"


@pytest.mark.parametrize("tail", [False, True])
def test_a_loss_that_draws_has_a_seed_of_its_own(tail: bool, tmp_path: Path) -> None:
    """Also where the tail has no layer that could have seeded the generator."""
    wanted = expected(MODELS["dropout"], drawing)
    model = built(tmp_path, MODELS["dropout"])
    bounds = [(0, 1), (1, 4), (4, 4)] if tail else [(0, 1), (1, 2), (2, 4)]
    for recompute in ("none", "all"):
        got = ring_in_memory(
            model, recipe(seed=1), batches(), 3, drawing, 2, bounds=bounds, window=3, recompute=recompute
        )
        assert got == wanted


def test_where_one_layer_ends_and_the_next_begins_changes_no_bit(tmp_path: Path) -> None:
    digests = set()
    for ends in ((1, 2, 3, 4, 5, 6), (3, 4, 6)):

        def build(ends: tuple[int, ...] = ends) -> list[nn.Module]:
            parts = MODELS["rrelu"]()
            return [nn.Sequential(*parts[start:end]) for start, end in zip((0, *ends), ends, strict=False)]

        model = built(tmp_path / str(len(ends)), build)
        numbers = [layer.random_before for layer in model.layers]
        assert numbers == [{0: 0, 1: 0, 2: 0, 3: 1, 4: 3, 5: 4}[start] for start in (0, *ends[:-1])]
        digests.add(tuple(ring_in_memory(model, recipe(seed=1), batches(), 3, squared, 2 if len(ends) > 2 else 1)[1]))
    assert digests == {tuple(expected(MODELS["rrelu"], squared)[1])}


class Rounding(torch.autograd.Function):
    """Rounds forward and the gradient at random."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.floor(x * 8 + torch.rand_like(x)) / 8

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return torch.floor(gradient * 4096 + torch.rand_like(gradient)) / 4096


class Rounded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = Rounding.apply(self.linear(x))
        return F.dropout(y, 0.2, self.training)


def test_a_backward_that_draws_gives_the_same_bits_in_every_ring(tmp_path: Path) -> None:
    model = built(tmp_path, lambda: [Rounded(), nn.Dropout(0.2), Rounded(), Rounded(), Rounded()])
    assert [layer.random_before for layer in model.layers] == [0, 3, 4, 7, 10]
    results = [
        ring_in_memory(model, recipe(seed=1), batches(), 3, squared, nodes, schedule, window=3, recompute=recompute)
        for nodes, schedule, recompute in (
            (1, "1f1b", "none"), (1, "gpipe", "none"), (2, "1f1b", "all"), (3, "zero-bubble", "none"), (3, "gpipe", "all"),
        )
    ]  # fmt: skip
    assert all(each == results[0] for each in results)


def test_the_oracle_counts_what_draws_and_nothing_else() -> None:
    x = torch.randn(3, LONG, WIDTH)
    for name, drawn in (("dropout", 4), ("attention", 5), ("scaled", 5), ("lstm", 3), ("rrelu", 4), ("noise", 8)):
        model = nn.Sequential(*MODELS[name]())
        with RandomByOperator(0, 0, 0) as rule:
            model(x)
        assert rule.count == drawn, name


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    labels = torch.arange(60) % 3
    return torch.randn(60, WIDTH, generator=generator) + 3 * F.one_hot(labels, WIDTH), labels


def stack() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Dropout(0.3), Positive(), nn.Dropout(0.3), nn.Linear(16, 3))


def plain(steps: int, randomness: str) -> tuple[str, list[float]]:
    model, source = stack(), TrainingBatches(tensors("t", *data()), 16, 4, 0)
    found = [source.batch(step) for step in range(steps)]
    pairs = [(torch.cat(list(each.inputs)), torch.cat(list(each.targets))) for each in found if each is not None]
    losses = plain_loop(model, pairs, 4, cross_entropy, SGD, randomness=randomness)
    return state_sha256(model), losses


def train(folder: Path, nodes: int, steps: int, strategy: str = "ring") -> api.Result:
    training = TrainingPart(
        data="given", batch_size=16, microbatches=4, optimizer="sgd", optimizer_settings={"lr": 0.1}, steps=steps
    )
    given: tuple[Source, None] = tensors("t", *data()), None
    config = RunConfig(training=training, ring=RingPart(nodes=nodes, strategy=strategy))
    return api.start(config, stack(), given, None, run_dir=folder, watcher=Watcher(), pool=InMemoryPool(nodes))


def resume(folder: Path, nodes: int, steps: int) -> api.Result:
    given: tuple[Source, None] = tensors("t", *data()), None
    changes = {"nodes": nodes, "steps": steps}
    return api.resume(folder, changes, given, None, watcher=Watcher(), pool=InMemoryPool(nodes))


@pytest.mark.parametrize(("strategy", "nodes"), [("ring", 3), ("ps", 2), ("ps", 4), ("allreduce", 1), ("allreduce", 3)])
def test_every_worker_draws_for_its_microbatches_what_one_process_would(
    strategy: str, nodes: int, tmp_path: Path
) -> None:
    result = train(tmp_path / "run", nodes, 4, strategy)
    digest, losses = plain(4, "operator")
    assert [each.loss for each in result.history.steps] == pytest.approx(losses, rel=1e-5)
    if strategy == "ring":
        assert result.summary.weights_sha256 == digest


def written_by_an_older_version(run: Path) -> None:
    """Takes what it did not know out of the files of a run."""
    found = RunDirectory(run)
    index, layers = found.read_layers()
    digests = []
    for place, layer in enumerate(layers):
        held = msgspec.msgpack.decode(portable_layer.encode(layer))
        del held["random_before"], held["random_before_evaluating"]
        encoded = msgspec.msgpack.encode(held)
        (found.layers / f"{place:04d}.layer").write_bytes(encoded)
        digests.append(hashlib.sha256(encoded).hexdigest())
    document = msgspec.json.decode(msgspec.json.encode(msgspec.structs.replace(index, digests=tuple(digests))))
    del document["randomness"]
    held = {"sealed": 1, **document}
    (found.layers / "index.json").write_bytes(msgspec.json.encode({**held, "seal": json_with_checksum._digest(held)}))


def test_an_older_run_goes_on_with_its_own_rule_and_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def older(*args: Any, randomness: str, **more: Any) -> LayerIndex:
        assert randomness == "operator"
        return LayerIndex(*args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(build_model, "LayerIndex", older)
        train(tmp_path / "run", 3, 3)
    written_by_an_older_version(tmp_path / "run")
    result = resume(tmp_path / "run", 2, 6)
    assert result.summary.weights_sha256 == plain(6, "layer")[0]
    assert result.summary.weights_sha256 != plain(6, "operator")[0]
    assert RunDirectory(tmp_path / "run").read_layers()[0].randomness == "layer"


def test_a_new_run_says_its_rule_and_goes_on_with_it(tmp_path: Path) -> None:
    train(tmp_path / "run", 3, 3)
    result = resume(tmp_path / "run", 2, 6)
    assert result.summary.weights_sha256 == plain(6, "operator")[0]
    found = RunDirectory(tmp_path / "run")
    index, _ = found.read_layers()
    assert index.randomness == "operator"
    found.write_index(msgspec.structs.replace(index, randomness="dice"))
    with pytest.raises(CheckpointError, match="another version.*dice"):
        found.read_layers()
