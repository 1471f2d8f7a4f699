"""A model that does not fit into memory is built in files, with the bits of one built in memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from ringtmp.model import build_larger_than_memory
from ringtmp.model.build_larger_than_memory import LeftUnfilled
from ringtmp.model.layers import opened_model


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(600, 700)
        self.body = nn.Linear(700, 700)
        self.scale = nn.Parameter(torch.ones(600, 700))
        self.head = nn.Linear(700, 3)


def _mapped_files() -> int:
    maps = Path("/proc/self/maps")
    return maps.read_text().count(".building-") if maps.exists() else 0


def test_weights_built_in_files_have_the_bits_of_those_built_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = opened_model(Wide, 3).given.state_dict()
    assert _mapped_files() == 0
    monkeypatch.setattr(build_larger_than_memory, "SHARE", 0.0)
    opened = opened_model(Wide, 3, tmp_path)
    found = opened.given.state_dict()
    assert all(found[name].equal(tensor) for name, tensor in expected.items())
    assert all(parameter.requires_grad for parameter in opened.given.parameters())
    assert os.listdir(tmp_path) == [], "files have no name"
    if Path("/proc/self/maps").exists():
        assert _mapped_files() >= 3, "what is large lies in files"


@pytest.mark.parametrize("make", [lambda: nn.Linear(600, 600, bias=False), lambda: nn.Embedding(600, 600)])
def test_what_a_file_will_fill_gets_no_first_values(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with LeftUnfilled():
        make()
    assert torch.equal(torch.get_rng_state(), before), "no number was drawn"
    with LeftUnfilled():
        small = nn.Linear(6, 6)
    assert bool(small.weight.abs().sum() > 0), "what is small is as usual"
    make()
    assert not torch.equal(torch.get_rng_state(), before)
