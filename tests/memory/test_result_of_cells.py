"""What a run of an ordinary module gives back: the user's class, or a module without it; scores and predictions."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch

from begun_runs import BATCH, RATE, Begun
from oracle import RandomByOperator, state_sha256
from ordinary_models import class_loss
from ringtmp import Result, Ring, UsageError
from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.launch.ring_of_processes import LocalPool
from ringtmp.model.portable_model import PortableModel
from ringtmp.run import evaluate_predict_generate

NAMES = ("unet", "tied", "recommender", pytest.param("resnet", marks=pytest.mark.long))


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def trained(name: str) -> tuple[Begun, Result]:
        begun = Begun(tmp_path_factory.mktemp(name), name)
        return begun, begun.run(InMemoryPool(3), steps=2)

    return trained


@pytest.mark.parametrize("name", NAMES)
def test_without_its_class_the_model_computes_the_same_and_has_the_same_names(name: str, done: Any) -> None:
    begun, result = done(name)
    own, other = result.model, Result(result.run_dir).model
    assert type(own) is type(begun.model)
    assert isinstance(other, PortableModel)
    assert list(other.state_dict()) == list(own.state_dict())
    assert state_sha256(other) == state_sha256(own) == result.summary.weights_sha256
    assert [name for name, _ in other.named_parameters()] == [name for name, _ in own.named_parameters()]
    assert not other.training
    assert other(begun.inputs).equal(own(begun.inputs))
    own.load_state_dict(other.state_dict())
    other.load_state_dict(own.state_dict())
    assert "cell" in str(other)


@pytest.mark.parametrize("name", NAMES)
def test_without_its_class_the_model_trains_on_as_the_users_would(name: str, done: Any) -> None:
    """Dropout, statistics and a weight with two names included; a copy of it is a model of its own."""
    begun, result = done(name)
    own, other = (copy.deepcopy(each.model).train() for each in (result, Result(result.run_dir)))
    for each in (own, other):
        updates = torch.optim.AdamW(each.parameters(), lr=RATE)
        with RandomByOperator(0, 0, 0):
            loss = class_loss(each(begun.inputs), begun.targets)
        loss.backward()
        updates.step()
    assert state_sha256(other) == state_sha256(own) != result.summary.weights_sha256


def test_inputs_that_the_model_does_not_take_are_refused(done: Any) -> None:
    model = Result(done("recommender")[1].run_dir).model
    dense, categories = done("recommender")[0].inputs
    assert model(dense, categories).equal(model((dense, categories)))
    with pytest.raises(UsageError, match="takes 2 tensors, and the call has 1"):
        model(dense)


@pytest.mark.parametrize("name", [pytest.param("unet", marks=pytest.mark.long), "tied"])
def test_evaluate_and_predict_are_the_models_own(name: str, done: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        evaluate_predict_generate,
        "processes_here",
        lambda nodes, threads, *_rest, **_more: InMemoryPool(nodes, threads=threads),
    )
    begun, result = done(name)
    inputs, targets = begun.inputs[:BATCH], begun.targets[:BATCH]
    with torch.no_grad():
        expected = torch.cat([result.model(each[None]) for each in inputs])  # as microbatches: one sample each
    for nodes in (1, 3):
        assert Ring(nodes=nodes).predict(result.run_dir, inputs).equal(expected)
        score = Ring(nodes=nodes).evaluate(result.run_dir, (inputs, targets))
        assert score["loss"] == pytest.approx(float(class_loss(expected, targets)), rel=1e-5)


def test_more_nodes_than_layers_are_refused_before_anybody_is_started(
    done: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalPool, "start", lambda *args: pytest.fail("started"))
    with pytest.raises(UsageError, match="nodes need at least"):
        Ring(nodes=50).predict(done("tied")[1].run_dir, torch.zeros(2, 4, dtype=torch.int64))
