"""The contract of a strategy: every one of the registry keeps it, our own and those that packages bring."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from costs import devices, layers
from installed import importable, install_example
from ringtmp import api
from ringtmp.bench.analysis import step_time_bounds as bounds
from ringtmp.bench.analysis.step_time_bounds import busiest_values
from ringtmp.bench.training_runs import strategy_variants as ways
from ringtmp.bench.training_runs.speed_cases import case_named, pipelined
from ringtmp.config import KeepPart, RingPart, RunConfig, TrainingPart
from ringtmp.errors import Interrupted, NodeLost, RingError, UsageError
from ringtmp.launch.authenticate_devices import Device, Hub
from ringtmp.launch.device_facts import device_facts
from ringtmp.launch.key_store import Rings
from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.metrics import events
from ringtmp.plan.planner import PlanOptions
from ringtmp.runtime import stop_and_checkpoint_requests
from ringtmp.runtime.checkpoint import latest
from ringtmp.runtime.stop_and_checkpoint_requests import STOP
from ringtmp.strategies import registry
from ringtmp.strategies.base import About, Sizes, Strategy, Task, drifts
from ringtmp.strategies.compare import compare
from ringtmp.strategies.registry import Choice
from ringtmp.wire.messages import Enlist
from test_asked_of_a_run import Asking
from test_healing import Death, Mortal
from test_join_security import free_port
from test_strategies import CUTS, model, sizes, weights
from test_who_may_send_what import RECIPE, at

#: Our own and the example, with settings that make them do what they are for; and whatever packages bring, as it is.
CHOICES = [
    "ring",
    "ps:bsp",
    "ps:async:workers",
    "allreduce:ring",
    "allreduce:tree",
    "hybcomm",
    "lbfgs:5",
    "averaging:2",
    "block-momentum:2:momentum=0.3",
    "easgd:2",
    "tree-easgd:2",
    "dpsgd",
    "gosgd:1",
    "mpca:2",
    "gossip-learning:2",
    "gadmm:0.05:passes=4",
    "ensemble:stacking",
    "scheduled:6000:independence=1:rate=0.02",
    "tensor",
    "local-means:2",
]
#: Of the model: columns, then rows, whose 64 sums are added up; inputs want no gradient, and the head stays whole.
INSIDE = 64.0
CHOICES += sorted(set(registry.every()) - {text.partition(":")[0] for text in CHOICES})
NODES, BATCH = 3, 64
#: Of the model's linear layers: inputs and outputs.
LINEAR = ((64, 96), (96, 64), (64, 10))


@pytest.fixture(scope="module", autouse=True)
def example(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with importable(install_example(tmp_path_factory.mktemp("installed"))):
        assert {text.partition(":")[0] for text in CHOICES} == set(registry.every()), (
            "a strategy is not held to the contract"
        )
        yield


def parts(text: str) -> tuple[Strategy, Any, Choice]:
    choice = registry.parse(text)
    strategy = registry.get(choice.name)
    return strategy, strategy.read(choice.settings), choice


def train(text: str, folder: Path, steps: int, pool: InMemoryPool | None = None, **given: Any) -> api.Result:
    strategy = registry.get(text.partition(":")[0])
    split = strategy.splits_layers
    keep = {key: given.pop(key) for key in ("protect", "checkpoint_every") if key in given}
    watcher = given.pop("watcher", None)
    part = {
        "batch_size": 1438 if strategy.full_batch else BATCH,
        "microbatches": 6,
        "steps": steps,
        "optimizer_settings": {"lr": 4e-3},
        **given,
    }
    config = RunConfig(
        training=TrainingPart(**part),
        ring=RingPart(strategy=text, nodes=NODES, cuts=CUTS[NODES][0] if split else None),
        keep=KeepPart(**keep),
    )
    torch.manual_seed(0)
    pool = pool or InMemoryPool(NODES, seed=steps)
    return api.start(config, model(), run_dir=folder / "run", pool=pool, watcher=watcher or api.Watcher())


@pytest.mark.parametrize("text", CHOICES)
def test_it_learns_and_sends_what_its_formula_says_and_repeats_the_bits_it_promises(text: str, tmp_path: Path) -> None:
    strategy, settings, _ = parts(text)
    # Where nobody waits, some work with models that lack what others have learnt: it takes longer.
    first = train(text, tmp_path / "a", 45 if strategy.exactness(settings) == "steps" else 30).summary
    assert (first.exactness, first.drifts) == (strategy.exactness(settings), drifts(strategy, settings))
    assert first.loss.last < first.loss.first / 2
    if first.exactness in ("bits", "replay"):
        assert (
            first.weights_sha256 == train(text, tmp_path / "b", 30, InMemoryPool(NODES, seed=1)).summary.weights_sha256
        )
    done = api.Result(tmp_path / "a" / "run")
    cuts = tuple(map(float, CUTS[NODES][1]))
    samples = 1437 / 23  # of an average step: an epoch's last batch is smaller
    linear = tuple((size, *matrix) for size, matrix in zip(sizes(done)[1::2], LINEAR, strict=True))
    traffic = strategy.traffic(settings, Sizes(sum(sizes(done)), cuts, samples, INSIDE, linear), NODES)
    assert first.bytes_total == pytest.approx(4 * traffic.total * first.steps, rel=0.06)
    assert traffic.total / NODES <= traffic.busiest <= traffic.total


@pytest.mark.parametrize("text", CHOICES)
def test_its_name_is_written_as_it_is_read(text: str) -> None:
    strategy, settings, choice = parts(text)
    assert registry.parse(registry.spelled(choice)) == choice
    assert strategy.read(msgspec.to_builtins(settings)) == settings, "all settings written out are the same settings"
    settings.check(NODES, "float32")


@pytest.mark.parametrize("text", CHOICES)
def test_it_refuses_settings_it_does_not_have(text: str) -> None:
    strategy, _, choice = parts(text)
    with pytest.raises(UsageError, match="nonsense"):
        strategy.read({"nonsense": 1})
    with pytest.raises(UsageError, match="nonsense"):
        registry.parse(f"{choice.name}:nonsense=1")
    for each in msgspec.structs.fields(strategy.Settings):
        with pytest.raises(UsageError, match=f"{each.name} of strategy {strategy.name}"):
            strategy.read({each.name: [1, 2]})
    assert all(each["meaning"] and each["values"] for each in registry.settings_of(strategy))


@pytest.mark.parametrize("text", CHOICES)
def test_every_node_has_a_role_and_the_taxonomy_a_row(text: str) -> None:
    strategy, settings, _ = parts(text)
    for nodes in (2, 3, 7):
        roles = strategy.roles(settings, nodes)
        assert set(roles.servers) | set(roles.workers) == set(range(nodes))
        assert roles.workers
    assert all(getattr(strategy.about, field) for field in About.__struct_fields__)
    assert strategy.exactness(settings) in ("bits", "replay", "steps")


@pytest.mark.parametrize("text", CHOICES)
def test_on_paper_it_takes_time_and_memory(text: str) -> None:
    way = compare(
        registry.parse(text), Task(layers(6, output=1.0, weights=1000), devices(4, rate=100.0), PlanOptions(16, 8))
    )
    assert way.problem == ""
    assert way.simulated is not None
    assert 0 < way.simulated.step_s < math.inf
    assert (way.simulated.bytes_total > 0) == (text.partition(":")[0] != "ensemble")
    assert len(way.simulated.nodes) == len(way.memory) == 4
    assert all(0 < each.total_bytes < math.inf for each in way.memory)


@pytest.mark.parametrize("text", CHOICES)
def test_it_heals_after_a_loss_and_without_protection_says_who_was_lost(text: str, tmp_path: Path) -> None:
    strategy, settings, _ = parts(text)
    hit = train(text, tmp_path / "hit", 10, Mortal(NODES, Death(2, 4)), checkpoint_every=2).summary
    assert hit.steps >= 10
    assert len(hit.recoveries) == 1
    stays = strategy.can_lose(settings, strategy.roles(settings, NODES), 2, (), NODES)
    source = hit.recoveries[0].source
    assert (source in ("servers", "workers")) == stays
    if not stays:
        assert source in ("checkpoint", strategy.state_from)
        with pytest.raises(NodeLost, match="node 2"):
            train(text, tmp_path / "lost", 10, Mortal(NODES, Death(2, 4)), protect="off")


@pytest.mark.long  # quick, for the ring: test_asked_of_a_run
@pytest.mark.parametrize("text", CHOICES)
def test_it_stops_when_asked_saves_and_goes_on(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_and_checkpoint_requests, "PAUSE_S", 0.0)
    run, pool = tmp_path / "run", InMemoryPool(NODES, seed=2)
    with pytest.raises(Interrupted, match="interrupted after step"):
        train(text, tmp_path, 100, pool, watcher=Asking(run, {6: STOP}))
    assert not pool._workers, "somebody was not told to stop"
    assert [each.outcome for each in events.of_run(run) if isinstance(each, events.RunEnded)] == ["interrupted"]
    done = latest(run / "checkpoints")[0].progress.step
    assert 6 <= done < 100
    rest = api.resume(run, {"steps": done + 20}, None, None, watcher=api.Watcher(), pool=InMemoryPool(NODES))
    assert rest.summary.steps == done + 20
    assert rest.summary.loss.last < rest.summary.loss.first


@pytest.mark.parametrize("text", CHOICES)
def test_the_bench_measures_it(text: str) -> None:
    strategy, _, choice = parts(text)
    way, case = ways.parse(text), case_named(text)
    assert way.refusal(NODES, layers=6) is None
    assert 1 <= way.workers(NODES) <= NODES
    assert registry.parse(case.flags[1]).name == choice.name
    limit = busiest_values(case, bounds.Sizes(1.0, 1000, 10, BATCH), NODES)
    assert limit > 0
    assert pipelined(case) == strategy.splits_layers


# -- the example --------------------------------------------------------------------------------------------------------------


def test_means_of_every_step_of_plain_descent_are_plain_descent(tmp_path: Path) -> None:
    plain = {"optimizer": "sgd", "optimizer_settings": {"lr": 0.05}, "batch_size": 60}  # equal shares
    one = train("local-means:1", tmp_path / "one", 12, **plain)
    every = weights(train("allreduce", tmp_path / "sum", 12, **plain))
    seldom = weights(train("local-means:3", tmp_path / "seldom", 12, **plain))
    assert float((weights(one) - every).norm() / every.norm()) < 1e-5
    assert float((seldom - every).norm() / every.norm()) > 1e-5
    with pytest.raises(UsageError, match="use --wire float32"):
        train("local-means:3:wire=int8", tmp_path / "rounded", 1)


def test_a_device_without_the_package_or_with_another_version_is_named_and_left_out(tmp_path: Path) -> None:
    rings, said = Rings(tmp_path), list[str]()
    rings.open("home", create=True)
    hub = Hub("home", rings, "127.0.0.1", free_port(), package=registry.package_of("local-means:4"), tell=said.append)
    try:
        for name, packages in (
            ("bare", ()),
            ("old", ("ringtmp-local-means 0.9",)),
            ("good", ("ringtmp-local-means 1.0",)),
        ):
            facts = msgspec.structs.replace(device_facts(name), packages=packages)
            hub.devices[name] = Device(name, "1", facts, b"", time.monotonic())
        assert [each.facts.name for each in hub.present()] == ["good"] == [each.facts.name for each in hub.present()]
    finally:
        hub.close()
    assert said == [
        "bare lacks ringtmp-local-means 1.0, which the strategy comes from: it is left out",
        "old lacks ringtmp-local-means 1.0, which the strategy comes from (it has ringtmp-local-means 0.9): it is left out",
    ]
    assert device_facts("here").packages == ("ringtmp-local-means 1.0",)


def test_a_node_without_the_package_or_with_another_version_refuses_the_plan() -> None:
    plan = Enlist("local-means", {}, 2, RECIPE, "float32", "mse", (4,), 0, {}, 0, "ringtmp-local-means 0.9")
    with pytest.raises(
        RingError, match="comes from ringtmp-local-means 1.0 here and from ringtmp-local-means 0.9 on the master"
    ):
        registry.member(at(1, None), plan)
    with pytest.raises(RingError, match="unknown strategy 'gossip'.*the master has it from talk 2: install that here"):
        registry.member(at(1, None), msgspec.structs.replace(plan, strategy="gossip", package="talk 2"))
