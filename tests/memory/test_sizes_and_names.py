"""Sizes are read off what a cell gets anyway, so that no input leaves the master for them; reading a model leaves it be."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from harness import Built
from ordinary_models import Aliased, vectors
from ringtmp import Ring
from ringtmp.model.build import build_layers
from ringtmp.model.build_cells import Cutting
from ringtmp.model.portable_layer import hides_inputs


class Flat(nn.Module):
    """Flattens samples and time before its linear layers, as GPT-2 does, and computes its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)
        self.steps = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        samples, time = ids.shape
        x = self.embed(ids).view(samples * time, 8)
        for step in self.steps:
            x = x + torch.relu(step(x)).view(samples, time, 8).cumsum(1).view(samples * time, 8)
        return F.cross_entropy(self.head(x), labels.view(-1))


def sample(count: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 20, (count, 6), generator=torch.Generator().manual_seed(count))
    return {"ids": ids, "labels": ids}


def test_neither_inputs_nor_labels_leave_the_master_to_be_counted() -> None:
    built = list(build_layers(Flat(), 0, sample, [2], cutting=Cutting(labels=(1,))))
    assert len(built) > 4
    for takes in ("train_takes", "evaluate_takes"):
        where = [[place for maker, place in getattr(each.layer, takes) if maker == 0] for each in built]
        assert where[0] == [0]
        assert where[-1] == [1]
        assert not any(where[1:-1]), where


@pytest.mark.long
def test_a_ring_of_it_says_nothing_of_inputs_that_leave(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    data = sample(24)
    digests = {
        Ring(nodes=nodes, progress=False).fit(
            copy.deepcopy(Flat()), data, steps=2, batch_size=8, microbatches=2, run_dir=tmp_path / str(nodes), seed=3
        ).summary.nodes
        for nodes in (1, 2)
    }  # fmt: skip
    assert digests == {1, 2}
    assert "leaves the master" not in capfd.readouterr().err


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.rest = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for each in self.rest:
            x = each(torch.relu(x))
        return x


def test_a_weight_computed_before_any_input_comes_hides_none(tmp_path: Path) -> None:
    layers = Built(tmp_path, Spectral(), vectors(8), [2]).layers
    assert layers[0].parameters
    assert not layers[0].takes_inputs
    assert hides_inputs(layers)[:2] == [False, True]


@pytest.mark.parametrize("more", [{}, {"train": "head"}, {"lora": "r=2,on=steps.0"}])
def test_a_module_with_two_names_is_trained_and_left_as_it_was(more: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Aliased()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    Ring(nodes=1, progress=False).fit(
        model, (torch.randn(24, 8), torch.arange(24) % 3), steps=2, batch_size=12, microbatches=2,
        run_dir=tmp_path / "run", **more,
    )  # fmt: skip
    assert model.again is model.norm
    assert model.steps[2] is model.steps[0]
    kinds = {type(each) for module in model.modules() for each in module._parameters.values() if each is not None}
    assert kinds == {nn.Parameter}
    after = model.state_dict()
    assert all(torch.equal(after[name], each) for name, each in before.items() if name in after)
