"""STRADS: sparse regressions end where a reference solver ends, only independent weights move together, few values travel."""

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
from ringtmp.strategies.scheduled.schedule import draw, independent, soft
from test_healing import Death, Mortal
from test_lbfgs import SAMPLES as LBFGS_SAMPLES
from test_lbfgs import objective, reference
from test_lbfgs import run as run_regression

SAMPLES, INPUTS, L1 = 80, 24, 0.1


def problem() -> tuple[torch.Tensor, torch.Tensor]:
    """Few of the inputs matter, and neighbours resemble each other."""
    random = torch.Generator().manual_seed(5)
    inputs = torch.randn(SAMPLES, INPUTS, generator=random)
    inputs[:, 1:] += 0.6 * inputs[:, :-1]
    true = torch.zeros(INPUTS, 1)
    true[[2, 3, 11]] = torch.tensor([[2.0], [-1.5], [1.0]])
    return inputs, inputs @ true + 0.3 + 0.1 * torch.randn(SAMPLES, 1, generator=random)


def run(
    folder: Path, steps: int, nodes: int = 4, name: str = "scheduled:16:l1=0.1:independence=0.2", pool: Any = None
) -> api.Result:
    config = RunConfig(
        training=TrainingPart(data="given", batch_size=SAMPLES, microbatches=4, steps=steps, loss="mse"),
        ring=RingPart(strategy=name, nodes=nodes),
        keep=KeepPart(checkpoint_every=5),
    )
    torch.manual_seed(0)
    data = tensors("t", *problem()), tensors("t", *problem())
    model = nn.Sequential(nn.Linear(INPUTS, 1))
    return api.start(config, model, data, None, run_dir=folder / "run", pool=pool or InMemoryPool(nodes, seed=nodes))


def value(weight: torch.Tensor, bias: torch.Tensor) -> float:
    inputs, targets = problem()
    error = inputs.double() @ weight.double().T + bias.double() - targets
    return float(error.square().mean() + L1 * weight.double().abs().sum())


def lasso() -> tuple[torch.Tensor, torch.Tensor]:
    """Proximal gradient in float64, to the end."""
    inputs, targets = (each.double() for each in problem())
    ones = torch.cat([inputs, torch.ones(SAMPLES, 1).double()], 1)
    rate = SAMPLES / (2 * float(torch.linalg.matrix_norm(ones, 2)) ** 2)
    found = torch.zeros(INPUTS + 1, 1).double()
    for _ in range(20_000):
        found = found - rate * 2 * ones.T @ (ones @ found - targets) / SAMPLES
        found[:-1] = soft(found[:-1], torch.tensor(rate * L1))
    return found[:-1].T, found[-1]


def trained(result: api.Result) -> tuple[torch.Tensor, torch.Tensor]:
    weight, bias = (each.detach() for each in result.model.parameters())
    return weight, bias


def test_lasso_ends_where_a_reference_solver_ends_and_its_zeros_are_zeros(tmp_path: Path) -> None:
    result = run(tmp_path, 150, 3)
    (weight, bias), (best, free) = trained(result), lasso()
    assert value(weight, bias) == pytest.approx(value(best, free), rel=1e-4)
    assert 0 < int((best == 0).sum()) == int((weight == 0).sum())
    assert result.summary.bytes_total == pytest.approx(150 * 4 * 2 * 2 * (2 * 16 + 16 * 16), rel=0.02)


@pytest.mark.parametrize("loss", ["mse", pytest.param("cross_entropy", marks=pytest.mark.long)])
def test_without_a_penalty_it_ends_where_a_reference_solver_ends(loss: str, tmp_path: Path) -> None:
    name = "scheduled:27:independence=0.3:rate=1" if loss == "mse" else "scheduled:27:independence=0.5:rate=1"
    result = run_regression(tmp_path, loss, 3, 60 if loss == "mse" else 300, name)
    assert objective(loss, result.model) == pytest.approx(reference(loss), rel=1e-4)
    assert LBFGS_SAMPLES


def test_steps_are_those_of_coordinate_descent_over_what_is_drawn_and_independent(tmp_path: Path) -> None:
    steps, most = 12, 0.2
    weight, bias = trained(run(tmp_path, steps, 3, f"scheduled:9:l1=0.1:independence={most}"))
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(INPUTS, 1))[0]
    own = torch.cat([first.weight.detach().flatten(), first.bias.detach()]).double()
    inputs, targets = (each.double() for each in problem())
    ones = torch.cat([inputs, torch.ones(SAMPLES, 1).double()], 1)
    gram = ones.T @ ones / SAMPLES
    importance, alone = torch.ones(INPUTS + 1).double(), 0
    for step in range(steps):
        drawn = draw(importance, 9, 0, step)
        norms = gram.diagonal()[drawn].sqrt()
        chosen = drawn[independent(gram[drawn][:, drawn] / (norms[:, None] * norms), most)]
        alone += len(chosen) < 9
        gradient = 2 * ones.T @ (ones @ own - targets.flatten()) / SAMPLES
        stride = 0.5 / gram.diagonal()[chosen]
        after = soft(own[chosen] - stride * gradient[chosen], torch.where(chosen < INPUTS, stride * L1, 0.0))
        importance[chosen] = (after - own[chosen]).abs() + 1e-3
        own[chosen] = after
    assert alone, "nothing was ever held back"
    assert float((torch.cat([weight.flatten(), bias]) - own).norm() / own.norm()) < 1e-5


def test_any_number_of_workers_and_order_of_delivery_does_the_same(tmp_path: Path) -> None:
    three, again = (run(tmp_path / str(seed), 10, 3, pool=InMemoryPool(3, seed=seed)) for seed in (1, 2))
    one = run(tmp_path / "one", 10, 1)
    assert three.summary.weights_sha256 == again.summary.weights_sha256
    for mine, other in zip(trained(one), trained(three), strict=True):
        assert torch.allclose(mine, other, atol=1e-5)


def test_weights_are_drawn_once_each_and_by_their_importance() -> None:
    importance = torch.tensor([1.0, 1.0, 100.0, 1e-9]).double()
    first = [draw(importance, 2, 0, step).tolist() for step in range(200)]
    assert all(len(set(each)) == 2 for each in first)
    assert sum(each[0] == 2 for each in first) > 180
    assert not any(3 in each for each in first)
    assert draw(importance, 9, 0, 1).sort().values.tolist() == [0, 1, 2, 3]
    assert first[:3] == [draw(importance, 2, 0, step).tolist() for step in range(3)]


def test_of_two_that_depend_on_each_other_the_first_drawn_is_kept() -> None:
    cosines = torch.tensor([[1.0, -0.5, 0.05], [-0.5, 1.0, 0.0], [0.05, 0.0, 1.0]])
    assert independent(cosines, 0.1) == [0, 2]
    assert independent(cosines, 0.5) == [0, 1, 2]
    assert independent(cosines, 0.01) == [0]


@pytest.mark.long  # quick: its loss in test_every_strategy
def test_after_a_loss_and_after_a_pause_it_goes_on_from_the_weights_there_are(tmp_path: Path) -> None:
    best = value(*lasso())
    hit = run(tmp_path / "hit", 150, pool=Mortal(4, Death(2, 40)))
    assert [each.source for each in hit.summary.recoveries] == ["survivors"]
    assert hit.summary.recoveries[0].repeated <= 1
    assert value(*trained(hit)) == pytest.approx(best, rel=1e-4)
    run(tmp_path / "half", 20)
    data = tensors("t", *problem()), tensors("t", *problem())
    rest = api.resume(
        tmp_path / "half" / "run", {"steps": 150}, data, None, watcher=api.Watcher(), pool=InMemoryPool(4)
    )
    assert value(*trained(rest)) == pytest.approx(best, rel=1e-4)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("scheduled:0", "candidates=0 must be from 1 to 65536"),
        ("scheduled:few", "write scheduled:32"),
        ("scheduled:2000", "candidates=2000 must be from 1 to 1024 with independence=0.1"),
        ("scheduled:independence=1.5", "independence=1.5 must be from 0 to 1"),
        ("scheduled:l1=-1", "l1=-1 must be a finite number of at least 0"),
        ("scheduled:rate=0", "rate=0 must be above 0 and at most 2"),
        ("scheduled:eta=0", "eta=0 must be a finite number above 0"),
    ],
)
def test_bad_settings_are_refused_with_the_valid_range(name: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        registry.parse(name)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"batch_size": 32}, f"takes the whole data .* use --batch-size {LBFGS_SAMPLES}"),
        ({"wire": "int8"}, "use --wire float32"),
        ({"clip_norm": 1.0}, "--clip-norm needs all gradients"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else None,
)
def test_minibatches_and_what_bends_sums_are_refused_before_the_start(
    given: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=said):
        run_regression(tmp_path, "mse", 3, 5, "scheduled", **given)
    assert not (tmp_path / "run").exists() or "clip_norm" in given


def test_a_layer_that_is_not_linear_is_named_and_refused(tmp_path: Path) -> None:
    config = RunConfig(
        training=TrainingPart(batch_size=1438, microbatches=4, steps=2), ring=RingPart(strategy="scheduled", nodes=3)
    )
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.LayerNorm(8), nn.Linear(8, 10))
    with pytest.raises(UsageError, match=r"layer \S+ has .*\[8\].*train it with another strategy"):
        api.start(config, model, run_dir=tmp_path / "run", pool=InMemoryPool(3))
