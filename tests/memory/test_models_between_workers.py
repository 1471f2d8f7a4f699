"""Workers that send each other models: limits of the published rules, sums of weights, replays, losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ringtmp import api
from ringtmp.data import source_registry
from ringtmp.data.batches import TrainingBatches
from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.strategies.data_parallel import replica
from ringtmp.strategies.data_parallel.peers import PeerMember
from ringtmp.strategies.gosgd.gossip import Gossip, merge
from test_every_strategy import train
from test_healing import Death, Mortal, Ticking
from test_strategies import model, weights

#: Plain descent for four steps, and then none at all.
THEN_STILL: dict[str, Any] = {
    "optimizer": "sgd", "optimizer_settings": {"lr": 0.05}, "batch_size": 60,
    "lr_schedule": {"kind": "step", "every": 4, "factor": 0.0},
}  # fmt: skip


class Watched(InMemoryPool):
    """Looks at every worker's member before they stop."""

    def __init__(self, nodes: int, seed: int = 0) -> None:
        super().__init__(nodes, seed)
        self.members: list[Any] = []

    def stop(self) -> None:
        self.members += [worker.member for worker in self._workers]
        super().stop()

    @property
    def models(self) -> list[torch.Tensor]:
        found = []
        for member in self.members:
            member.trainer.replica.take_back()
            found.append(torch.cat(member.trainer.replica.values).clone())
        return found


def spread(models: list[torch.Tensor]) -> float:
    """How far workers are from each other, relative to their size."""
    return max(float((one - models[0]).norm() / models[0].norm()) for one in models)


def test_on_a_complete_graph_all_have_the_mean_one_step_after_the_last_that_moved(tmp_path: Path) -> None:
    moving, still = Watched(3), Watched(3)
    before = weights(train("dpsgd:complete", tmp_path / "moving", 4, moving, **THEN_STILL))
    after = weights(train("dpsgd:complete", tmp_path / "still", 5, still, **THEN_STILL))
    assert spread(moving.models) > 1e-4
    assert spread(still.models) < 1e-6
    assert float((after - before).norm() / before.norm()) < 1e-6, "what is saved is the mean"


def test_its_mean_model_moves_by_the_rate_times_the_mean_gradient(tmp_path: Path) -> None:
    """In the first step all have the same model: one step of D-PSGD moves the mean as all-reduce would."""
    plain = {**THEN_STILL, "lr_schedule": {}}
    mean = weights(train("dpsgd", tmp_path / "mean", 1, **plain))
    summed = weights(train("allreduce", tmp_path / "sum", 1, **plain))
    assert float((mean - summed).norm() / summed.norm()) < 1e-6


def test_every_worker_follows_the_published_rule_of_dpsgd_with_weights_of_a_path(tmp_path: Path) -> None:
    """w_i <- sum over j of W_ij w_j - rate g(w_i), as a plain loop; so the mean moves by the rate times the mean gradient,
    where workers differ too."""
    plain: dict[str, Any] = {"optimizer": "sgd", "optimizer_settings": {"lr": 0.05}, "batch_size": 60}
    pool = Watched(3)
    mean = weights(train("dpsgd:0-1+1-2", tmp_path, 6, pool, **plain))
    torch.manual_seed(0)
    each = torch.cat([one.detach().flatten() for one in model().parameters()])
    models, mixing = [each.clone() for _ in range(3)], torch.tensor([[2, 1, 0], [1, 1, 1], [0, 1, 2]]) / 3
    source, _ = source_registry.load("digits", 0, {})
    batches = TrainingBatches(source, 60, 6, 0)
    for step in range(6):
        batch = batches.batch(step)
        assert batch is not None
        gradients = []
        for rank, flat in enumerate(models):
            mine, own = slice(2 * rank, 2 * rank + 2), model()
            nn.utils.vector_to_parameters(flat, own.parameters())
            inputs, targets = torch.cat(batch.inputs[mine]), torch.cat(batch.targets[mine])
            nn.functional.cross_entropy(own(inputs), targets).backward()
            gradients.append(torch.cat([one.grad.flatten() for one in own.parameters() if one.grad is not None]))
        before = torch.stack(models)
        models = list(mixing @ before - 0.05 * torch.stack(gradients))
    assert spread(models) > 1e-3
    assert float((mean - torch.stack(models).mean(0)).norm() / mean.norm()) < 1e-5
    for member in pool.members:
        wanted, own = models[member.endpoint.node], model()
        nn.utils.vector_to_parameters(wanted, own.parameters())
        for index, layout in enumerate(member.trainer.replica.layouts):
            vector = replica.flatten(layout, list(own[index].parameters()))
            assert torch.allclose(member.trainer.replica.values[index], vector, atol=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        "gosgd:1",
        *(pytest.param(each, marks=pytest.mark.long) for each in ("dpsgd", "tree-easgd:1", "gossip-learning")),
    ],
)
def test_without_a_learning_rate_all_come_to_be_one(name: str, tmp_path: Path) -> None:
    moving, still = Watched(3), Watched(3)
    train(name, tmp_path / "moving", 4, moving, **THEN_STILL)
    train(name, tmp_path / "still", 60, still, **THEN_STILL)
    assert spread(still.models) < 0.01 * spread(moving.models)


def test_weights_of_gossip_add_up_to_one_with_those_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Gossip] = []
    under_way = [0.0]
    begin, arrive, send = Gossip.__init__, Gossip.arrived, PeerMember._send

    def beginning(self: Gossip, *given: Any, **named: Any) -> None:
        begin(self, *given, **named)
        made.append(self)

    def sending(self: PeerMember, peer: int, step: int, weight: float, model: Any) -> None:
        under_way[0] += weight
        send(self, peer, step, weight, model)

    def arriving(self: Gossip, sender: int, step: int, weight: float, model: Any) -> None:
        under_way[0] -= weight
        arrive(self, sender, step, weight, model)

    monkeypatch.setattr(Gossip, "__init__", beginning)
    monkeypatch.setattr(Gossip, "arrived", arriving)
    monkeypatch.setattr(PeerMember, "_send", sending)
    train("gosgd:0.7", tmp_path, 20)
    assert len(made) == 3
    assert sum(each.weight for each in made) + under_way[0] == pytest.approx(1.0, abs=1e-12)
    assert len({round(each.weight, 6) for each in made}) > 1, "nobody gossiped"


def test_merging_is_the_weighted_mean_and_adds_the_weights() -> None:
    mine, other = [torch.tensor([1.0, 3.0])], [torch.tensor([5.0, -1.0])]
    assert merge(mine, 0.75, other, 0.25) == 1.0
    assert mine[0].tolist() == [2.0, 2.0]


def test_an_elastic_force_of_nothing_leaves_every_worker_alone(tmp_path: Path) -> None:
    """Each worker's model is that of a plain loop over its own shares; the centre stays where it was."""
    plain: dict[str, Any] = {"optimizer": "sgd", "optimizer_settings": {"lr": 0.05}, "batch_size": 60}
    seldom, often, pulled = Watched(3), Watched(3), Watched(3)
    result = train("easgd:3:alpha=0", tmp_path / "seldom", 6, seldom, **plain)
    train("easgd:1:alpha=0", tmp_path / "often", 6, often, **plain)
    train("easgd:3", tmp_path / "pulled", 6, pulled, **plain)
    assert [torch.equal(one, two) for one, two in zip(seldom.models, often.models, strict=True)] == [True, True]
    assert spread(seldom.models) > 1e-4
    assert not torch.equal(seldom.models[0], pulled.models[0])
    torch.manual_seed(0)
    assert torch.equal(weights(result), torch.cat([each.detach().flatten() for each in model().parameters()]))
    for member in seldom.members:
        own = alone(member.endpoint.node - 1, 6)
        for layer, layout in enumerate(member.trainer.replica.layouts):
            vector = replica.flatten(layout, list(own[layer].parameters()))
            assert torch.allclose(member.trainer.replica.values[layer], vector, atol=1e-5)


def alone(rank: int, steps: int) -> nn.Sequential:
    """What one of two workers does by itself, as a plain loop: three of a batch's six microbatches."""
    torch.manual_seed(0)
    own = model()
    source, _ = source_registry.load("digits", 0, {})
    batches = TrainingBatches(source, 60, 6, 0)
    descent = torch.optim.SGD(own.parameters(), lr=0.05)
    for step in range(steps):
        batch = batches.batch(step)
        assert batch is not None
        mine = slice(3 * rank, 3 * rank + 3)
        inputs, targets = torch.cat(batch.inputs[mine]), torch.cat(batch.targets[mine])
        descent.zero_grad()
        nn.functional.cross_entropy(own(inputs), targets).backward()
        descent.step()
    return own


@pytest.mark.parametrize(
    "name",
    [
        "easgd:2",
        "dpsgd",
        *(pytest.param(each, marks=pytest.mark.long) for each in ("gosgd:0.5", "tree-easgd:2", "gossip-learning")),
        *(
            pytest.param(each, marks=pytest.mark.long)
            for each in ("ps:async", "ps:ssp:2", "ps:async:n_push=2:n_fetch=2")
        ),
    ],
)
def test_a_seeded_order_of_delivery_replays_exactly(name: str, tmp_path: Path) -> None:
    one, again, other = (
        train(name, tmp_path / str(number), 10, InMemoryPool(3, seed, clock=Ticking())).summary.weights_sha256
        for number, seed in enumerate((5, 5, 6))
    )
    assert one == again
    assert (one == other) == (name == "dpsgd"), "who waits for whom decides whether order matters"


@pytest.mark.parametrize("turns", [3, pytest.param(12, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "name",
    [
        "easgd:2",
        "tree-easgd:2",
        *(pytest.param(each, marks=pytest.mark.long) for each in ("gosgd:1", "dpsgd", "gossip-learning")),
    ],
)  # all of them, more briefly, in test_every_strategy
def test_the_others_go_on_at_once_when_a_worker_is_lost(name: str, turns: int, tmp_path: Path) -> None:
    hit = train(name, tmp_path, 45, Mortal(3, Death(2, 4, turns), seed=turns)).summary
    (healed,) = hit.recoveries
    assert (healed.source, healed.repeated, healed.generation) == (
        "servers" if "easgd:" in name[:6] else "workers",
        0,
        1,
    )
    assert hit.steps == 45
    assert hit.loss.last < hit.loss.first / 1.5


@pytest.mark.long  # quick: a ring bears the loss of one, in test_graphs_of_workers
def test_where_the_rest_of_a_graph_falls_apart_all_go_back_to_the_checkpoint_and_form_it_anew(tmp_path: Path) -> None:
    hit = train("dpsgd:0-2+2-1", tmp_path, 12, Mortal(3, Death(2, 6)), checkpoint_every=4).summary
    (healed,) = hit.recoveries
    assert (healed.source, healed.generation) == ("checkpoint", 2)
    assert hit.steps == 12


@pytest.mark.parametrize("name", ["easgd:2", "gosgd:0.5", "tree-easgd:2", "dpsgd", "gossip-learning"])
@pytest.mark.long  # that of averaging is quick, in test_steps_of_their_own
def test_a_stopped_run_goes_on_from_its_checkpoint(name: str, tmp_path: Path) -> None:
    half = train(name, tmp_path, 15).summary
    rest = api.resume(tmp_path / "run", {"steps": 30}, None, None, watcher=api.Watcher(), pool=InMemoryPool(3))
    assert rest.summary.steps == 30
    assert rest.summary.test_loss < half.test_loss
