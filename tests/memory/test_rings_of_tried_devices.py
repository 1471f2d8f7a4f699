"""Rings whose devices are tried before they are planned, in memory: trials, losses and healings in every order."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.metrics import events
from ringtmp.metrics.events import LineTried, NodeStep
from ringtmp.plan.memory_forecast import PROCESS_BYTES
from ringtmp.run.members_and_plan import Generations
from ringtmp.strategies.ring import device_trials
from ringtmp.wire.messages import Timed
from test_healing import STEPS, Death, Mortal, run
from test_unreachable_neighbours import Split


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """How fast a device is, is not what these are about, and the clocks here know no haste."""
    monkeypatch.setattr(device_trials, "timed", lambda sample, frozen_bytes: Timed(0.01, PROCESS_BYTES, 2**40))
    monkeypatch.setattr(device_trials, "ALL_LINES_S", 1000.0)
    monkeypatch.setattr("ringtmp.strategies.ring.link_trials.LINES_S", 1000.0)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str | None:
    return run(tmp_path_factory.mktemp("calm") / "run", InMemoryPool(4)).summary.weights_sha256


class Strangers(Mortal):
    same_machine = False


class Far(Split):
    same_machine = False


def lines(folder: Path) -> list[LineTried]:
    return [each for each in events.read(folder / "events.jsonl") if isinstance(each, LineTried)]


@pytest.mark.parametrize(
    "deaths",
    [
        (),
        pytest.param((Death(2, 3, 5),), marks=pytest.mark.long),
        pytest.param((Death(1, 3, 0), Death(3, 7, 2)), marks=pytest.mark.long),
        (Death(3, 5), Death(2, 0, 0, 2), Death(1, 0, 3, 3)),  # while it heals
        (Death(2, 0, 3), Death(2, 4, 1, 2), Death(2, 8, 1, 3)),
    ],
    ids=["calm", "one", "two", "while it heals", "the same again and again"],
)
@pytest.mark.parametrize("again", [False, True], ids=["once", "tried again"])
def test_nodes_that_met_and_died_leave_the_bits_as_they_are(
    deaths: tuple[Death, ...], again: bool, tmp_path: Path, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if again:  # as if somebody had come each time whom nobody knows
        nothing = property(lambda laying: None, lambda laying, request: None)
        monkeypatch.setattr(Generations, "_known", nothing, raising=False)
    hit = run(tmp_path / "run", Strangers(4, *deaths, seed=again))
    assert hit.summary.weights_sha256 == expected
    tried = lines(tmp_path / "run")
    assert {(each.source, each.target) for each in tried} >= {(0, 1), (0, 2), (0, 3)}
    assert {frozenset((each.source, each.target)) for each in tried if each.source} >= {
        frozenset((1, 2)),
        frozenset((2, 3)),
    }
    times = sum((each.source, each.target) == (0, 1) for each in tried)
    assert times > 1 if again and deaths else times == 1
    log = events.read(tmp_path / "run" / "events.jsonl")
    last = {each.node for each in log if isinstance(each, NodeStep) and each.step == STEPS - 1}
    assert last == {0, 1, 2, 3}, "everyone is heard to the end"


@pytest.mark.parametrize("pair", [(1, 2), (1, 3)], ids=["neighbours", "others"])
def test_two_that_cannot_reach_each_other_are_silent_and_the_ring_trains_all_the_same(
    pair: tuple[int, int], tmp_path: Path, expected: str
) -> None:
    hit = run(tmp_path / "run", Far(4, 0, {pair, pair[::-1]}))
    assert hit.summary.weights_sha256 == expected
    rates = [each.there_bytes_per_s for each in lines(tmp_path / "run") if (each.source, each.target) == pair]
    assert rates == ([0.0] if pair == (1, 2) else []), "in a given order only neighbours are tried"
    reasons = [each.reason for each in hit.summary.recoveries]
    assert len(reasons) == (pair == (1, 2)), reasons
    assert all("cannot reach each other" in each for each in reasons)
