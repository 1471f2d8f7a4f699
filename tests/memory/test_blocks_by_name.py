"""A module cut between blocks that its user names: the bits stay those of eager; and what is said where it cannot be cut."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from harness import Built, recipe, ring_in_memory
from oracle import plain_loop, state_sha256
from ordinary_models import ORDINARY, class_loss, targets_for
from ringtmp.config import RunConfig, merge_for_resume, replaced
from ringtmp.errors import UsageError
from ringtmp.model.blocks import patterns_of
from ringtmp.model.build import build_layers
from ringtmp.model.build_cells import Cutting
from ringtmp.strategies.ring.plan import refuse_too_few

WIDTH = 8


def rows(count: int) -> torch.Tensor:
    return torch.randn(count, WIDTH)


class Steps(nn.Module):
    """Blocks in a list, something before and behind them."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(inplace=True), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(depth)
        )
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        for each in self.layers:
            x = x + each(x)
        return self.last(x.relu_())


def names_of(model: nn.Module, blocks: str, sample: Any = rows) -> list[str]:
    return [each.layer.name for each in build_layers(model, 0, sample, [2], cutting=Cutting(patterns_of(blocks)))]


@pytest.mark.parametrize(
    ("blocks", "found"),
    [
        ("layers.*", ["first", "layers.0", "layers.1", "layers.2", "last"]),
        ("layers", ["first", "layers", "last"]),
        ("layers.1", ["first", "layers.1", "layers.2.0"]),
        ("layers.1, last", ["first", "layers.1", "layers.2", "last"]),
        ("layers.*, layers.1.0", ["first", "layers.0", "layers.1.0", "layers.1.2", "layers.2", "last"]),
        ("fir*", ["first", "layers.0.0"]),
    ],
)
def test_a_model_is_cut_between_the_named_modules_and_nowhere_else(blocks: str, found: list[str]) -> None:
    assert names_of(Steps(), blocks) == found


def test_blocks_of_a_resnet_hold_their_skips_and_changes_in_place() -> None:
    make, sample = ORDINARY["resnet"]
    expected = ["stem", "layer1.0", "layer1.1", "layer2.0", "layer2.1", "fc"]
    assert names_of(make(), "layer*.*", sample) == expected


@pytest.mark.parametrize(("name", "blocks"), [("resnet", "layer*.*"), ("unet", "enc*,dec*")])
def test_blocks_change_no_bit(name: str, blocks: str, tmp_path: Path) -> None:
    make, sample = ORDINARY[name]
    torch.manual_seed(1)
    model = make()
    inputs = sample(6)
    batches = [(inputs, targets_for(copy.deepcopy(model), inputs))]
    built = Built(tmp_path, copy.deepcopy(model), sample, [2], cutting=Cutting(patterns_of(blocks)))
    plain_loop(model, batches, 3, class_loss, lambda each: torch.optim.Adam(each, lr=0.01, fused=True))
    found, _ = ring_in_memory(built, recipe("adam", {"lr": 0.01}), batches, 3, class_loss, 3)
    assert found == state_sha256(model)


def test_a_pattern_that_fits_nothing_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(UsageError, match=r"--blocks 'layer\.\*' fits no module of Steps: did you mean 'layers\.\*'\?"):
        names_of(Steps(), "layer.*")
    with pytest.raises(
        UsageError, match=r"--blocks 'h' fits .*its modules are first, layers, layers\.\*, layers\.\*\.\*"
    ):
        names_of(Steps(), "layers.*, h")
    with pytest.raises(UsageError, match="--blocks is empty"):
        patterns_of(" , ")


@pytest.mark.parametrize("model", [nn.Sequential(nn.Linear(WIDTH, WIDTH)), [nn.Linear(WIDTH, WIDTH)]])
def test_a_list_of_layers_has_no_blocks(model: Any) -> None:
    with pytest.raises(
        UsageError, match=r"--blocks '0\.\*' is for a module .* cut between its layers: leave out --blocks"
    ):
        names_of(model, "0.*")


def test_a_resumed_run_keeps_its_blocks() -> None:
    saved = replaced(RunConfig(), {"blocks": "layers.*"})
    assert merge_for_resume(saved, {"blocks": "layers.*", "nodes": 2}).ring.blocks == "layers.*"
    with pytest.raises(UsageError, match="cannot change --blocks .*: the run directory has the model as it was cut"):
        merge_for_resume(saved, {"blocks": "layers"})


# -- why it is not cut --------------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Counts in a buffer from its first operator to its last."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Steps()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.inner(x * (self.seen > 0)) * (self.seen > 0)


class Viewed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Steps()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        view = y[:, :3]
        z = self.inner(x)
        y.mul_(2)
        return z + view


UNCUT: dict[str, tuple[nn.Module, str, str]] = {
    "one operator": (nn.Linear(WIDTH, 3), "", "has 1. This module could not be cut, because it has only one operator"),
    "a buffer": (Counting(), "", r"has 1. This module could not be cut, because seen is changed .* \(in its own forward\)"),
    "a view": (Viewed(), "", "because a tensor is changed in place after a view of it was taken .in its own forward.: change"),
    "blocks": (Steps(), "layers", "the model has 3. .* not be cut further, because --blocks 'layers' leaves no more places"),
}  # fmt: skip


@pytest.mark.parametrize("kind", UNCUT)
def test_what_stands_in_the_way_is_named_before_the_long_comparison(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, blocks, says = UNCUT[kind]
    cutting = Cutting(patterns_of(blocks or None))
    assert len(list(build_layers(model, 0, rows, [2], partial(refuse_too_few, RunConfig(), 1, True), cutting))) < 4

    def compare(*_: Any, **__: Any) -> Any:
        raise AssertionError("compared with eager mode")

    monkeypatch.setattr("ringtmp.model.build.Check", compare)
    for everyone in (True, False) if kind != "blocks" else (True,):
        with pytest.raises(UsageError, match=says):
            list(build_layers(model, 0, rows, [2], partial(refuse_too_few, RunConfig(), 3, everyone), cutting))


class Tied(nn.Module):
    """A head that uses the weight of the embedding: the last cell has no parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 20, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for each in self.layers:
            x = each(x).relu()
        return self.head(x)


def test_a_tied_head_needs_a_layer_more_and_the_refusal_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def ids(count: int) -> torch.Tensor:
        return torch.arange(count * 4).reshape(count, 4) % 20

    assert len(list(build_layers(Tied(), 0, ids, [2], partial(refuse_too_few, RunConfig(), 2, True)))) == 4

    def compare(*_: Any, **__: Any) -> Any:
        raise AssertionError("compared with eager mode")

    monkeypatch.setattr("ringtmp.model.build.Check", compare)
    says = (
        r"3 nodes need at least 5 layers \(the master's front and tail and one per worker; the tail takes 2, because the last "
        r"has no parameters of its own \(a tied weight belongs to the first layer that uses it\)\); the model has 4.*use 2 or"
    )
    with pytest.raises(UsageError, match=says):
        list(build_layers(Tied(), 0, ids, [2], partial(refuse_too_few, RunConfig(), 3, True)))
    twice = replaced(RunConfig(), {"laps": 2})
    with pytest.raises(UsageError, match=r"5 visits needs at least 6 layers; the tail takes 2.*; the model has 4"):
        list(build_layers(Tied(), 0, ids, [2], partial(refuse_too_few, twice, 2, True)))
