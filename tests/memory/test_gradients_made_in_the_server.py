"""Project Adam's fully connected layers: workers push activations and errors, and the server makes the gradient of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from ringtmp import api
from ringtmp.errors import ProtocolError, UsageError
from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.strategies import registry
from ringtmp.strategies.base import Sizes
from ringtmp.strategies.data_parallel import parameter_keys
from ringtmp.strategies.data_parallel.linear_gradients import Linear
from ringtmp.strategies.ps.client import Client
from ringtmp.wire.messages import Enlist, Message, Push
from ringtmp.wire.tensors import TensorSpec
from test_every_strategy import LINEAR, train
from test_healing import Death, Mortal
from test_strategies import sizes, weights
from test_who_may_send_what import NEAR, RECIPE, at

#: Two samples for each of three microbatches: rows are few.
SMALL: dict[str, Any] = {"batch_size": 18, "microbatches": 6}


def off(found: api.Result, wanted: api.Result) -> float:
    return float((weights(found) - weights(wanted)).norm() / weights(wanted).norm())


@pytest.mark.parametrize(
    "rest",
    [
        "",
        ":servers=workers",
        pytest.param(":servers=2:replicas=1", marks=pytest.mark.long),
        pytest.param(":fetch=layerwise", marks=pytest.mark.long),
    ],
)
def test_it_ends_where_workers_that_push_gradients_do_and_sends_what_its_formula_says(
    rest: str, tmp_path: Path
) -> None:
    # With two servers of three nodes one worker has all rows.
    samples = 6 if "servers=2" in rest else 18
    given = {"batch_size": samples, "microbatches": 6, "clip_norm": 0.5}
    wanted = train(f"ps:bsp{rest}", tmp_path / "gradients", 8, **given)
    found = train(f"ps:bsp:factors=true{rest}", tmp_path / "factors", 8, **given)
    assert 0 < off(found, wanted) < 1e-5
    strategy, choice = registry.get("ps"), registry.parse(f"ps:bsp:factors=true{rest}")
    flat = sizes(found)
    linear = tuple((size, *matrix) for size, matrix in zip(flat[1::2], LINEAR, strict=True))
    step = strategy.traffic(strategy.read(choice.settings), Sizes(sum(flat), (), samples, linear=linear), 3).total
    read = 4 * sum(flat) * 2  # by workers, before the first step
    assert abs(found.summary.bytes_total - 4 * step * 8) <= 0.02 * 4 * step * 8 + read
    assert found.summary.bytes_total < 0.85 * wanted.summary.bytes_total
    assert list(found.summary.layer_ways.values())[:2] == ["as factors, to the server"] * 2


def test_each_key_goes_the_way_that_takes_less(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of the first matrix, cut in two, with 24 rows a worker: the half with the bias needs all errors, and is a gradient. So is
    the head."""
    pushed: dict[int, set[bool]] = {}
    sent = Client._send_pushes

    def seen(self: Client) -> None:
        for key, push, tensors in self._to_push:
            linear = self._linear.get(key.layer)
            assert linear is not None
            low, high = linear.columns(key.start, key.stop)
            values, factors = sum(each.numel() for each in tensors), push.rows * (linear.inputs + high - low)
            assert values == (factors if push.rows else key.size) <= key.size
            pushed.setdefault(key.layer, set()).add(push.rows > 0)
        sent(self)

    monkeypatch.setattr(Client, "_send_pushes", seen)
    found = train("ps:bsp:factors=true", tmp_path, 3, batch_size=48, microbatches=6)
    assert (pushed[1], pushed[5]) == ({True, False}, {False})
    assert list(found.summary.layer_ways.values())[-1] == "as a gradient, which is less"


def test_a_server_that_dies_leaves_the_bits_of_a_run_in_which_nobody_did(tmp_path: Path) -> None:
    name, given = "ps:bsp:servers=2:replicas=1:factors=true", {**SMALL, "protect": "auto"}
    calm = train(name, tmp_path / "calm", 8, **given).summary
    hit = train(name, tmp_path / "hit", 8, Mortal(3, Death(1, 3)), **given).summary
    assert [each.source for each in hit.recoveries] == ["replica"]
    assert hit.weights_sha256 == calm.weights_sha256


def test_without_waiting_for_others_it_learns(tmp_path: Path) -> None:
    done = train("ps:async:factors=true:servers=workers", tmp_path, 40, InMemoryPool(3, seed=2)).summary
    assert done.loss.last < done.loss.first / 2


def test_a_coarse_wire_rounds_activations_and_errors(tmp_path: Path) -> None:
    exact = train("ps:bsp:factors=true", tmp_path / "exact", 6, **SMALL)
    coarse = train("ps:bsp:factors=true", tmp_path / "coarse", 6, wire="bfloat16", **SMALL)
    assert 1e-5 < off(coarse, exact) < 0.05


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("ps:async:factors=true:n_push=2", {}, "needs n_push=1 and n_fetch=1"),
        ("ps:async:factors=true:n_fetch=3", {}, "needs n_push=1 and n_fetch=1, not 1 and 3"),
        ("ps:bsp:factors=true", {"wire": "int8"}, "use --wire float32, bfloat16 or float16"),
        ("ps:async:factors=true", {"clip_norm": 1.0}, "use consistency=bsp"),
        ("ps:bsp:factors=true", {"sum_tree": 2}, "sum-tree"),
    ],
)
def test_what_cannot_be_is_refused(name: str, given: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        train(name, tmp_path, 1, **given)


@pytest.mark.parametrize("bias", [True, False])
def test_a_range_of_the_gradient_is_made_of_the_errors_it_needs(bias: bool) -> None:
    torch.manual_seed(0)
    rows, errors = torch.randn(3, 5), torch.randn(3, 7)
    layout = parameter_keys.flat([("matrix", (7, 5)), *([("bias", (7,))] if bias else [])])
    linear = Linear(7, 5, 0, 48 if bias else -1)
    assert [slot.start for slot in layout.slots] == [0, 48][: 1 + bias]
    whole = torch.zeros(layout.size)
    whole[:35] = (errors.T @ rows).flatten()
    if bias:
        whole[48:55] = errors.sum(0)
    assert torch.allclose(linear.gradient(0, layout.size, rows, errors), whole)
    for start in range(layout.size):
        for stop in range(start + 1, layout.size + 1):
            low, high = linear.columns(start, stop)
            part = linear.gradient(start, stop, rows, errors[:, low:high], low)
            assert torch.allclose(part, whole[start:stop], atol=1e-6), (start, stop)


#: A matrix of 40 by 30 and a bias: keys of at most 1024 values.
PLAN = Enlist(
    "ps", {"factors": True}, 3, RECIPE, "float32", "mse", (1248, 16), 0, NEAR, 0, linear=((40, 30, 0, 1200), ())
)


def pushed(key: int, rows: int, *shapes: tuple[int, ...]) -> Message:
    specs = tuple(TensorSpec("float32", each, (1,) * len(each)) for each in shapes)
    return msgspec.structs.replace(Push(key, 0, 0.5, False, rows=rows), tensors=specs)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (pushed(2, 1, (1, 30), (1, 1)), "not plain linear"),
        (pushed(0, 40, (40, 30), (40, 21)), "the number of rows"),
        (pushed(0, 2, (2, 30), (2, 40)), "for 2 rows of key 0"),
        (pushed(0, 2, (2, 30)), "for 2 rows of key 0"),
    ],
)
def test_factors_that_do_not_fit_the_plan_are_refused(message: Message, said: str) -> None:
    server = at(0, None)
    assert registry.member(server, PLAN) is not None
    table = parameter_keys.table(PLAN.sizes, (), 1)
    assert [key.size for key in table] == [624, 624, 16]
    server.judge(1, pushed(0, 2, (2, 30), (2, 21)))
    with pytest.raises(ProtocolError, match=said):
        server.judge(1, message)
