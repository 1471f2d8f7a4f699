"""Every optimizer that has no fused kernel in torch: the bits of a plain loop on any ring, with delayed gradients, with frozen
parts, resumed, and under the other strategies."""

from __future__ import annotations

import copy
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from harness import Built, recipe, ring_in_memory
from oracle import plain_loop, state_sha256
from ringtmp import api
from ringtmp.config import ModelPart, RingPart, RunConfig, TrainingPart
from ringtmp.data import source_registry
from ringtmp.data.batches import aligned
from ringtmp.errors import UsageError
from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.model import zoo
from ringtmp.runtime.checkpoint import latest
from ringtmp.runtime.losses import next_byte
from ringtmp.runtime.optimizers import state_values
from ringtmp.runtime.run_directory import RunDirectory
from test_frozen_and_adapted import BATCH, PARTS, STEPS, adapted, class_loss, targets_for, tokens
from test_optimizers import Both, Lion

SETTINGS: dict[str, dict[str, Any]] = {
    "nadam": {"lr": 0.004, "beta1": 0.99, "weight_decay": 0.01, "decoupled_weight_decay": True},
    "muon": {"lr": 0.004, "momentum": 0.9, "beta2": 0.95},
    "lion": {"lr": 0.0005, "weight_decay": 0.1},
}


def plainly(name: str, model: nn.Module) -> Any:
    """What a user of plain torch would write."""
    given = SETTINGS[name]
    trained = [each for each in model.parameters() if each.requires_grad]
    if name == "nadam":
        return torch.optim.NAdam(
            trained, lr=0.004, betas=(0.99, 0.999), weight_decay=0.01, decoupled_weight_decay=True, foreach=False
        )
    if name == "lion":
        return Lion(trained, lr=given["lr"], weight_decay=given["weight_decay"])
    hidden = {id(each.weight) for each in model.modules() if isinstance(each, nn.Linear)}
    tables = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
    matrices = [each for each in trained if id(each) in hidden - tables]
    others = [each for each in trained if id(each) not in hidden - tables]
    assert matrices
    return Both(
        torch.optim.Muon(matrices, lr=0.004, momentum=0.9, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=0.004, betas=(0.9, 0.95), weight_decay=0.1, fused=True) if others else None,
    )


#: Quick with a delay; the same without it differs in one number of the recipe.
@pytest.mark.parametrize("staleness", [pytest.param(0, marks=pytest.mark.long), 1])
@pytest.mark.parametrize("name", SETTINGS)
def test_any_ring_gives_the_bits_of_a_plain_loop(name: str, staleness: int, tmp_path: Path) -> None:
    source = source_registry.load("pysource", 0, {"context": 12})[0]
    settings = {"width": 16, "heads": 2, "depth": 2, "context": 12}
    batches = [tuple(map(aligned, source.take(torch.arange(8 * step, 8 * step + 8)))) for step in range(3)]
    torch.manual_seed(5)
    plain = nn.Sequential(OrderedDict(zoo.build("gpt", source.shape, settings)))
    losses = plain_loop(
        plain, batches, 4, next_byte, lambda _: plainly(name, plain), 5, clip_norm=0.5, delayed=bool(staleness)
    )
    built = Built(
        tmp_path, lambda: zoo.build("gpt", source.shape, settings), lambda count: source.example(count)[0], [2], seed=5
    )
    how = recipe(name, SETTINGS[name], seed=5, clip_norm=0.5, staleness=staleness)
    for nodes in (1, 2, 3):
        got = ring_in_memory(built, how, batches, 4, next_byte, nodes, "zero-bubble", seed=nodes)
        assert got == (state_sha256(plain), losses), nodes


@pytest.mark.long
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name != "muon")) for name in SETTINGS])
def test_adapters_of_a_frozen_model_have_the_bits_of_eager(name: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = adapted()
    inputs = tokens(30, 20)(BATCH * STEPS)
    targets = targets_for(copy.deepcopy(model), inputs)
    rows = [slice(BATCH * step, BATCH * (step + 1)) for step in range(STEPS)]
    batches = [(inputs[each].clone(), targets[each].clone()) for each in rows]
    built = Built(tmp_path, copy.deepcopy(model), tokens(30, 20), [BATCH // PARTS])
    plain_loop(model, batches, PARTS, class_loss, lambda _: plainly(name, model))
    for nodes in (1, 3):
        found, _ = ring_in_memory(built, recipe(name, SETTINGS[name]), batches, PARTS, class_loss, nodes)
        assert found == state_sha256(model), nodes


def digits(folder: Path, name: str, strategy: str, steps: int, **more: Any) -> api.Result:
    config = RunConfig(
        ModelPart("mlp", {"width": 16}),
        TrainingPart(
            steps=steps, batch_size=24, microbatches=6, optimizer=name, optimizer_settings=SETTINGS[name], **more
        ),
        RingPart(strategy=strategy, nodes=3),
    )
    return api.start(config, run_dir=folder, pool=InMemoryPool(3, seed=1))


@pytest.mark.parametrize(
    ("name", "strategy", "staleness"),
    [
        ("muon", "ring", 1),
        ("nadam", "ps:bsp", 0),
        ("lion", "allreduce:ring", 0),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in (
                ("nadam", "ring", 1),
                ("lion", "ring", 0),
                ("lion", "ps:bsp", 0),
                ("muon", "allreduce:tree", 0),
            )
        ),
    ],
)
def test_a_resumed_run_ends_with_the_bits_of_one_that_never_stopped(
    name: str, strategy: str, staleness: int, tmp_path: Path
) -> None:
    whole = digits(tmp_path / "whole", name, strategy, 6, staleness=staleness).summary
    digits(tmp_path / "parts", name, strategy, 3, staleness=staleness)
    again = api.resume(
        tmp_path / "parts", {"steps": 6}, None, None, watcher=api.Watcher(), pool=InMemoryPool(3, seed=2)
    ).summary
    assert again.weights_sha256 == whole.weights_sha256


def test_a_checkpoint_has_one_tensor_for_a_hidden_matrix_and_two_for_other_parameters(tmp_path: Path) -> None:
    digits(tmp_path / "run", "muon", "ring", 2)
    checkpoint, _ = latest(tmp_path / "run" / "checkpoints")
    _, layers = RunDirectory(tmp_path / "run").read_layers()
    index, layer = next((index, each) for index, each in enumerate(layers) if each.trained)
    matrix, bias = (each.name for each in layer.tensors)
    assert sorted(checkpoint.layer(index, layer)[1]) == sorted(
        [(bias, "exp_avg"), (bias, "exp_avg_sq"), (bias, "step"), (matrix, "momentum_buffer")]
    )
    assert state_values("muon", SETTINGS["muon"], layer) == layer.trained + 16  # the bias once more


def test_muon_is_refused_where_there_are_no_matrices_or_only_parts_of_them(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"--optimizer muon needs whole matrices, and ps cuts .* use .*ring, or .*adamw"
    ):
        digits(tmp_path / "a", "muon", "ps:bsp", 2)
    flat = [nn.Unflatten(1, (1, 64)), nn.Conv1d(1, 4, 3), nn.Conv1d(4, 10, 62), nn.Flatten()]
    x = torch.randn(24, 64)
    with pytest.raises(UsageError, match="for the matrices of hidden layers, and this model trains none"):
        api.Ring(nodes=1, progress=False).fit(
            flat, (x, torch.arange(24) % 10), optimizer="muon", batch_size=8, run_dir=tmp_path / "b"
        )
