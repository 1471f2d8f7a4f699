"""Gossip learning: models walk, merge with the visitors before them, and change nowhere else."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from ringtmp.strategies.gossip_learning.walking_models import Visitors, WalkingModels
from test_every_strategy import train
from test_models_between_workers import THEN_STILL, Watched, spread
from test_strategies import Case, weights
from test_strategies import train as train_on

PLAIN: dict[str, Any] = {**THEN_STILL, "lr_schedule": {}}


def models(*values: float) -> list[list[torch.Tensor]]:
    return [[torch.tensor([each]), torch.tensor([2 * each, 0.0])] for each in values]


def test_a_visitor_merges_with_as_many_before_it_as_the_cache_holds() -> None:
    first, one, two, three = models(0.0, 8.0, 4.0, 6.0)
    last = Visitors(first, 1, merges=True)
    assert [last.welcome(each)[0].item() for each in (one, two, three)] == [4.0, 6.0, 5.0]
    more = Visitors(first, 2, merges=True)
    assert [more.welcome(each)[1][0].item() for each in (one, two, three)] == [8.0, 8.0, 12.0]
    assert one[0].item() == 8.0, "a visitor is remembered as it came"


def test_a_visitor_that_does_not_merge_keeps_its_bits() -> None:
    first, visitor = models(1.0, 0.1)
    walks = Visitors(first, 1, merges=False)
    created = walks.welcome(visitor)
    assert torch.equal(created[0], visitor[0])
    created[0].add_(1)
    assert visitor[0].item() == pytest.approx(0.1)


def test_at_rate_0_models_walk_from_worker_to_worker_and_none_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moving, still = set[str](), list[tuple[int, str]]()
    learn = WalkingModels.gradient

    def learning(self: WalkingModels, layer: int, step: int, share: float, gradient: torch.Tensor) -> None:
        learn(self, layer, step, share, gradient)
        if layer == 0:
            digest = hashlib.sha256(torch.cat(self._replica.values).numpy().tobytes()).hexdigest()
            if step < 4:
                moving.add(digest)
            else:
                still.append((self._me, digest))

    monkeypatch.setattr(WalkingModels, "gradient", learning)
    train("gossip-learning:create=rw", tmp_path, 20, **THEN_STILL)
    assert {digest for _, digest in still} <= moving
    been = {digest: {me for me, other in still if other == digest} for _, digest in still}
    assert any(len(where) > 1 for where in been.values()), "no model ever walked"


def test_a_model_that_never_walks_is_a_worker_alone(tmp_path: Path) -> None:
    home, quiet = Watched(3), Watched(3)
    train("gossip-learning:100", tmp_path / "home", 5, home, **PLAIN)
    train("gosgd:0", tmp_path / "quiet", 5, quiet, **PLAIN)
    assert [torch.equal(one, two) for one, two in zip(home.models, quiet.models, strict=True)] == [True, True]
    assert spread(home.models) > 1e-4


def test_one_worker_has_the_bits_of_one_process(tmp_path: Path) -> None:
    one = train_on(Case("gossip-learning", 1), tmp_path / "one", steps=5)
    alone = train_on(Case("ring", 1), tmp_path / "alone", steps=5)
    assert torch.equal(weights(one), weights(alone))
