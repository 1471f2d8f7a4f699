"""A module that does the same in training as in evaluation is exported once; any difference is seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from oracle import state_sha256
from ringtmp.model import export
from ringtmp.model.build import build_layers
from ringtmp.model.one_export_for_both_modes import same_in_both_modes

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Calling(nn.Module):
    """`forward(self, x)` as given, with two weights, two tables that are no buffers, and a buffer."""

    def __init__(self, forward: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.tables = [torch.ones(4), torch.ones(4)]
        self.register_buffer("seen", torch.zeros(()))
        self._forward = forward

    def forward(self, x: torch.Tensor) -> Any:
        return self._forward(self, x)


SAME = {
    "plain": lambda self, x: self.two(F.relu(self.one(x))),
    "a flag that leads to the same": lambda self, x: (self.one if self.training else self.children().__next__())(x),
    "a table": lambda self, x: self.one(x) * self.tables[0],
}
OTHER = {
    "dropout": lambda self, x: F.dropout(self.one(x), 0.5, self.training),
    "dropout by zero": lambda self, x: F.dropout(self.one(x), 0.0, self.training),
    "another weight": lambda self, x: self.one(x) if self.training else self.two(x),
    "another table": lambda self, x: self.one(x) * self.tables[self.training],
    "another order": lambda self, x: self.one(x) - self.two(x) if self.training else self.two(x) - self.one(x),
    "another number": lambda self, x: self.one(x) * (1.5 if self.training else 2.5),
    "1 and True": lambda self, x: self.one(x).sum(1, keepdim=True) * (1 if self.training else True),
    "a buffer changed": lambda self, x: self.one(x) + (self.seen.add_(1) if self.training else self.seen),
    "another output": lambda self, x: (self.one(x), self.two(x))[:: 1 if self.training else -1],
    "more outputs": lambda self, x: (lambda y, z: (y, z) if self.training else y)(self.one(x), self.two(x)),
    "an error": lambda self, x: self.one(x) if self.training else self.one(x[:, :2]),
}


@pytest.mark.parametrize("name", SAME)
def test_calls_that_are_alike_are_found_alike(name: str) -> None:
    assert same_in_both_modes(Calling(SAME[name]), X, True)


@pytest.mark.parametrize("name", OTHER)
def test_any_difference_is_seen(name: str) -> None:
    module = Calling(OTHER[name])
    before = state_sha256(module)
    assert not same_in_both_modes(module, X, True)
    assert state_sha256(module) == before, "and nothing is left of the trial"
    assert module.training


def test_neither_weights_nor_randomness_nor_the_mode_are_touched() -> None:
    def changes(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.one.weight.mul_(0.5)
        return self.one(x) + torch.rand(4)

    module = Calling(changes).eval()
    before, drawn = state_sha256(module), torch.random.get_rng_state()
    assert same_in_both_modes(module, X, True)
    assert state_sha256(module) == before
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert not module.training


@pytest.mark.parametrize(("name", "times"), [("plain", 1), ("dropout", 2)])
def test_a_model_is_exported_as_often_as_needed(name: str, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    own = export._exported
    monkeypatch.setattr(export, "_exported", lambda *args, **kwargs: calls.append(1) or own(*args, **kwargs))
    forward = {**SAME, **OTHER}[name]
    built = list(build_layers(Calling(forward), 0, lambda size: torch.ones(size, 4), [2]))
    assert len(calls) == times
    assert built[-1].checked == "model"
