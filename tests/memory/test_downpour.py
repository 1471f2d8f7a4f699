"""Downpour SGD on a parameter server: gradients added up over n_push steps, parameters fetched every n_fetch steps, plain
descent between, AdaGrad on the server, and a start in which one worker is alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ringtmp import api
from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.strategies.data_parallel.leader import DataParallelLeader
from test_healing import Death, Mortal
from test_strategies import Case, sizes, train, weights

PLAIN = {"optimizer": "sgd", "optimizer_settings": {"lr": 0.05}}


@pytest.mark.parametrize(("n_push", "steps"), [(1, 12), (5, 13)])
def test_a_single_worker_that_never_fetches_is_plain_descent(n_push: int, steps: int, tmp_path: Path) -> None:
    """What it pushes adds up to what it has done; a rest that is no multiple of n_push is pushed before the model is saved."""
    settings = {"consistency": "async", "n_push": n_push, "n_fetch": 1000}
    alone = weights(train(Case("ring", 1), tmp_path / "alone", steps=steps, **PLAIN))
    served = weights(train(Case("ps", 2, settings), tmp_path / "served", steps=steps, **PLAIN))
    assert float((served - alone).norm() / alone.norm()) < 1e-6


@pytest.mark.parametrize(("n_push", "n_fetch"), [(4, 2), pytest.param(1, 5, marks=pytest.mark.long)])
def test_it_sends_a_gradient_in_n_push_steps_and_fetches_in_n_fetch(n_push: int, n_fetch: int, tmp_path: Path) -> None:
    case = Case("ps", 4, {"consistency": "async", "n_push": n_push, "n_fetch": n_fetch})
    steps = 40
    result = train(case, tmp_path, steps=steps, optimizer="adagrad", optimizer_settings={"lr": 0.01})
    model = 4 * sum(sizes(result)) * 3  # to and from three workers
    expected = model * (steps / n_push + steps / n_fetch)
    # Beside the formula: one fetch ahead of the end, one for each of two evaluations, and what was left over at the first.
    assert expected * 0.98 <= result.summary.bytes_total <= expected * 1.02 + 4 * model
    assert result.summary.loss.last < 0.7 * result.summary.loss.first, "how well it learns is claimed below"


def test_the_first_steps_of_a_warm_start_are_one_workers_and_the_others_begin_after_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dealt: list[tuple[int, int, float, int]] = []
    counted = [0]
    send, count = DataParallelLeader._send_work, DataParallelLeader._count

    def sent(leader: Any, worker: int, step: int, batch: Any, training: bool, fresh: bool) -> float:
        share = send(leader, worker, step, batch, training, fresh)
        if training:
            dealt.append((step, worker, share, counted[0]))
        return share

    def counts(leader: Any, step: int) -> float:
        counted[0] = step + 1
        return count(leader, step)

    monkeypatch.setattr(DataParallelLeader, "_send_work", sent)
    monkeypatch.setattr(DataParallelLeader, "_count", counts)
    train(Case("ps", 4, {"consistency": "async", "warm_start": 5}), tmp_path, steps=12)
    for step, worker, share, done in dealt:
        if step < 5:
            assert share == (1.0 if worker == 1 else 0.0)
        else:
            assert 0 < share < 0.5
            assert done >= 5, "the others began before the warm start was over"


def test_a_lost_worker_does_not_stop_it_and_a_resumed_run_goes_on(tmp_path: Path) -> None:
    case = Case("ps", 4, {"consistency": "async", "n_push": 3, "n_fetch": 2})
    hit = train(case, tmp_path / "hit", steps=15, pool=Mortal(4, Death(2, 5))).summary
    assert hit.steps >= 15
    assert [each.source for each in hit.recoveries] == ["servers"]
    train(case, tmp_path / "half", steps=7)
    rest = api.resume(tmp_path / "half" / "run", {"steps": 14}, None, None, watcher=api.Watcher(), pool=InMemoryPool(4))
    assert rest.summary.steps == 14


@pytest.mark.long  # the quick ones are above
def test_downpour_with_adagrad_and_a_warm_start_learns_the_digits(tmp_path: Path) -> None:
    case = Case("ps", 6, {"consistency": "async", "servers": 2, "n_push": 2, "n_fetch": 2, "warm_start": 23})
    result = train(case, tmp_path, epochs=12, optimizer="adagrad", optimizer_settings={"lr": 0.03})
    assert result.summary.accuracy is not None
    assert result.summary.accuracy >= 0.93  # 94.2 % was seen; 95 % takes longer
