"""Servers that bound changes instead of steps: `value:D` holds an update back while it would change too much of what another
worker is computing with, `asp:S` sends no parameter that has hardly changed; at 0 both are bsp, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from harness import CONSTANT
from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.strategies.data_parallel.parameter_keys import Key
from ringtmp.strategies.ps.apply_gradients import Gradient, Slot
from ringtmp.wire.messages import Recipe
from test_healing import Death, Mortal
from test_strategies import Case, check_counts, check_promises, train

RECIPE = Recipe(seed=0, threads=1, optimizer="adam", optimizer_settings={"lr": 0.1}, schedule=CONSTANT)


def slot(values: list[float]) -> Slot:
    return Slot(Key(0, 0, 0, len(values)), torch.tensor(values), {}, RECIPE, step=0, workers=(1, 2))


# -- value:D ------------------------------------------------------------------------------------------------------------------


def test_an_update_that_would_go_too_far_changes_nothing_until_the_other_worker_has_read() -> None:
    key = slot([1.0, 2.0])
    push = Gradient(1, 0, 1.0, torch.tensor([1.0, -1.0]))
    assert key.apply_within(push, 0.05), "nobody is computing with the values"  # Adam moves each by 0.1
    key.in_use_by(2)
    before, state = key.values.clone(), {name: each.clone() for name, each in key.state.items()}
    assert not key.apply_within(push, 0.05)
    assert key.values.equal(before)
    assert all(key.state[name].equal(each) for name, each in state.items())
    assert key.applied == 1
    assert key.apply_within(push, 0.15)
    key.used_by(2)
    assert key.apply_within(push, 0.05)


class Watched:
    """What every update left between the values and what other workers were computing with."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.distances: list[float] = []
        self.held = 0
        real = Slot.apply_within

        def apply_within(key: Slot, gradient: Gradient, bound: float) -> bool:
            done = real(key, gradient, bound)
            self.held += not done
            self.distances += [float((key.values - each).abs().max()) for each in key._in_use.values()]
            return done

        patch.setattr(Slot, "apply_within", apply_within)


@pytest.mark.parametrize(
    ("settings", "seed"),
    [({}, 0), ({"servers": 2}, 1), ({"servers": "workers"}, 2)]
    + [pytest.param({"servers": count}, seed, marks=pytest.mark.long) for count in (1, 2, 3) for seed in range(10, 20)],
)
def test_no_parameter_ever_differs_by_more_than_the_bound_from_what_a_worker_computes_with(
    settings: dict[str, Any], seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, case = Watched(monkeypatch), Case("ps", 5, {"consistency": "value:0.0015", **settings})
    result = train(case, tmp_path, seed=seed, steps=20)
    assert result.summary.steps == 20
    assert max(seen.distances) <= 0.0015
    assert seen.held, "the bound never held anything back"
    check_counts(case, result)


def test_a_worker_lost_under_a_value_bound_holds_nobody_back(tmp_path: Path) -> None:
    hit = train(Case("ps", 4, {"consistency": "value:0.0015"}), tmp_path, steps=16, pool=Mortal(4, Death(2, 5))).summary
    assert hit.steps >= 16
    assert [each.source for each in hit.recoveries] == ["servers"]


# -- asp:S --------------------------------------------------------------------------------------------------------------------


def test_only_what_has_changed_enough_since_it_was_sent_is_sent_with_its_places() -> None:
    key = slot([1.0, 1.0, -1.0, 0.0, 1.0])
    whole = key.significant(1, 0.1)
    assert not whole.change
    assert whole.tensors[0].equal(key.values)
    key.values += torch.tensor([0.05, 0.0, -0.2, 0.0, 0.0])
    some = key.significant(1, 0.1)
    assert some.change
    assert [each.tolist() for each in some.tensors] == [[pytest.approx(-1.2)], [2]]
    key.values[0] += 0.06  # the small changes add up
    assert key.significant(1, 0.1).tensors[1].tolist() == [0]
    assert key.significant(1, 0.1).tensors[0].tolist() == []
    assert not key.significant(2, 0.1).change, "another worker has read nothing yet"


class Looking(InMemoryPool):
    """What workers and servers have at the end."""

    def __init__(self, nodes: int, seed: int = 0) -> None:
        super().__init__(nodes, seed)
        self.copies: list[torch.Tensor] = []

    def stop(self) -> None:
        self.copies = [
            torch.cat(worker.member.trainer.replica.values).clone()  # type: ignore[union-attr]
            for worker in self._workers
            if worker.member is not None
        ]
        super().stop()


@pytest.mark.long
def test_every_copy_is_as_near_as_the_threshold_says_with_fewer_bytes_and_the_same_bits_again(tmp_path: Path) -> None:
    case, pool = Case("ps", 4, {"consistency": "asp:0.5"}), Looking(4)
    result = train(case, tmp_path / "one", pool=pool, steps=30)
    final = torch.cat([each.flatten() for each in latest_values(result)])
    assert len(pool.copies) == 3
    for copy in pool.copies:
        assert bool(((final - copy).abs() <= 0.5 * copy.abs() + 1e-12).all())
        assert not copy.equal(final), "nothing was withheld"
    again = train(case, tmp_path / "two", seed=7, steps=30).summary
    assert again.weights_sha256 == result.summary.weights_sha256
    every = train(Case("ps", 4), tmp_path / "every", steps=30).summary
    assert every.bytes_total / 2 < result.summary.bytes_total < 0.9 * every.bytes_total


def latest_values(result: Any) -> list[torch.Tensor]:
    from test_strategies import latest_flat

    return latest_flat(result)


@pytest.mark.long  # the quick ones are above
@pytest.mark.parametrize("text", ["value:0.01", "value:0.1", "asp:0.01", "asp:0.05"])
def test_it_learns_the_digits(text: str, tmp_path: Path) -> None:
    case = Case("ps", 5, {"consistency": text, "servers": 1})
    result = train(case, tmp_path, epochs=9)
    assert result.summary.accuracy is not None
    assert result.summary.accuracy >= 0.95
    if text.startswith("value"):
        check_promises(case, result, 9)
