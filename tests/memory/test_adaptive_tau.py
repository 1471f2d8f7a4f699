"""Averaging with tau=auto: the published rule, one choice for all workers, repeatable where the budget is in bytes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from ringtmp.errors import UsageError
from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.strategies import registry
from ringtmp.strategies.averaging.adaptive_tau import AdaptiveTau, Budget, next_tau, read_budget
from ringtmp.strategies.base import Sizes
from test_every_strategy import NODES, train
from test_healing import Death, Mortal, Ticking
from test_models_between_workers import Watched
from test_strategies import sizes


def test_tau_follows_the_root_of_the_loss_and_halves_where_that_does_not_fall() -> None:
    """ceil(sqrt(F / F_0) 16) for F / F_0 = 1, 0.5, 0.25, 0.25, 0.001; at 16 and at 8 that is no less than tau."""
    assert next_tau(16, 16, 2.0, 2.0) == 8
    assert next_tau(16, 16, 1.0, 2.0) == 12
    assert next_tau(12, 16, 0.5, 2.0) == 8
    assert next_tau(8, 16, 0.5, 2.0) == 4
    assert next_tau(4, 16, 0.002, 2.0) == 1
    assert next_tau(1, 16, 2.0, 2.0) == 1
    assert [next_tau(4, 16, *losses) for losses in ((math.nan, 2.0), (math.inf, 2.0), (2.0, math.inf))] == [2, 2, 2]


@pytest.mark.parametrize(("budget", "chosen"), [(Budget(20.0, True), [4, 2, 2, 1]), (Budget(7.0, False), [4, 4, 2, 2])])
def test_it_is_chosen_at_the_first_mean_after_the_budget_is_spent(budget: Budget, chosen: list[int]) -> None:
    """10 bytes a round, 3 seconds a round: every second round, every third."""
    now = [0.0]
    tau = AdaptiveTau(4, budget, 10.0, 0, lambda: now[0])
    step, found = 0, []
    for _ in chosen:
        while not tau.ends(step):
            tau.loss(1.0)
            step += 1
        step += 1
        now[0] += 3.0
        tau.begun(step, [tau.tell(), tau.tell()])
        found.append(tau.tau)
    assert found == chosen


def members_of(name: str, folder: Path, steps: int, seed: int = 0) -> tuple[Any, Watched]:
    pool = Watched(NODES, seed)
    return train(name, folder, steps, pool), pool


def test_all_workers_choose_the_same_and_a_budget_of_bytes_repeats_its_bits(tmp_path: Path) -> None:
    name = "averaging:auto:budget=200KiB:first=8"
    result, pool = members_of(name, tmp_path / "one", 24)
    lengths = {member._exchange._length.tau for member in pool.members}
    assert len(lengths) == 1
    assert lengths != {8}
    rounds = {member._exchange.rounds for member in pool.members}
    assert len(rounds) == 1
    again = train(name, tmp_path / "again", 24, InMemoryPool(NODES, seed=7))
    assert result.summary.weights_sha256 == again.summary.weights_sha256
    assert result.summary.exactness == "replay"
    # Every mean sends what one of averaging:1 does, and three numbers of each worker. What the last one sends after the last
    # step is in nobody's record.
    averaging, size = registry.get("averaging"), Sizes(sum(sizes(result)), (), 64)
    one_bytes = 4 * averaging.traffic(averaging.read({"tau": 1}), size, NODES).total
    done = rounds.pop()
    assert one_bytes * (done - 1) <= result.summary.bytes_total <= one_bytes * done * 1.02


@pytest.mark.long  # quick: the rule above
def test_a_budget_of_seconds_is_told_by_the_clocks_of_all(tmp_path: Path) -> None:
    strategy = registry.get("averaging")
    assert strategy.exactness(strategy.read({"tau": "auto", "budget": "30s"})) == "steps"
    one, again = (
        train("averaging:auto:budget=2s:first=8", tmp_path / str(n), 20, InMemoryPool(3, 5, clock=Ticking()))
        for n in range(2)
    )
    assert one.summary.weights_sha256 == again.summary.weights_sha256, "a seeded order of delivery and clock replays"


@pytest.mark.long  # quick: averaging:3 in test_steps_of_their_own
def test_the_others_go_on_from_the_last_mean(tmp_path: Path) -> None:
    hit = train("averaging:auto:budget=200KiB:first=8", tmp_path, 40, Mortal(3, Death(2, 20, 3))).summary
    (healed,) = hit.recoveries
    assert healed.source == "survivors"
    assert healed.repeated < 8
    assert hit.steps == 40


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("averaging:auto", "tau=auto needs a number above 0 with s, min, h, KiB, MiB or GiB"),
        ("averaging:auto:budget=0s", "above 0"),
        ("averaging:auto:budget=3weeks", "with s, min, h"),
        ("averaging:auto:budget=1s:first=0", "first=0 must be a whole number of at least 1"),
        ("averaging:4:budget=1s", "tau=4 is fixed: leave them out"),
        ("averaging:tau=often", "tau=often must be a whole number of at least 1, or auto"),
    ],
)
def test_bad_settings_are_refused_with_the_valid_range(name: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        registry.parse(name)


def test_a_budget_is_read_with_its_unit() -> None:
    assert read_budget("1.5min") == Budget(90.0, False)
    assert read_budget("4MiB") == Budget(4 * 1024.0**2, True)
