"""L-BFGS over workers: regressions end where a reference solver ends, whatever the number of workers, and minibatches are
refused."""

from __future__ import annotations

import math
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
from ringtmp.strategies.base import Sizes
from test_healing import Death, Mortal

SAMPLES, INPUTS = 96, 8


def problem(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    inputs = torch.randn(SAMPLES, INPUTS, generator=random)
    wanted = inputs @ torch.randn(INPUTS, 3, generator=random) + torch.randn(SAMPLES, 3, generator=random)
    # Some labels are of chance, so that no weights are right about all of them and the best ones are finite.
    chance = torch.randint(3, (SAMPLES,), generator=random)
    return inputs, wanted if kind == "mse" else torch.where(torch.arange(SAMPLES) % 3 == 0, chance, wanted.argmax(1))


def run(
    folder: Path,
    loss: str,
    nodes: int,
    steps: int,
    strategy: str = "lbfgs",
    pool: InMemoryPool | None = None,
    **given: Any,
) -> api.Result:
    part = {"data": "given", "batch_size": SAMPLES, "microbatches": 4, "steps": steps, "loss": loss, **given}
    config = RunConfig(
        training=TrainingPart(**part), ring=RingPart(strategy=strategy, nodes=nodes), keep=KeepPart(checkpoint_every=5)
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(INPUTS, 3))
    data = tensors("t", *problem(loss)), tensors("t", *problem(loss))
    return api.start(config, model, data, None, run_dir=folder / "run", pool=pool or InMemoryPool(nodes, seed=nodes))


def objective(loss: str, model: Any) -> float:
    inputs, targets = problem(loss)
    found = nn.functional.mse_loss if loss == "mse" else nn.functional.cross_entropy
    with torch.no_grad():
        return float(found(model(inputs).double(), targets.double() if loss == "mse" else targets))


def reference(loss: str) -> float:
    """torch's own L-BFGS in float64, to the end."""
    inputs, targets = problem(loss)
    inputs = inputs.double()
    if loss == "mse":
        ones = torch.cat([inputs, torch.ones(SAMPLES, 1).double()], 1)
        best = torch.linalg.lstsq(ones, targets.double()).solution
        return float(((ones @ best - targets) ** 2).mean())
    model = nn.Linear(INPUTS, 3).double()
    solver = torch.optim.LBFGS(
        model.parameters(), max_iter=2000, tolerance_grad=1e-10, tolerance_change=1e-14, line_search_fn="strong_wolfe"
    )

    def closure() -> torch.Tensor:
        solver.zero_grad()
        value = nn.functional.cross_entropy(model(inputs), targets)
        value.backward()
        return value

    solver.step(closure)
    return float(closure().detach())


@pytest.mark.parametrize(("loss", "steps"), [("mse", 40), ("cross_entropy", 120)])
def test_a_regression_ends_where_a_reference_solver_ends(loss: str, steps: int, tmp_path: Path) -> None:
    result = run(tmp_path, loss, 4, steps)
    best = reference(loss)
    assert objective(loss, result.model) == pytest.approx(best, rel=1e-4)
    strategy = registry.get("lbfgs")
    a_step = strategy.traffic(strategy.read({}), Sizes(3 * (INPUTS + 1), (), SAMPLES), 4).total
    assert result.summary.bytes_total == pytest.approx(4 * a_step * steps, rel=0.02)


def test_a_quadratic_takes_no_more_steps_than_the_textbook_says(tmp_path: Path) -> None:
    """Three outputs of nine unknowns each share one second derivative of nine eigenvalues, so nine iterations of two
    gradients suffice, with an exact line search."""
    result = run(tmp_path, "mse", 3, 2 * (INPUTS + 1) + 1, "lbfgs:20:curvature=1e-5")
    assert objective("mse", result.model) == pytest.approx(reference("mse"), rel=1e-5)


def test_three_workers_repeat_their_bits_and_agree_with_one(tmp_path: Path) -> None:
    one, three = (run(tmp_path / str(nodes), "cross_entropy", nodes, 15) for nodes in (1, 3))
    again = run(tmp_path / "again", "cross_entropy", 3, 15, pool=InMemoryPool(3, seed=9))
    assert three.summary.weights_sha256 == again.summary.weights_sha256
    assert objective("cross_entropy", one.model) == pytest.approx(objective("cross_entropy", three.model), rel=1e-3)


@pytest.mark.long
def test_after_a_loss_and_after_a_pause_it_goes_on_with_an_empty_history(tmp_path: Path) -> None:
    hit = run(tmp_path / "hit", "mse", 3, 40, pool=Mortal(3, Death(2, 12)))
    assert [each.source for each in hit.summary.recoveries] == ["checkpoint"]
    assert objective("mse", hit.model) == pytest.approx(reference("mse"), rel=1e-4)
    run(tmp_path / "half", "mse", 3, 6)
    data = tensors("t", *problem("mse")), tensors("t", *problem("mse"))
    rest = api.resume(tmp_path / "half" / "run", {"steps": 40}, data, None, watcher=api.Watcher(), pool=InMemoryPool(3))
    assert objective("mse", rest.model) == pytest.approx(reference("mse"), rel=1e-4)


def test_minibatches_and_what_bends_gradients_are_refused_before_the_start(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=f"takes the whole data .* --batch-size 32 is a part of t: use --batch-size {SAMPLES}"
    ):
        run(tmp_path, "mse", 3, 5, batch_size=32)
    assert not (tmp_path / "run").exists()
    with pytest.raises(UsageError, match="lbfgs sends differences of gradients"):
        run(tmp_path, "mse", 3, 5, wire="int8")
    with pytest.raises(UsageError, match="--clip-norm bends the gradients"):
        run(tmp_path, "mse", 3, 5, clip_norm=1.0)
    assert math.isfinite(reference("mse"))
