"""Ensembles: members that learn by themselves, predictions that are made together, runs that are used as one model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ringtmp import api
from ringtmp.data.batches import TrainingBatches
from ringtmp.data.source_registry import load
from ringtmp.errors import UsageError
from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.metrics import events
from ringtmp.model.ensemble import stacking_weights
from ringtmp.run import evaluate_predict_generate
from ringtmp.runtime.checkpoint import latest
from ringtmp.runtime.ensemble_members import weights_of
from ringtmp.strategies.ensemble.combining_leader import CombiningLeader
from test_every_strategy import train
from test_healing import Death, Mortal
from test_strategies import Case, model
from test_strategies import train as train_with

SGD: dict[str, Any] = {"optimizer": "sgd", "optimizer_settings": {"lr": 0.1}}


def data() -> tuple[Any, Any]:
    return load("digits", 0, {})


def members(result: api.Result) -> list[torch.Tensor]:
    return [nn.utils.parameters_to_vector(each.parameters()) for each in result.model.members]


def test_a_member_is_what_a_plain_loop_makes_of_its_samples_alone(tmp_path: Path) -> None:
    found = members(train("ensemble", tmp_path, 6, **SGD))
    batches = TrainingBatches(data()[0], 64, 1, 0)
    for rank, member in enumerate(found):
        torch.manual_seed(0)
        alone = model()
        descent = torch.optim.SGD(alone.parameters(), lr=0.1)
        for step in range(6):
            batch = batches.batch(step)
            assert batch is not None
            assert batch.numbers is not None
            mine = batch.numbers[0] % 3 == rank
            descent.zero_grad()
            nn.functional.cross_entropy(alone(batch.inputs[0][mine]), batch.targets[0][mine]).backward()
            descent.step()
        assert torch.allclose(member, nn.utils.parameters_to_vector(alone.parameters()), atol=1e-5)


@pytest.mark.parametrize("text", ["ensemble:vote:sample=bootstrap", "ensemble:stacking"])
def test_the_run_is_evaluated_and_asked_as_one_model(text: str, tmp_path: Path) -> None:
    result = train(text, tmp_path, 40)
    folder, summary = tmp_path / "run", result.summary
    assert summary.bytes_total == 0, "nothing travels in training"
    again = evaluate_predict_generate.evaluate(folder, None, 1)
    assert again["accuracy"] == summary.accuracy
    assert again["loss"] == pytest.approx(summary.test_loss, rel=1e-5)
    inputs = data()[1].example(40)[0]
    said = evaluate_predict_generate.predict(folder, inputs, 1)
    assert torch.allclose(said, result.model(inputs), atol=1e-5)
    alone = [each(inputs).log_softmax(1) for each in result.model.members]
    assert all(not torch.allclose(said, each, atol=1e-2) for each in alone)
    weights = result.model.weights
    assert (weights.tolist() == [pytest.approx(1 / 3)] * 3) == ("vote" in text)
    assert float(weights.sum()) == pytest.approx(1)


def test_an_ensemble_is_better_than_its_members(tmp_path: Path) -> None:
    result = train("ensemble:sample=bootstrap", tmp_path, 45)
    inputs, targets = data()[1].example(360)
    right = [float((each(inputs).argmax(1) == targets).float().mean()) for each in result.model.members]
    assert result.summary.accuracy is not None
    assert result.summary.accuracy > sum(right) / 3
    assert result.summary.accuracy >= max(right) - 0.01


def test_a_resumed_ensemble_has_the_bits_of_one_that_was_never_stopped(tmp_path: Path) -> None:
    whole = train("ensemble:stacking", tmp_path / "whole", 12)
    train("ensemble:stacking", tmp_path / "half", 6)
    rest = api.resume(tmp_path / "half" / "run", {"steps": 12}, None, None, watcher=api.Watcher(), pool=InMemoryPool(3))
    assert [torch.equal(*each) for each in zip(members(whole), members(rest), strict=True)] == [True] * 3


def test_a_lost_member_is_missing_and_the_others_are_what_they_would_have_been(tmp_path: Path) -> None:
    whole = members(train("ensemble", tmp_path / "whole", 10))
    hit = train("ensemble", tmp_path / "hit", 10, Mortal(3, Death(1, 4)))
    left = members(hit)
    assert len(left) == 2
    assert torch.equal(left[0], whole[0])
    assert torch.equal(left[1], whole[2])
    assert hit.summary.recoveries[0].source == "workers"
    warned = [each.text for each in events.read(tmp_path / "hit/run/events.jsonl") if isinstance(each, events.Warned)]
    assert any("node 1" in each for each in warned)


def test_members_are_whole_if_one_is_lost_while_they_are_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those behind the lost one had its first layers and their own last ones, without a word."""
    whole, pool = members(train("ensemble", tmp_path / "whole", 10)), Mortal(3)
    collect = CombiningLeader._collect

    def lossy(self: CombiningLeader, index: int, wanted: Any, apart: bool) -> None:
        if (index, self._committed) == (2, 10):
            pool.kill(1)
        collect(self, index, wanted, apart)

    monkeypatch.setattr(CombiningLeader, "_collect", lossy)
    left = members(train("ensemble", tmp_path / "hit", 10, pool))
    assert [torch.equal(*each) for each in zip(left, (whole[0], whole[2]), strict=True)] == [True] * 2
    checkpoint, _ = latest(tmp_path / "hit/run/checkpoints")
    assert len([name for name in checkpoint.manifest.files if name.startswith("weights")]) == 2 * len(model())


def test_members_that_have_gone_astray_count_alike() -> None:
    """Fitting their weights ended in a traceback, before the run could say that its loss is no number any more."""
    said = torch.tensor([1e20, -1e20, 5e19])
    assert stacking_weights(lambda weights: (weights * said).square().sum(), 3).tolist() == [pytest.approx(1 / 3)] * 3


def test_with_more_workers_than_members_the_rest_begin_with_a_copy(tmp_path: Path) -> None:
    train("ensemble", tmp_path, 4)
    pool = InMemoryPool(4)
    more = api.resume(tmp_path / "run", {"steps": 8, "nodes": 4}, None, None, watcher=api.Watcher(), pool=pool)
    checkpoint, _ = latest(tmp_path / "run/checkpoints")
    assert weights_of(checkpoint).tolist() == [0.25] * 4  # type: ignore[union-attr]
    assert len({round(float(each.detach().sum()), 6) for each in members(more)}) == 4


def test_a_vote_needs_classes_to_vote_for(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="use combine=mean"):
        train_with(Case("ensemble", 3, {"combine": "vote"}), tmp_path, loss=nn.MultiMarginLoss(), steps=2)


def test_what_needs_one_model_is_refused_by_name(tmp_path: Path) -> None:
    result = train("ensemble", tmp_path, 2)
    with pytest.raises(UsageError, match="an ensemble of 3 models.*`members` are ordinary modules"):
        result.export(tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match="leave --listen out"):
        evaluate_predict_generate.evaluate(tmp_path / "run", None, 1, pool=InMemoryPool(2))


@pytest.mark.parametrize(
    ("text", "given", "said"),
    [
        ("ensemble:wire=int8", {}, "use --wire float32"),
        ("ensemble:median", {}, "combine of strategy ensemble"),
        ("ensemble", {"microbatches": 2}, "microbatches"),
    ],
)
def test_what_cannot_be_combined_is_refused_before_the_start(
    text: str, given: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=said):
        train(text, tmp_path, 2, **given)
