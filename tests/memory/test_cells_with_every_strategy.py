"""Modules cut into cells under every strategy: skips and a weight that cells share, on workers that hold the whole model."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

from begun_runs import STEPS, Begun
from installed import importable, install_example
from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.metrics import events
from test_healing import Death, Mortal
from test_strategies import logged, weights

NAMES = ("unet", "tied")
#: Strategies whose sums of gradients are those of the plain loop, added up in another order.
SYNCHRONOUS = ["ps:bsp", "ps:bsp:layerwise", "allreduce:ring", "allreduce:tree", "local-means:1"]
OTHERS = ["ps:async", "ps:ssp:1", "ps:async:workers", "local-means:2"]
SETTINGS: dict[str, dict[str, Any]] = {"ps:bsp:layerwise": {"consistency": "bsp", "fetch": "layerwise"}}
QUICK = {("tied", "ps:bsp:layerwise"), ("unet", "allreduce:ring"), ("tied", "ps:async")}


@pytest.fixture(scope="module", autouse=True)
def example(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with importable(install_example(tmp_path_factory.mktemp("installed"))):
        yield


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cache(lambda name: Begun(tmp_path_factory.mktemp(name), name))


def both(strategies: list[str]) -> Any:
    return pytest.mark.parametrize(
        ("name", "strategy"),
        [
            pytest.param(name, strategy, marks=[] if (name, strategy) in QUICK else [pytest.mark.long])
            for name in NAMES
            for strategy in strategies
        ],
    )


def ring_part(strategy: str) -> dict[str, Any]:
    settings = SETTINGS.get(strategy, {})
    return {"strategy": strategy.partition(":")[0] if settings else strategy, "strategy_settings": settings}


def losses(result: Any) -> list[float]:
    return [each.loss for each in logged(result, events.StepDone)]


@pytest.mark.long
@both(SYNCHRONOUS)
def test_synchronous_strategies_agree_with_the_plain_loop(name: str, strategy: str, begun: Any) -> None:
    here, nodes = begun(name), 2 if strategy == "local-means:1" else 3  # a mean of workers with equal shares
    done = here.run(InMemoryPool(nodes), ring_part(strategy), optimizer="sgd", optimizer_settings={"lr": 0.05})
    plain, expected = here.plain(optimizer=lambda each: torch.optim.SGD(each, lr=0.05))
    assert len(losses(done)) == STEPS
    assert losses(done) == pytest.approx(expected, rel=1e-3)
    wanted = torch.cat([each.detach().flatten() for each in plain.parameters()])
    assert float((weights(done) - wanted).norm() / wanted.norm()) < 1e-3


@both(OTHERS)
def test_other_strategies_learn(name: str, strategy: str, begun: Any) -> None:
    done = begun(name).run(InMemoryPool(3), ring_part(strategy), steps=10)
    found = losses(done)
    assert found[-1] < found[0]


@both(["ps:bsp", "ps:bsp:layerwise", "allreduce:ring"])
def test_they_go_on_after_a_loss(name: str, strategy: str, begun: Any) -> None:
    hit = begun(name).run(Mortal(3, Death(2, 3)), ring_part(strategy))
    assert len(hit.summary.recoveries) == 1
    assert losses(hit)[-1] < losses(hit)[0]
