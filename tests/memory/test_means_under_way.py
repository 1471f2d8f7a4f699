"""MPCA-SGD: means that are made while workers compute follow the rule, pull as the penalty says, and survive a loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ringtmp import api
from ringtmp.data import source_registry
from ringtmp.data.batches import TrainingBatches
from ringtmp.errors import UsageError
from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.strategies import registry
from test_every_strategy import train
from test_healing import Death, Mortal
from test_models_between_workers import Watched, spread
from test_strategies import model, weights

RATE = 0.05
PLAIN: dict[str, Any] = {"optimizer": "sgd", "optimizer_settings": {"lr": RATE}, "batch_size": 60}  # equal shares


def by_hand(steps: int, *, tau: int, delay: int, rho: float, extrapolate: float) -> list[torch.Tensor]:
    """The rule as a plain loop over three workers that see everything."""
    torch.manual_seed(0)
    shape = model()
    start = torch.cat([each.detach().flatten() for each in shape.parameters()])
    source, _ = source_registry.load("digits", 0, {})
    batches = TrainingBatches(source, 60, 6, 0)
    own = [start.clone() for _ in range(3)]
    means, taken_at = [start, start], 0
    waiting: tuple[int, torch.Tensor] | None = None
    for step in range(steps):
        if waiting is not None and step == waiting[0] + delay:
            means, taken_at, waiting = [means[1], waiting[1]], waiting[0], None
        centre = means[1] + extrapolate * (step - taken_at) / tau * (means[1] - means[0])
        batch = batches.batch(step)
        assert batch is not None
        for rank in range(3):
            mine = slice(2 * rank, 2 * rank + 2)
            nn.utils.vector_to_parameters(own[rank], shape.parameters())
            loss = nn.functional.cross_entropy(shape(torch.cat(batch.inputs[mine])), torch.cat(batch.targets[mine]))
            gradients = torch.autograd.grad(loss, list(shape.parameters()))
            flat = torch.cat([each.flatten() for each in gradients])
            own[rank] = own[rank] - RATE * (flat + rho * (own[rank] - centre))
        if (step + 1) % tau == 0:
            waiting = (step + 1, torch.stack(own).mean(0))
    return own


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("mpca:3:rho=4", {"tau": 3, "delay": 2, "rho": 4.0, "extrapolate": 1.0}),
        pytest.param(
            "mpca:2:rho=4:delay=0:extrapolate=0",
            {"tau": 2, "delay": 0, "rho": 4.0, "extrapolate": 0.0},
            marks=pytest.mark.long,
        ),
        pytest.param("mpca:2:rho=0", {"tau": 2, "delay": 1, "rho": 0.0, "extrapolate": 1.0}, marks=pytest.mark.long),
    ],
)
def test_every_worker_follows_the_rule_and_without_a_penalty_trains_alone(
    name: str, rule: dict[str, Any], tmp_path: Path
) -> None:
    pool = Watched(3)
    result = train(name, tmp_path, 11, pool, **PLAIN)
    wanted = by_hand(11, **rule)
    mean = torch.stack(wanted).mean(0)
    assert float((weights(result) - mean).norm() / mean.norm()) < 1e-6
    for found, own in zip(pool.models, wanted[1:], strict=True):  # the master is not in the pool
        assert abs(float(found.norm() - own.norm())) < 1e-5
    assert spread(pool.models) > 1e-4


@pytest.mark.long  # quick: the rule above, and test_every_strategy
def test_a_penalty_keeps_workers_together(tmp_path: Path) -> None:
    loose, tight = Watched(3), Watched(3)
    train("mpca:2:rho=0", tmp_path / "loose", 20, loose, **PLAIN)
    train("mpca:2:rho=8", tmp_path / "tight", 20, tight, **PLAIN)
    assert spread(tight.models) < 0.5 * spread(loose.models)


@pytest.mark.long  # quick: the rule above, and test_every_strategy
def test_the_others_go_on_from_the_newest_mean_of_all(tmp_path: Path) -> None:
    hit = train("mpca:4", tmp_path / "hit", 24, Mortal(3, Death(2, 13, 3)), checkpoint_every=100, **PLAIN).summary
    (healed,) = hit.recoveries
    assert healed.source == "survivors"
    assert healed.repeated < 4 + 3 + 1
    assert hit.steps == 24
    assert hit.loss.last < hit.loss.first


@pytest.mark.long  # that of averaging is quick, in test_steps_of_their_own
def test_a_stopped_run_goes_on_with_the_mean_everywhere(tmp_path: Path) -> None:
    half = train("mpca:3", tmp_path, 15).summary
    rest = api.resume(tmp_path / "run", {"steps": 30}, None, None, watcher=api.Watcher(), pool=InMemoryPool(3))
    assert rest.summary.steps == 30
    assert rest.summary.test_loss < half.test_loss


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mpca:0", "tau=0 must be a whole number of at least 1"),
        ("mpca:often", "write mpca:8"),
        ("mpca:rho=-1", "rho=-1 must be a finite number of at least 0"),
        ("mpca:4:delay=4", "delay=4 must be from 0 to tau - 1, which is 3"),
        ("mpca:4:delay=-1", "delay=-1 must be from 0"),
        ("mpca:extrapolate=3", "extrapolate=3 must be from 0 to 2"),
    ],
)
def test_bad_settings_are_refused_with_the_valid_range(name: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        registry.parse(name)
