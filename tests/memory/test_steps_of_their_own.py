"""Workers that make steps of their own and then average: limits of the published rules, what is evaluated, who heals how."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ringtmp import api
from ringtmp.config import KeepPart, RingPart, RunConfig, TrainingPart
from ringtmp.data.tables_and_streams import tensors
from ringtmp.errors import UsageError
from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.strategies import registry
from ringtmp.strategies.block_momentum.model_update_filter import UpdateFilter
from test_every_strategy import train
from test_healing import Death, Mortal
from test_strategies import weights

PLAIN: dict[str, Any] = {"optimizer": "sgd", "optimizer_settings": {"lr": 0.05}, "batch_size": 60}  # equal shares


def in_whole_numbers(strategy: str, folder: Path, steps: int) -> torch.Tensor:
    """A linear model of whole numbers, so small that nothing is ever rounded."""
    model = nn.Sequential(nn.Linear(4, 2))
    with torch.no_grad():
        for each in model.parameters():
            each.copy_(torch.arange(each.numel()).reshape(each.shape) - 3.0)
    inputs = (torch.arange(64 * 4).reshape(64, 4) * 7 % 5 - 2).float()
    data = tensors("whole", inputs, (inputs[:, :2] * 2 + 1))
    training = TrainingPart(
        data="given", steps=steps, batch_size=16, microbatches=4, optimizer="sgd", optimizer_settings={"lr": 0.125}
    )
    config = RunConfig(training=training, ring=RingPart(strategy=strategy, nodes=4), keep=KeepPart())
    result = api.start(config, model, (data, data), "mse", run_dir=folder / "run", pool=InMemoryPool(4))
    return weights(result)


def test_a_mean_after_every_step_of_plain_descent_is_all_reduce_to_the_bit_where_nothing_is_rounded(
    tmp_path: Path,
) -> None:
    summed = in_whole_numbers("allreduce:tree", tmp_path / "sum", 2)
    assert torch.equal(in_whole_numbers("averaging:1:algorithm=tree", tmp_path / "tree", 2), summed)
    assert torch.equal(in_whole_numbers("averaging:1", tmp_path / "ring", 2), summed)
    assert not torch.equal(in_whole_numbers("averaging:2", tmp_path / "seldom", 2), summed)


@pytest.mark.long  # quick: the one above
def test_otherwise_it_is_all_reduce_to_rounding(tmp_path: Path) -> None:
    every = weights(train("allreduce", tmp_path / "sum", 12, **PLAIN))
    one = weights(train("averaging:1", tmp_path / "one", 12, **PLAIN))
    seldom = weights(train("averaging:3", tmp_path / "seldom", 12, **PLAIN))
    assert float((one - every).norm() / every.norm()) < 1e-5
    assert float((seldom - every).norm() / every.norm()) > 1e-5


@pytest.mark.long
def test_block_momentum_of_nothing_is_averaging_to_the_bit(tmp_path: Path) -> None:
    mean = train("averaging:2", tmp_path / "mean", 8).summary.weights_sha256
    assert train("block-momentum:2:momentum=0:nesterov=true", tmp_path / "none", 8).summary.weights_sha256 == mean
    assert train("block-momentum:2", tmp_path / "more", 8).summary.weights_sha256 != mean


def test_the_filter_follows_the_published_rule() -> None:
    """eta 0.5, zeta 2, G = 1, 1, -2:  D = 2, 3, -2.5   W = 2, 5, 2.5   W_g = 3, 6.5, 1.25"""
    classical, nesterov = torch.zeros(1), torch.zeros(1)
    one, other = UpdateFilter(0.5, 2.0, False), UpdateFilter(0.5, 2.0, True)
    for change, plain, ahead in ((1.0, 2.0, 3.0), (1.0, 5.0, 6.5), (-2.0, 2.5, 1.25)):
        one(0, classical, torch.tensor([change]))
        other(0, nesterov, torch.tensor([change]))
        assert (float(classical), float(nesterov)) == (plain, ahead)


def test_what_is_evaluated_is_what_is_saved_and_evaluating_changes_nothing(tmp_path: Path) -> None:
    """Between two means, where every worker has a model of its own."""
    once = train("averaging:5", tmp_path / "once", 28)  # in the second epoch, three steps after a mean
    alone = api.evaluate(once.run_dir, None, 1)
    assert alone["loss"] == pytest.approx(once.summary.test_loss, rel=1e-6)
    assert alone["accuracy"] == once.summary.accuracy
    seen = train("averaging:7", tmp_path / "seen", 28, checkpoint_every=100)
    blind = train("averaging:7", tmp_path / "blind", 28, checkpoint_every=4)
    assert seen.summary.weights_sha256 == blind.summary.weights_sha256


@pytest.mark.parametrize("turns", [3, pytest.param(11, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["averaging:3", pytest.param("block-momentum:3:momentum=0", marks=pytest.mark.long)])
def test_the_others_go_on_from_the_last_mean_and_no_bit_changes(name: str, turns: int, tmp_path: Path) -> None:
    calm = train(name, tmp_path / "calm", 12, **PLAIN).summary
    hit = train(name, tmp_path / "hit", 12, Mortal(3, Death(2, 7, turns), seed=turns), **PLAIN).summary
    (healed,) = hit.recoveries
    assert healed.source == "survivors"
    assert healed.repeated < 3, "nothing before the last mean is done again"
    assert hit.weights_sha256 == calm.weights_sha256


def test_a_run_resumed_at_a_mean_has_the_bits_of_one_that_was_never_stopped(tmp_path: Path) -> None:
    whole = train("averaging:3", tmp_path / "whole", 12, **PLAIN)
    train("averaging:3", tmp_path / "half", 6, **PLAIN)
    rest = api.resume(tmp_path / "half" / "run", {"steps": 12}, None, None, watcher=api.Watcher(), pool=InMemoryPool(3))
    assert rest.summary.weights_sha256 == whole.summary.weights_sha256


@pytest.mark.long  # quick: the wire of an all-reduce in test_strategies
def test_a_coarse_wire_rounds_changes_and_makes_up_for_it(tmp_path: Path) -> None:
    coarse = train("averaging:2:wire=int8", tmp_path / "coarse", 30).summary
    assert coarse.loss.last < coarse.loss.first / 2
    fine = train("averaging:2", tmp_path / "fine", 30).summary
    assert coarse.bytes_total < 0.3 * fine.bytes_total


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("averaging:0", "tau=0 must be a whole number of at least 1"),
        ("averaging:often", "write averaging:8"),
        ("averaging:tau=-3", "at least 1"),
        ("averaging:algorithm=star", "ring"),
        ("block-momentum:0", "at least 1"),
        ("block-momentum:momentum=1", "at least 0 and below 1"),
        ("block-momentum:momentum=-0.1", "at least 0 and below 1"),
        ("block-momentum:rate=0", "above 0"),
    ],
)
def test_bad_settings_are_refused_with_the_valid_range(name: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        registry.parse(name)
