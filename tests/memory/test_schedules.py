"""Contract 1 for what keeps the ring busy: deferred weight gradients, delayed gradients, laps, recomputed activations."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from harness import Built, recipe, ring_in_memory
from oracle import plain_loop, state_sha256
from ringtmp.api import Ring, Watcher, start
from ringtmp.config import KeepPart, RingPart
from ringtmp.data.batches import TrainingBatches
from ringtmp.data.tables_and_streams import tensors
from ringtmp.errors import Interrupted, UsageError
from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.model import zoo
from ringtmp.plan.route import holders_of
from ringtmp.run.check_settings import resolve
from ringtmp.run.interruption import Interruption
from ringtmp.run.session import Session
from ringtmp.run.what_to_train import Job
from ringtmp.runtime.losses import cross_entropy, loss_named, next_byte
from ringtmp.runtime.run_directory import RunDirectory
from test_recompute import Centred
from test_same_bits_as_one_process import MICROBATCHES, MODELS, batches_of, source
from test_training_loop import blobs, resume, settings, stack, train

SEED = 5
CLIP = 0.3
SETTINGS = {"lr": 0.05, "momentum": 0.9}


class Case:
    """A small model of the zoo with dropout, trained with clipping: everything that could differ."""

    def __init__(self, model: str) -> None:
        self.data, sizes = MODELS[model]
        self._layers = lambda: zoo.build(model, source(self.data).shape, {**sizes, "dropout": 0.2})
        self.loss: Any = next_byte if model == "gpt" else cross_entropy
        self.batches = batches_of(self.data, 4)

    def plain(self) -> nn.Sequential:
        torch.manual_seed(SEED)
        return nn.Sequential(OrderedDict(self._layers()))

    def build(self, folder: Path) -> Built:
        return Built(folder, self._layers, lambda count: source(self.data).example(count)[0], [3, 4], seed=SEED)

    def run(self, built: Built, nodes: int, **how: Any) -> tuple[str, list[float]]:
        more = {key: how.pop(key) for key in ("staleness",) if key in how}
        return ring_in_memory(
            built, recipe("sgd", SETTINGS, seed=SEED, clip_norm=CLIP, **more), self.batches, MICROBATCHES, self.loss,
            nodes, seed=nodes, **how,
        )  # fmt: skip


@pytest.fixture(scope="module")
def built_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Built]:
    """Every model is exported once for all tests."""
    return cache(lambda model: Case(model).build(tmp_path_factory.mktemp(model)))


def models(*quick: str) -> Any:
    """Every model; those that have nothing the quick ones lack in `make long`."""
    found = [pytest.param(each, marks=[] if each in quick else [pytest.mark.long]) for each in MODELS]
    return pytest.mark.parametrize("model", found)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, fused=True, **SETTINGS)


@cache
def plain_result(model: str, delayed: bool = False) -> tuple[str, list[float]]:
    case = Case(model)
    plain = case.plain()
    losses = plain_loop(plain, case.batches, MICROBATCHES, case.loss, sgd, SEED, CLIP, delayed=delayed)
    return state_sha256(plain), losses


@models("mlp", "convnet")
def test_deferred_weight_gradients_change_no_bit(model: str, built_of: Callable[[str], Built]) -> None:
    case, built = Case(model), built_of(model)
    for nodes in (1, 3):
        assert case.run(built, nodes, schedule="zero-bubble") == plain_result(model), f"{nodes} nodes"


@models("mlp", "convnet")
def test_delayed_gradients_give_the_bits_of_a_delayed_loop(model: str, built_of: Callable[[str], Built]) -> None:
    case, built = Case(model), built_of(model)
    expected = plain_result(model, delayed=True)
    assert expected[1] != plain_result(model)[1], "a delay that changes nothing would test nothing"
    for nodes, schedule in ((1, "1f1b"), (3, "zero-bubble"), (2, "gpipe")):
        assert case.run(built, nodes, schedule=schedule, staleness=1) == expected, f"{nodes} nodes, {schedule}"


@pytest.mark.long
def test_delayed_steps_that_do_not_overlap_give_the_same_bits(built_of: Callable[[str], Built]) -> None:
    """So an evaluation, a checkpoint or a stream that brings no batch early changes nothing."""
    case, built = Case("convnet"), built_of("convnet")
    for window in (1, 4):
        got = case.run(built, 3, staleness=1, ahead=False, window=window)
        assert got == plain_result("convnet", delayed=True)


def test_a_delayed_run_resumes_and_regroups_with_the_bits_of_a_delayed_loop(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", 2, steps=11, staleness=1)
    train(tmp_path / "parts", 3, steps=4, staleness=1)
    resume(tmp_path / "parts", 1, steps=8, schedule="zero-bubble")
    parts = resume(tmp_path / "parts", 4, steps=11)
    plain = stack()
    source = TrainingBatches(tensors("t", *blobs()), 16, 4, 0)
    pairs = [source.batch(step) for step in range(11)]
    batches = [(torch.cat(list(each.inputs)), torch.cat(list(each.targets))) for each in pairs if each is not None]
    plain_loop(
        plain, batches, 4, cross_entropy, lambda p: torch.optim.AdamW(p, lr=0.01, fused=True), delayed=True
    )  # fmt: skip
    assert whole.summary.weights_sha256 == parts.summary.weights_sha256 == state_sha256(plain)
    assert whole.summary.staleness == 1


@models("convnet")
def test_laps_and_v_shapes_change_no_bit(model: str, built_of: Callable[[str], Built]) -> None:
    case, built = Case(model), built_of(model)
    for nodes, laps, shape in ((2, 2, "ring"), (3, 1, "v"), (1, 2, "ring")):
        holders = holders_of(nodes, laps, shape)
        for schedule in ("1f1b", "zero-bubble"):
            assert case.run(built, nodes, schedule=schedule, holders=holders) == plain_result(model), (
                holders,
                schedule,
            )
    assert case.run(built, 2, holders=holders_of(2, 2), staleness=1) == plain_result(model, delayed=True)


@models("convnet")
def test_recomputed_activations_change_no_bit_and_no_buffer_twice(model: str, built_of: Callable[[str], Built]) -> None:
    case, built = Case(model), built_of(model)
    for nodes, schedule in ((3, "1f1b"), (2, "gpipe"), (3, "zero-bubble")):
        got = case.run(built, nodes, schedule=schedule, recompute="all")
        assert got == plain_result(model), f"{nodes} nodes, {schedule}"
    assert case.run(built, 3, recompute="all", staleness=1) == plain_result(model, delayed=True)


def test_an_interrupted_delayed_run_finishes_the_steps_it_has_begun(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", 2, epochs=2, staleness=1)
    run = RunDirectory(tmp_path / "parts")
    data = tensors("t", *blobs()), tensors("t", *blobs(30))
    config = msgspec.structs.replace(resolve(settings(3, epochs=2, staleness=1)), keep=KeepPart())
    stopping = Interruption()
    job = Job(config, stack(), *data, loss_named("cross_entropy"), "cross_entropy", run)
    pool = Watching(3, stopping)
    with pytest.raises(Interrupted, match="after step 2"):
        Session(job, pool, Watcher(), stopping).train()
    assert resume(tmp_path / "parts", 2).summary.weights_sha256 == whole.summary.weights_sha256


def run_on(folder: Path, model: nn.Module, ring: RingPart, **training: Any) -> Any:
    config = msgspec.structs.replace(settings(steps=5, **training), ring=ring)
    data = tensors("t", *blobs()), tensors("t", *blobs(30))
    return start(config, model, data, None, run_dir=folder, watcher=Watcher(), pool=InMemoryPool(ring.nodes)).summary


def test_a_run_takes_its_route_and_what_to_recompute_from_the_settings(tmp_path: Path) -> None:
    plain = run_on(tmp_path / "plain", stack(), RingPart(nodes=1))
    laps = RingPart(nodes=2, laps=2, recompute="all", schedule="zero-bubble")
    vee = RingPart(nodes=3, route="v", recompute="auto", cuts="0-1,2,3,4,5")
    for index, (ring, segments) in enumerate(((laps, [3, 2]), (vee, [2, 2, 1]))):
        summary = run_on(tmp_path / str(index), stack(), ring)
        assert summary.weights_sha256 == plain.weights_sha256
        assert [len(node.segments) for node in summary.per_node] == segments


@pytest.mark.parametrize(
    ("training", "ring", "message"),
    [
        ({"staleness": 2}, {}, "--staleness 2 must be 0 or 1"),
        ({}, {"laps": 0}, "--laps 0 must be at least 1"),
        ({}, {"laps": 2, "route": "v"}, "--route v cannot be combined with --laps"),
        ({}, {"nodes": 3, "laps": 2}, "a route of 7 visits needs at least 7 layers; the model has 6"),
    ],
)
def test_what_cannot_be_is_refused(training: Any, ring: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        run_on(tmp_path / "run", stack(), RingPart(**{"nodes": 2, **ring}), **training)


def test_a_layer_whose_activations_cannot_be_computed_again_is_named(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 6), Centred(), nn.Linear(6, 3))
    with pytest.raises(UsageError, match="layer '1' reads a buffer that it changes"):
        run_on(tmp_path / "run", model, RingPart(nodes=2, recompute="all"))


class Watching(InMemoryPool):
    """The user interrupts at the end of step 0, when step 1 has begun as well."""

    def __init__(self, nodes: int, stopping: Interruption) -> None:
        super().__init__(nodes)
        self._stopping = stopping

    def advance(self) -> bool:
        if any(worker.step == 1 for worker in self._workers):
            self._stopping.asked = True
        return super().advance()


@pytest.mark.long
def test_python_takes_every_schedule_and_refuses_what_is_none(tmp_path: Path) -> None:
    def model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(8, 8) for _ in range(8)))

    data = (torch.ones(16, 8), torch.zeros(16, dtype=torch.int64))
    wrong: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"route": "x"}, {}, "unknown route 'x'"),
        ({"recompute": "maybe"}, {}, "unknown recompute"),
        ({"laps": 0}, {}, "laps=0"),
        ({}, {"staleness": 3}, "staleness=3"),
        ({}, {"protect": "maybe"}, "unknown protect 'maybe'"),
    ]
    for ring, fit, says in wrong:
        with pytest.raises(UsageError, match=says):
            Ring(2, **ring).fit(model(), data, steps=2, run_dir=tmp_path / "refused", **fit)
    assert not (tmp_path / "refused").exists()
    given: dict[str, Any] = {"batch_size": 16, "steps": 3, "staleness": 1, "protect": "off"}
    far = Ring(2, laps=2, recompute="all").fit(model(), data, run_dir=tmp_path / "two", **given)
    near = Ring(1).fit(model(), data, run_dir=tmp_path / "one", **given)
    assert far.summary.weights_sha256 == near.summary.weights_sha256
