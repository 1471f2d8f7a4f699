"""GADMM: convex problems end where a reference solver ends, workers agree, and the steps are those of the paper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ringtmp import api
from ringtmp.data.tables_and_streams import tensors
from ringtmp.errors import UsageError
from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.strategies import registry
from ringtmp.strategies.data_parallel import replica
from test_healing import Death, Mortal, Ticking
from test_lbfgs import INPUTS, SAMPLES, objective, problem, reference, run
from test_models_between_workers import Watched, spread

OUTPUTS = 3


def by_hand(workers: int, steps: int, rho: float) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Linear regression by the paper's listing with exact minima, in float64: every worker's model before and after the
    last step."""
    torch.manual_seed(0)
    start = torch.nn.Sequential(torch.nn.Linear(INPUTS, OUTPUTS))[0]
    theta0 = torch.cat([start.weight.detach().T, start.bias.detach()[None]]).double()
    inputs, targets = problem("mse")
    ones = torch.cat([inputs, torch.ones(SAMPLES, 1)], 1).double()
    parts = [torch.arange(SAMPLES) % workers == rank for rank in range(workers)]
    scale = 2 / (SAMPLES * OUTPUTS)
    theta = [theta0.clone() for _ in range(workers)]
    duals = [torch.zeros_like(theta0) for _ in range(workers - 1)]
    before = theta
    for _ in range(steps):
        before = [each.clone() for each in theta]
        for group in (0, 1):
            for n in range(group, workers, 2):
                matrix = scale * ones[parts[n]].T @ ones[parts[n]]
                right = scale * ones[parts[n]].T @ targets[parts[n]].double()
                if n > 0:
                    matrix, right = matrix + rho * torch.eye(INPUTS + 1), right + duals[n - 1] + rho * theta[n - 1]
                if n < workers - 1:
                    matrix, right = matrix + rho * torch.eye(INPUTS + 1), right - duals[n] + rho * theta[n + 1]
                theta[n] = torch.linalg.solve(matrix, right)
        for n in range(workers - 1):
            duals[n] = duals[n] + rho * (theta[n] - theta[n + 1])
    return before, theta


@pytest.mark.parametrize(
    "workers", [pytest.param(2, marks=pytest.mark.long), 4, pytest.param(5, marks=pytest.mark.long)]
)
def test_every_worker_takes_the_steps_of_the_paper(workers: int, tmp_path: Path) -> None:
    pool = Watched(workers)
    run(tmp_path, "mse", workers, 6, "gadmm:0.1:tolerance=1e-6:passes=60", pool, microbatches=8)
    before, wanted = by_hand(workers, 6, 0.1)
    for rank, member in enumerate(pool.members, start=1):  # the master is not in the pool
        (layout,), (found,) = member.trainer.replica.layouts, member.trainer.replica.values
        flat, old = (replica.flatten(layout, [each[rank][:-1].T, each[rank][-1]]).double() for each in (wanted, before))
        off = float((found - flat).norm() / flat.norm())
        assert off < 1e-4
        assert off < 0.05 * float((old - flat).norm() / flat.norm()), "a step that moves nothing would pass"


@pytest.mark.parametrize(
    ("loss", "workers"), [("mse", 4), ("cross_entropy", 4), pytest.param("mse", 7, marks=pytest.mark.long)]
)
def test_a_regression_ends_where_a_reference_solver_ends_and_all_agree(loss: str, workers: int, tmp_path: Path) -> None:
    pool = Watched(workers)
    result = run(tmp_path, loss, workers, 60, "gadmm" if loss == "mse" else "gadmm:0.05", pool, microbatches=8)
    assert objective(loss, result.model) == pytest.approx(reference(loss), rel=1e-4)
    assert spread(pool.models) < 1e-2
    values = pool.models[0].numel()
    assert result.summary.bytes_total == pytest.approx(60 * 2 * (workers - 1) * 4 * values, rel=0.02)


def test_the_order_of_delivery_changes_no_bit(tmp_path: Path) -> None:
    one, other = (
        run(tmp_path / str(seed), "mse", 3, 8, "gadmm", InMemoryPool(3, seed, clock=Ticking())).summary.weights_sha256
        for seed in (5, 6)
    )
    assert one == other


def test_one_worker_alone_finds_the_minimum_in_its_first_step(tmp_path: Path) -> None:
    result = run(tmp_path, "mse", 1, 1, "gadmm:passes=100:tolerance=1e-6")
    assert objective("mse", result.model) == pytest.approx(reference("mse"), rel=1e-5)


@pytest.mark.long  # quick: its loss in test_every_strategy
def test_after_a_loss_and_after_a_pause_it_goes_on_with_a_new_chain_and_no_duals(tmp_path: Path) -> None:
    hit = run(tmp_path / "hit", "mse", 4, 80, "gadmm", Mortal(4, Death(2, 12)))
    assert [each.source for each in hit.summary.recoveries] == ["checkpoint"]
    assert objective("mse", hit.model) == pytest.approx(reference("mse"), rel=1e-4)
    run(tmp_path / "half", "mse", 3, 6, "gadmm")
    data = tensors("t", *problem("mse")), tensors("t", *problem("mse"))
    rest = api.resume(tmp_path / "half" / "run", {"steps": 60}, data, None, watcher=api.Watcher(), pool=InMemoryPool(3))
    assert objective("mse", rest.model) == pytest.approx(reference("mse"), rel=1e-4)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gadmm:0", "rho=0 must be a finite number above 0"),
        ("gadmm:rho=-1", "rho=-1 must be"),
        ("gadmm:inf", "rho=inf must be"),
        ("gadmm:hard", "write gadmm:0.2"),
        ("gadmm:passes=0", "passes=0 must be from 1 to 1000"),
        ("gadmm:tolerance=1", "tolerance=1 must be above 0 and below 1"),
    ],
)
def test_bad_settings_are_refused_with_the_valid_range(name: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        registry.parse(name)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"batch_size": 32}, f"takes the whole data .* use --batch-size {SAMPLES}"),
        ({"microbatches": 2}, "2 microbatches cannot feed 3 workers: use --microbatches 3 or more"),
        ({"wire": "int8"}, "use --wire float32"),
        ({"clip_norm": 1.0}, "--clip-norm bends the gradients"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else None,
)
def test_minibatches_empty_shards_and_what_bends_gradients_are_refused_before_the_start(
    given: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=said):
        run(tmp_path, "mse", 3, 5, "gadmm", **given)
