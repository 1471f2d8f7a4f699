"""HybComm: factors give the gradients of the whole batch, and no layer sends more than the better of its two ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ringtmp import api
from ringtmp.config import RingPart, RunConfig, TrainingPart
from ringtmp.data import source_registry
from ringtmp.data.batches import TrainingBatches
from ringtmp.errors import ProtocolError, UsageError
from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.strategies import registry
from ringtmp.strategies.base import Sizes
from ringtmp.strategies.hybcomm.choose_way import MOST_VALUES, by_factors, factor_values, server_values, with_samples
from ringtmp.strategies.hybcomm.member import HybCommMember
from ringtmp.wire.messages import Enlist, Factors, GradientPart, Message
from test_every_strategy import LINEAR, train
from test_strategies import model, sizes, weights
from test_who_may_send_what import NEAR, RECIPE, at

PLAIN: dict[str, Any] = {"optimizer": "sgd", "optimizer_settings": {"lr": 0.05}, "batch_size": 60}
NODES = 3


def by_hand(steps: int) -> torch.Tensor:
    """Plain descent whose gradients are products of what all microbatches together brought."""
    torch.manual_seed(0)
    shape = model()
    source, _ = source_registry.load("digits", 0, {})
    batches = TrainingBatches(source, 60, 6, 0)
    linear = [each for each in shape if isinstance(each, nn.Linear)]
    descent = torch.optim.SGD(shape.parameters(), lr=0.05, fused=True)
    for step in range(steps):
        batch = batches.batch(step)
        assert batch is not None
        caught: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {
            number: ([], []) for number in range(len(linear))
        }
        for inputs, targets in zip(batch.inputs, batch.targets, strict=True):
            x, left = inputs.flatten(1), []
            for each in shape[1:]:
                if isinstance(each, nn.Linear):
                    caught[linear.index(each)][0].append(x.detach())
                x = each(x)
                if isinstance(each, nn.Linear):
                    left.append(x)
            loss = nn.functional.cross_entropy(x, targets) * (len(targets) / batch.samples)
            for number, error in enumerate(torch.autograd.grad(loss, left)):
                caught[number][1].append(error)
        for number, each in enumerate(linear):
            rows, errors = torch.cat(caught[number][0]), torch.cat(caught[number][1])
            each.weight.grad, each.bias.grad = errors.t().mm(rows), errors.sum(0)
        descent.step()
    return torch.cat([each.detach().flatten() for each in shape.parameters()])


def test_factors_give_the_bits_of_a_plain_loop_over_all_rows(tmp_path: Path) -> None:
    found = weights(train("hybcomm:factors", tmp_path, 7, **PLAIN))
    assert torch.equal(found, by_hand(7))


def test_either_way_and_both_end_where_all_reduce_does(tmp_path: Path) -> None:
    given = {"clip_norm": 0.5, "batch_size": 64}
    wanted = weights(train("allreduce", tmp_path / "sum", 6, **given))
    for way in ("auto", "factors", "server"):
        found = weights(train(f"hybcomm:{way}", tmp_path / way, 6, **given))
        assert float((found - wanted).norm() / wanted.norm()) < 1e-5, way


#: By step and layer: bytes that all workers sent.
Sent = dict[tuple[int, int], int]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    found: Sent = {}
    send = HybCommMember._send

    def counted(self: HybCommMember, peer: int, message: Any, tensors: Any) -> None:
        group = self._exchange.groups[message.bucket] if isinstance(message, GradientPart) else (message.layer,)
        key = message.step, group[0]
        found[key] = found.get(key, 0) + sum(each.nbytes for each in tensors)
        send(self, peer, message, tensors)

    monkeypatch.setattr(HybCommMember, "_send", counted)
    return found


def test_no_layer_sends_more_than_the_better_of_its_two_ways_not_even_in_a_small_batch(
    sent: Sent, tmp_path: Path
) -> None:
    """The last batch of the epoch has two samples, so that one worker has none."""
    given, layers = {**PLAIN, "batch_size": 718, "microbatches": 3}, (1, 3, 5)
    wanted = weights(train("allreduce", tmp_path / "sum", 4, **given))
    runs: dict[str, Sent] = {}
    for way in ("auto", "factors", "server"):
        sent.clear()
        result = train(f"hybcomm:{way}", tmp_path / way, 4, **given)
        runs[way] = dict(sent)
        assert float((weights(result) - wanted).norm() / wanted.norm()) < 1e-5, way
        flat = sizes(result)[1::2]
    for step, (samples, microbatches) in enumerate([(718, 3), (718, 3), (2, 2), (718, 3)]):
        senders = with_samples(microbatches, NODES)
        for layer, size, matrix in zip(layers, flat, LINEAR, strict=True):
            factors = 4 * factor_values(samples, sum(matrix), NODES)
            servers = 4 * server_values(size, NODES, senders)
            assert runs["factors"][step, layer] == factors
            assert runs["auto"][step, layer] == min(factors, servers)
        at_once = sum(found for (number, _), found in runs["server"].items() if number == step)
        assert at_once == 4 * server_values(sum(flat), NODES, senders)


class Mixed(nn.Module):
    """One product, and two rows of it for a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(96, 96, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(self.linear(x.reshape(-1, 2, 96))).flatten(1)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(192, 32), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


def with_others() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.Flatten(), Mixed(), Twice())


def start(strategy: str, folder: Path, *, wire: str = "float32", **training: Any) -> api.Result:
    part = {"batch_size": 16, "microbatches": 4, "steps": 5, "optimizer_settings": {"lr": 4e-3}, **training}
    config = RunConfig(training=TrainingPart(wire=wire, **part), ring=RingPart(strategy=strategy, nodes=NODES))
    torch.manual_seed(0)
    return api.start(config, with_others(), run_dir=folder, pool=InMemoryPool(NODES, seed=1))


def test_layers_that_are_not_plain_go_through_the_servers_and_it_is_said(sent: Sent, tmp_path: Path) -> None:
    wanted, found = start("allreduce", tmp_path / "sum"), start("hybcomm", tmp_path / "both")
    ways = list(found.summary.layer_ways.values())
    assert ways == [
        "through the servers, no plain linear layer",
        "as factors",
        "through the servers, no plain linear layer",
    ]
    assert float((weights(found) - weights(wanted)).norm() / weights(wanted).norm()) < 1e-5
    conv, _, square, twice = sizes(found)
    assert 2 * square > 16 * 2 * (96 + 96), "two rows of a sample"
    whole = 4 * (NODES - 1) * (2 * (conv + twice) + 16 * 2 * (96 + 96))
    assert sum(each for (step, _), each in sent.items() if step == 2) == whole


@pytest.mark.parametrize("wire", ["bfloat16", "int8"])
def test_a_coarse_wire_rounds_factors_alike_everywhere(wire: str, tmp_path: Path) -> None:
    exact, coarse = start("hybcomm", tmp_path / "exact"), start("hybcomm", tmp_path / wire, wire=wire)
    again = start("hybcomm", tmp_path / "again", wire=wire)
    assert coarse.summary.weights_sha256 == again.summary.weights_sha256
    assert 0 < float((weights(coarse) - weights(exact)).norm() / weights(exact).norm()) < 0.05
    assert coarse.summary.bytes_total < 0.55 * exact.summary.bytes_total


@pytest.mark.parametrize("wire", ["1bit", "topk"])
def test_a_wire_for_gradients_alone_is_refused(wire: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="strategy that sums gradients"):
        start("hybcomm", tmp_path / "run", wire=wire)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(UsageError, match="unknown way 'both'"):
        registry.parse("hybcomm:both")


def test_the_choice_by_hand() -> None:
    # 3 workers, 4 x 6 and a bias in 32 values: 2 R (4 + 6) against 3 * 32 - 32 + 2 * 32 = 128
    everyone = (0, 1, 2)
    assert server_values(32, 3, everyone) == 128
    assert factor_values(6, 10, 3) == 120
    assert by_factors("auto", 6, 10, 32, workers=3, senders=everyone)
    assert not by_factors("auto", 7, 10, 32, workers=3, senders=everyone)
    assert not by_factors("auto", 6, 10, 32, workers=3, senders=(1,)), "one gradient up and sums down: 21 + 64"
    assert by_factors("factors", 7, 10, 32, workers=3, senders=everyone)
    assert not by_factors("factors", MOST_VALUES, 10, 32, workers=3, senders=everyone)
    assert not by_factors("server", 1, 10, 32, workers=3, senders=everyone)


def test_its_formula_takes_the_better_way_of_each_layer() -> None:
    hybcomm, layers = registry.get("hybcomm"), ((1000, 20, 40), (100, 40, 10))
    total = {
        way: hybcomm.traffic(hybcomm.read({"way": way}), Sizes(1300.0, (), 10, linear=layers), 5).total
        for way in ("auto", "factors", "server")
    }
    assert total == {"auto": 4 * (600 + 600), "factors": 4 * (600 + 500 + 400), "server": 4 * 2600}


MOST = MOST_VALUES // 10 + 1  # rows: one more than anybody may send
PLAN = Enlist("hybcomm", {}, 3, RECIPE, "float32", "mse", (32, 8), 0, NEAR, 0, linear=((4, 6, 0, 24), ()))


def specs(message: Message, *shapes: tuple[int, ...]) -> Message:
    import msgspec

    from ringtmp.wire.tensors import TensorSpec

    return msgspec.structs.replace(
        message, tensors=tuple(TensorSpec("float32", each, (1,) * len(each)) for each in shapes)
    )


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (specs(Factors(0, 1, 2), (2, 6), (2, 4)), "no plain linear layer"),
        (specs(Factors(0, 0, MOST), (MOST, 6), (MOST, 4)), "the number of rows"),
        (specs(Factors(0, 0, 2), (2, 4), (2, 6)), "2 rows of layer 0"),
        (Factors(2, 0, 0), "the step"),
        (Factors(1, 0, 0), "out of turn"),
        (specs(GradientPart(0, 0, 0, 0, False), (3,)), "not its to send"),
        (specs(GradientPart(0, 0, 1, 0, False), (4,)), "for 3 values"),
        (specs(GradientPart(0, 0, 1, 0, True), (3,)), "not its to send"),
        (GradientPart(0, 2, 1, 0, False), "the number of a group"),
    ],
)
def test_what_does_not_fit_the_plan_is_refused_before_memory_is_taken(message: Message, said: str) -> None:
    receiver = at(1, None)
    assert registry.member(receiver, PLAN) is not None
    with pytest.raises(ProtocolError, match=said):
        receiver.judge(2, message)


def test_a_worker_gives_to_a_layer_once_in_a_step() -> None:
    receiver = at(1, None)
    registry.member(receiver, PLAN)
    receiver.judge(2, specs(Factors(0, 0, 2), (2, 6), (2, 4)))
    with pytest.raises(ProtocolError, match="out of turn"):
        receiver.judge(2, specs(GradientPart(0, 1, 1, 0, False), (11,)))


@pytest.mark.long  # quick: the contract in test_every_strategy
def test_it_learns_the_digits(tmp_path: Path) -> None:
    config = RunConfig(
        training=TrainingPart(batch_size=64, microbatches=8, optimizer_settings={"lr": 4e-3}, epochs=9),
        ring=RingPart(strategy="hybcomm", nodes=4),
    )
    torch.manual_seed(0)
    done = api.start(config, model(), run_dir=tmp_path / "run", pool=InMemoryPool(4, seed=0)).summary
    assert done.accuracy is not None
    assert done.accuracy >= 0.95
