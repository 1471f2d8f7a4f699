"""Strategy `tensor`: layers cut inside give what one process gives, send what the plan says, and hold a part of the model."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ringtmp import api
from ringtmp.config import KeepPart, ModelPart, RingPart, RunConfig, TrainingPart
from ringtmp.data import source_registry
from ringtmp.errors import RingError
from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.runtime.checkpoint import latest, named_weights
from ringtmp.runtime.run_directory import RunDirectory

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mlp": ("digits", {"width": 64, "depth": 3, "dropout": 0.1}),
    "convnet": ("digits", {"width": 8, "depth": 4, "dropout": 0.1}),
    "resnet": ("digits", {"width": 8, "depth": 3, "dropout": 0.1}),
    "gpt": ("pysource", {"width": 32, "depth": 2, "context": 16, "dropout": 0.1}),
}


@cache
def source(data: str) -> Any:
    return source_registry.load(data, 0, {"context": 16})


def train(
    model: str | nn.Module, strategy: str, nodes: int, folder: Path, seed: int = 0, data: str = "", **training: Any
) -> api.Result:
    name, settings = (model, MODELS[model][1]) if isinstance(model, str) else ("mlp", {})
    part = {"batch_size": 20, "microbatches": 3, "steps": 3, "optimizer": "sgd",
            "optimizer_settings": {"lr": 0.05, "momentum": 0.9}, **training}  # fmt: skip
    config = RunConfig(
        model=ModelPart(name, settings), training=TrainingPart(**part), ring=RingPart(strategy=strategy, nodes=nodes),
        keep=KeepPart(checkpoint_every=training.pop("checkpoint_every", None)),
    )  # fmt: skip
    torch.manual_seed(0)
    given = model if isinstance(model, nn.Module) else None
    table = data or (MODELS[model][0] if isinstance(model, str) else "digits")
    loss = "next_byte" if table == "pysource" else None
    return api.start(config, given, source(table), loss, run_dir=folder / "run", pool=InMemoryPool(nodes, seed))


def weights(result: api.Result) -> dict[str, torch.Tensor]:
    run = RunDirectory(result.run_dir)
    index, layers = run.read_layers()
    return {name: each.clone() for name, each in named_weights(latest(run.checkpoints)[0], layers, index.state)}


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Of the tensor that differs most."""
    assert one.keys() == other.keys()
    pairs = [(one[name].double(), other[name].double()) for name in one]
    return max(float((a - b).norm() / max(float(a.norm()), 1e-3)) for a, b in pairs)


def facts(result: api.Result) -> dict[str, Any]:
    first = json.loads((result.run_dir / "events.jsonl").read_text().splitlines()[0])
    return dict(first["facts"])


def rings() -> list[Any]:
    quick = {("mlp", 4), ("gpt", 2)}
    every = [(model, nodes) for model in MODELS for nodes in (2, 4)]
    return [pytest.param(*each, marks=[] if each in quick else [pytest.mark.long]) for each in every]


@pytest.mark.parametrize(("model", "nodes"), rings())
def test_workers_with_parts_of_layers_give_what_one_process_gives(model: str, nodes: int, tmp_path: Path) -> None:
    alone = train(model, "ring", 1, tmp_path / "alone")
    cut = train(model, "tensor:64", nodes, tmp_path / "cut")
    assert apart(weights(alone), weights(cut)) < 1e-5
    assert cut.summary.test_loss == pytest.approx(alone.summary.test_loss, rel=1e-5)
    assert cut.summary.accuracy == alone.summary.accuracy
    # What the plan counts in its graph is what goes over the wire, and every worker holds less than the model.
    per_step = facts(cut)["parts_per_sample"] * 20 * 4
    assert cut.summary.bytes_total == pytest.approx(per_step * 3, rel=0.02)
    whole = sum(each.numel() for each in weights(alone).values())
    assert all(each.params < 0.8 * whole for each in cut.summary.per_node)


def test_clipping_adam_and_a_smaller_last_batch_agree_and_every_delivery_order_has_the_same_bits(
    tmp_path: Path,
) -> None:
    more: dict[str, Any] = {
        "optimizer": "adamw", "optimizer_settings": {"lr": 1e-3}, "clip_norm": 0.3, "batch_size": 480, "epochs": 1,
        "steps": None, "microbatches": 4,
    }  # fmt: skip
    alone = train("mlp", "ring", 1, tmp_path / "alone", **more)
    cut = [train("mlp", "tensor:64", 2, tmp_path / f"{seed}", seed, **more).summary for seed in (0, 7)]
    assert apart(weights(alone), weights(api.Result(tmp_path / "0" / "run"))) < 1e-5
    assert cut[0].weights_sha256 == cut[1].weights_sha256


def test_a_resumed_run_has_the_bits_of_one_that_was_never_stopped(tmp_path: Path) -> None:
    more: dict[str, Any] = {"optimizer": "adam", "optimizer_settings": {"lr": 1e-3}}
    whole = train("convnet", "tensor:64", 2, tmp_path / "whole", steps=4, **more)
    train("convnet", "tensor:64", 2, tmp_path / "half", steps=2, **more)
    rest = api.resume(tmp_path / "half" / "run", {"steps": 4}, None, None, watcher=api.Watcher(), pool=InMemoryPool(2))
    assert rest.summary.weights_sha256 == whole.summary.weights_sha256


class Heads(nn.Module):
    """Attention as most write it, with queries, keys and values of their own."""

    def __init__(self, heads: int, width: int = 24, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query, self.key, self.value = (nn.Linear(8, width) for _ in range(3))
        self.out = nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def split(y: torch.Tensor) -> torch.Tensor:
            return y.view(y.shape[0], y.shape[1], self.heads, -1).transpose(1, 2)

        q, k, v = split(self.query(x)), split(self.key(x)), split(self.value(x))
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)
        y: torch.Tensor = x + self.out(mixed.transpose(1, 2).flatten(2))
        return y


class Rows(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (batch, 1, 8, 8) or (batch, 64) -> (batch, 8, 8)
        return x.reshape(x.shape[0], 8, 8)


def attention(heads: int, **more: Any) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(Rows(), Heads(heads, **more), nn.LayerNorm(8), nn.Flatten(), nn.Linear(64, 10))


def test_heads_are_shared_out_with_one_sum_each_way(tmp_path: Path) -> None:
    alone = train(attention(4), "ring", 1, tmp_path / "alone")
    cut = train(attention(4), "tensor:64", 2, tmp_path / "cut")
    assert apart(weights(alone), weights(cut)) < 1e-5
    # The attention's output is added up (64 values a sample); queries, keys and values are made of inputs, so that no
    # gradient comes back; the head is cut by inputs: 10 values to add up, 64 gradients to put together. By outputs it would be
    # 10 values to put together and 64 gradients to add up.
    assert facts(cut)["parts_per_sample"] == 2 * 64 + 2 * 10 + 64


def dense(*sizes: int) -> nn.Sequential:
    torch.manual_seed(1)
    linears = [nn.Linear(*pair) for pair in pairwise(sizes)]
    return nn.Sequential(nn.Flatten(), *(each for one in linears for each in (one, nn.ReLU())))


class Written(nn.Module):
    """A ReLU in place: of the layer's own output, or of a view of it."""

    def __init__(self, view: bool) -> None:
        super().__init__()
        self.linear, self.view = nn.Linear(64, 10), view

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x.flatten(1))
        F.relu(y.view(-1, 5, 2) if self.view else y, inplace=True)
        return y


def test_a_relu_in_place_is_as_good_as_any(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(inplace=True), Written(view=False))
    alone = train(model, "ring", 1, tmp_path / "alone")
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(inplace=True), Written(view=False))
    assert apart(weights(alone), weights(train(model, "tensor:64", 2, tmp_path / "cut"))) < 1e-5


@pytest.mark.parametrize(
    ("model", "nodes", "given", "said"),
    [
        (dense(64, 30, 11), 4, {}, r"takes 30 values and gives 11, which 4 workers cannot share out evenly: use 1, 2, 3, 5"),
        (attention(3), 4, {}, "an attention has 3 heads, which 4 workers cannot share out evenly: use 1, 3 nodes"),
        (attention(4, dropout=0.1), 2, {}, "dropout inside attention .* set the dropout of the attention weights to 0"),
        (dense(64, 10), 2, {"strategy": "tensor:100000"}, "finds nothing to cut.*least=100000"),
        (Written(view=True), 2, {}, "changes a value in place that is used again"),
        (dense(64, 30, 10), 2, {"optimizer": "muon", "optimizer_settings": {"lr": 1e-3}}, "muon works on whole matrices"),
        (dense(64, 30, 10), 2, {"wire": "int8"}, "use --wire float32"),
        (dense(64, 30, 10), 2, {"compute": "bfloat16"}, "leave out --compute"),
        (dense(64, 30, 10), 2, {"compile": True}, "leave out --compile"),
        (dense(64, 30, 10), 2, {"strategy": "tensor:least=0"}, "least=0 must be a whole number of at least 1"),
    ],
)  # fmt: skip
def test_what_does_not_divide_or_cannot_be_cut_is_refused_before_the_start(
    model: nn.Module, nodes: int, given: dict[str, Any], said: str, tmp_path: Path
) -> None:
    rest = {"strategy": "tensor:64", **given}
    with pytest.raises(RingError, match=said):
        train(model, rest.pop("strategy"), nodes, tmp_path, **rest)


class Scaled(nn.Module):
    """Between columns and rows: a number that is learned, one number for each value, and a buffer of them."""

    shift: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 32), nn.Linear(32, 10)
        self.all, self.each = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.linspace(0.5, 2.0, 32))
        self.register_buffer("shift", torch.linspace(-1.0, 1.0, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.up(x.flatten(1))) * self.all * self.each
        logits: torch.Tensor = self.down(self.all * (y + self.shift))
        return logits


def test_what_is_whole_and_learned_beside_a_cut_value_gets_its_whole_gradient(tmp_path: Path) -> None:
    """A single number got the gradient of each worker's own part, and grew apart; a vector ended the run with a KeyError."""
    runs = [
        train(Scaled(), strategy, nodes, tmp_path / strategy)
        for strategy, nodes in (("ring", 1), ("tensor:64", 2))
        if torch.manual_seed(1)
    ]
    assert apart(weights(runs[0]), weights(runs[1])) < 1e-5


class Network(nn.Module):
    """No list of layers: skips, and a weight that is used twice, which stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice = nn.Linear(64, 48), nn.Linear(48, 48, bias=False)
        self.up, self.down, self.head = nn.Linear(48, 96), nn.Linear(96, 48), nn.Linear(48, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.silu(self.first(x.flatten(1)))
        y = y + self.twice(torch.tanh(self.twice(y)))
        y = y + self.down(F.gelu(self.up(y)))
        logits: torch.Tensor = self.head(y)
        return logits


@pytest.mark.long
def test_a_module_with_skips_and_a_weight_used_twice_gives_what_one_process_gives(tmp_path: Path) -> None:
    def network() -> nn.Module:
        torch.manual_seed(1)
        return Network()

    alone = train(network(), "ring", 1, tmp_path / "alone")
    cut = train(network(), "tensor:64", 2, tmp_path / "cut")
    assert apart(weights(alone), weights(cut)) < 1e-5
    found = RunDirectory(cut.run_dir).read_layers()[1]
    assert len(found) > 1 or found[0].train_takes is not None, "it was cut into cells, or is one"
