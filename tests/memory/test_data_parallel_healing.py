"""A node vanishes in mid-run of a data-parallel strategy. All-reduce: the survivors have the whole model, and go on with
it. Parameter server: the servers have it, and go on with the workers that are left."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Set
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from ringtmp import api
from ringtmp.config import KeepPart, RingPart, RunConfig, TrainingPart
from ringtmp.data.tables_and_streams import tensors
from ringtmp.errors import NodeLost
from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.metrics import events
from ringtmp.runtime.checkpoint import Progress, latest
from ringtmp.runtime.run_directory import RunDirectory
from ringtmp.runtime.snapshot_schedule import Snapshot, in_hand
from ringtmp.strategies.data_parallel import parameter_keys, replica, sum_over_workers
from ringtmp.strategies.ps.server import Server
from ringtmp.strategies.ps.settings import fitted
from ringtmp.wire.messages import Hello
from test_healing import Death, Mortal
from test_ring_of_processes import assert_all_gone, begin, ringtmp, wait_for_step, workers_of
from test_training_loop import blobs

STEPS = 12
#: Turns of the pool into the step: before, between and after the parts of the exchange.
MOMENTS = [2, 7, 14]
MORE_MOMENTS = [each for each in range(30) if each not in MOMENTS]


def moments() -> list[Any]:
    return [*MOMENTS, *rarer(MORE_MOMENTS)]


def rarer(turns: Iterable[int]) -> list[Any]:
    """Every third in `make long`, the others at night."""
    return [
        pytest.param(each, marks=pytest.mark.nightly if number % 3 else pytest.mark.long)
        for number, each in enumerate(turns)
    ]


class Base:
    """A run of one step, to be gone on with by any strategy: its model is read only once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._runs = 0
        torch.manual_seed(2)
        model = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16, affine=False), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 16),
            nn.BatchNorm1d(16), nn.Linear(16, 3),
        )  # fmt: skip
        training = TrainingPart(data="given", steps=1, batch_size=16, microbatches=4, optimizer="adamw")
        config = RunConfig(training=training, ring=RingPart(nodes=1), keep=KeepPart())
        data = tensors("t", *blobs()), tensors("t", *blobs(30))
        api.start(config, model, data, None, run_dir=folder / "base", watcher=api.Watcher(), pool=InMemoryPool(1))

    def run(
        self, pool: InMemoryPool, strategy: str, settings: dict[str, Any] | None = None, keep: KeepPart | None = None,
        steps: int = STEPS, **training: Any,
    ) -> api.Result:  # fmt: skip
        self._runs += 1
        run = RunDirectory(self.folder / str(self._runs))
        shutil.copytree(self.folder / "base", run.path)
        (run.path / "events.jsonl").unlink()
        saved = run.read_config()
        ring = RingPart(nodes=pool.nodes, strategy=strategy, strategy_settings=settings or {})
        config = msgspec.structs.replace(
            saved.config,
            ring=ring,
            keep=keep or KeepPart(),
            training=msgspec.structs.replace(saved.config.training, **training),
        )
        run.write_config(msgspec.structs.replace(saved, config=config))
        data = tensors("t", *blobs()), tensors("t", *blobs(30))
        return api.resume(run.path, {"steps": steps}, data, None, watcher=api.Watcher(), pool=pool)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return Base(tmp_path_factory.mktemp("base"))


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a step is an exchange of several."""
    monkeypatch.setattr(sum_over_workers, "BUCKET", 32)


def parameters(result: api.Result) -> dict[str, torch.Tensor]:
    checkpoint, _ = latest(result.run_dir / "checkpoints")
    found = {}
    for index, layer in enumerate(RunDirectory(result.run_dir).read_layers()[1]):
        for each, tensor in zip(layer.tensors, checkpoint.layer(index, layer)[0], strict=True):
            found[f"{layer.name}.{each.name}"] = tensor
    return found


def same(one: api.Result, other: api.Result) -> bool:
    """Of the weights; statistics of a BatchNorm are each worker's own."""
    first, second = parameters(one), parameters(other)
    trained = [name for name in first if not name.split(".")[-1].startswith(("running", "num"))]
    return all(torch.equal(first[name], second[name]) for name in trained)


def near(one: api.Result, other: api.Result) -> bool:
    """To rounding. A bias before a BatchNorm has no gradient but rounding, which AdamW takes for one."""
    first, second = parameters(one), parameters(other)
    matrices = [name for name in first if first[name].dim() > 1]
    assert len(matrices) == 3
    return all(torch.allclose(first[name], second[name], atol=1e-4) for name in matrices)


def counted(result: api.Result) -> Counter[int]:
    """How often each step was recorded as done."""
    log = events.read(result.run_dir / "events.jsonl")
    return Counter(each.step for each in log if isinstance(each, events.StepDone))


class Scarce(Mortal):
    """Nobody takes the place of a lost node; numbers stay without holes, so the last one may get another."""

    def replace_lost(
        self, ring: str, generation: int, compact: bool, need_bytes: int, spared: Set[int] = frozenset()
    ) -> Collection[int]:
        assert compact
        for hole in sorted(set(range(1, self.nodes)) & self._dead):
            last = max((worker.endpoint.node for worker in self._workers), default=0)
            if last > hole:
                self._workers = [worker for worker in self._workers if worker.endpoint.node != last]
        self.nodes -= len(self._dead)
        return super().replace_lost(ring, generation, compact, need_bytes, spared)


# -- all-reduce -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def calm(base: Base) -> dict[str, api.Result]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sum_over_workers, "BUCKET", 32)
        return {
            name: base.run(InMemoryPool(4), "allreduce", {"algorithm": name}, clip_norm=1.0)
            for name in ("ring", "tree")
        }


@pytest.mark.parametrize("turns", moments())
@pytest.mark.parametrize("algorithm", ["ring", "tree"])
def test_survivors_of_an_allreduce_give_the_new_one_what_they_have_and_no_bit_changes(
    algorithm: str, turns: int, base: Base, calm: dict[str, api.Result]
) -> None:
    pool = Mortal(4, Death(1 + turns % 3, 5, turns), seed=turns)
    hit = base.run(pool, "allreduce", {"algorithm": algorithm}, clip_norm=1.0)
    (healed,) = hit.summary.recoveries
    assert healed.source == "survivors"
    assert healed.repeated <= 1, "the step under way"
    assert same(hit, calm[algorithm])
    assert set(counted(hit)) == set(range(1, STEPS))
    assert counted(hit).total() == STEPS - 1 + healed.repeated
    checkpoint, _ = latest(hit.run_dir / "checkpoints")
    assert checkpoint.progress.step == STEPS
    tracked = [tensor for name, tensor in parameters(hit).items() if "num_batches_tracked" in name]
    assert tracked
    # One process saw four microbatches in the first step, each of four workers one in every other.
    assert all(int(each) == 4 + STEPS - 1 for each in tracked), "a forward pass that was done again counts once"


@pytest.mark.parametrize("victim", [3, pytest.param(1, marks=pytest.mark.long)])
def test_an_allreduce_goes_on_without_the_lost_worker_from_the_same_step(
    victim: int, base: Base, calm: dict[str, api.Result]
) -> None:
    hit = base.run(Scarce(4, Death(victim, 5, 4)), "allreduce", clip_norm=1.0)
    (healed,) = hit.summary.recoveries
    assert (healed.nodes, healed.source) == (3, "survivors")
    assert healed.repeated <= 1
    assert near(hit, calm["ring"]), "the microbatches are the same, the order of their sum is not"


def test_a_loss_while_an_allreduce_heals_begins_the_healing_anew(base: Base, calm: dict[str, api.Result]) -> None:
    hit = base.run(Mortal(4, Death(2, 5), Death(3, 0, 0, 2), Death(1, 0, 6, 3)), "allreduce", clip_norm=1.0)
    (healed,) = hit.summary.recoveries
    assert healed.generation == 4
    assert healed.source == "survivors"
    assert same(hit, calm["ring"])


def test_again_and_again_down_to_one(base: Base, calm: dict[str, api.Result]) -> None:
    hit = base.run(Scarce(4, Death(3, 3), Death(2, 6), Death(1, 9)), "allreduce", clip_norm=1.0)
    assert [each.nodes for each in hit.summary.recoveries] == [3, 2, 1]
    assert near(hit, calm["ring"])


def test_the_newest_step_that_is_whole_somewhere_is_gone_on_with() -> None:
    layers = [1, 2]  # the first one has nothing to keep

    def hello(*steps: int) -> Hello:
        return Hello(1, "", "", tuple((step, layer) for step in steps for layer in range(3)))

    reached = Snapshot(Progress(7), told={7: 0.5})
    found = in_hand({1: hello(8), 2: hello(7)}, ((7, 0), (7, 1), (7, 2)), layers, reached, 0)
    assert found is not None
    assert (found.step, found.progress.step, found.told) == (8, 7, {7: 0.5})
    behind = in_hand({1: hello(6)}, ((6, 1),), layers, reached, 0)
    assert behind is not None
    assert (behind.step, behind.progress.step) == (6, 6)
    assert in_hand({1: hello(6)}, (), layers, reached, 7) is None, "the checkpoint is newer"
    torn = Hello(1, "", "", ((9, 1), (8, 2)))
    assert in_hand({1: torn}, (), layers, reached, 0) is None


# -- parameter server -------------------------------------------------------------------------------------------------


def applied(result: api.Result) -> int:
    log = events.read(result.run_dir / "events.jsonl")
    return sum(each.applied for each in log if isinstance(each, events.NodeEnded))


@pytest.mark.parametrize("turns", moments())
def test_the_workers_that_are_left_go_on_and_no_gradient_counts_twice(turns: int, base: Base) -> None:
    settings = {"servers": 2}
    hit = base.run(Mortal(5, Death(2 + turns % 3, 5, turns), seed=turns), "ps", settings, clip_norm=1.0)
    (healed,) = hit.summary.recoveries
    assert (healed.source, healed.repeated, healed.generation, healed.nodes) == ("servers", 0, 1, 4)
    assert healed.lost == (2 + turns % 3,)
    assert counted(hit) == Counter(range(1, STEPS))
    sizes = [replica.layer_flat(layer).size for layer in RunDirectory(hit.run_dir).read_layers()[1]]
    assert applied(hit) == len(parameter_keys.cut(sizes, 2)) * (STEPS - 1), "one update of every key in every step"
    (evaluated,) = [each for each in events.read(hit.run_dir / "events.jsonl") if isinstance(each, events.Evaluated)][
        -1:
    ]
    assert evaluated.samples == 30


def test_gradients_of_one_step_are_of_every_worker_or_of_those_that_are_left(
    base: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an update is made of, watched where it is made."""
    seen: dict[tuple[int, int], list[int]] = {}
    push = Server._pushed

    def pushed(self: Server, worker: int, message: Any, gradient: torch.Tensor) -> None:
        if message.step >= self._slots[message.key].updates:
            seen.setdefault((message.key, message.step), []).append(worker)
        push(self, worker, message, gradient)

    monkeypatch.setattr(Server, "_pushed", pushed)
    base.run(Mortal(4, Death(2, 5, 4)), "ps")
    steps = {step for _, step in seen}
    assert steps == set(range(1, STEPS))
    assert all(len(workers) == len(set(workers)) for workers in seen.values())
    assert all({1, 3} <= set(workers) for workers in seen.values())
    assert set(seen[0, STEPS - 1]) == {1, 3}


@pytest.mark.parametrize(
    "consistency", ["ssp:2", *(pytest.param(each, marks=pytest.mark.long) for each in ("async", "ssp:0"))]
)
def test_whoever_waits_for_a_clock_does_not_wait_for_a_lost_one(consistency: str, base: Base) -> None:
    hit = base.run(Mortal(4, Death(2, 6, 3)), "ps", {"consistency": consistency}, steps=30)
    (healed,) = hit.summary.recoveries
    assert healed.source == "servers"
    assert counted(hit) == Counter(range(1, 30))
    assert hit.summary.loss.last is not None
    assert hit.summary.loss.last < 1.0


def test_a_lost_server_is_told_of_too_and_a_worker_may_go_after_it(base: Base) -> None:
    hit = base.run(Mortal(6, Death(1, 3, 2), Death(4, 7, 5)), "ps", {"servers": 3, "replicas": 1}, clip_norm=1.0)
    assert [each.source for each in hit.summary.recoveries] == ["replica", "servers"]
    assert all(each.repeated == 0 for each in hit.summary.recoveries)
    assert counted(hit) == Counter(range(1, STEPS))


@pytest.mark.parametrize("turns", [3, *rarer(range(4, 30))])
@pytest.mark.parametrize("consistency", ["ssp:1", pytest.param("bsp", marks=pytest.mark.long)])
def test_a_node_that_serves_and_works_may_go_where_there_are_replicas(consistency: str, turns: int, base: Base) -> None:
    settings = {"servers": "workers", "replicas": 1, "consistency": consistency}
    hit = base.run(Mortal(4, Death(2, 5, turns), seed=turns), "ps", settings, clip_norm=1.0)
    (healed,) = hit.summary.recoveries
    assert (healed.source, healed.repeated) == ("replica", 0)
    assert counted(hit) == Counter(range(1, STEPS))


def test_settings_are_fitted_to_the_nodes_that_are_left() -> None:
    given = {"servers": 3, "replicas": 1, "quorum": 2}
    assert fitted(given, 5) == given
    assert fitted(given, 3) == {"servers": 2, "replicas": 1, "quorum": 1}
    assert fitted(given, 2) == {"servers": 1, "replicas": 0, "quorum": 1}
    assert fitted({"servers": "workers", "replicas": 1}, 1) == {"servers": "workers", "replicas": 0}


class Returning(Mortal):
    """Some turns after a node was lost another stands at the door."""

    def __init__(self, nodes: int, *deaths: Death) -> None:
        super().__init__(nodes, *deaths)
        self._away: int | None = None
        self._wait = 40

    def drop(self, node: int) -> None:
        super().drop(node)
        self._away = node

    def changed(self) -> str | None:
        self._wait -= self._away is not None
        return f"node {self._away} is back" if self._away is not None and self._wait < 0 else None

    def all_anew(self) -> bool:
        return False

    def replace_lost(
        self, ring: str, generation: int, compact: bool, need_bytes: int, spared: Set[int] = frozenset()
    ) -> Collection[int]:
        self._away = None
        return super().replace_lost(ring, generation, compact, need_bytes, spared)


def test_a_worker_that_comes_back_is_taken_in_at_a_step_boundary(base: Base) -> None:
    hit = base.run(Returning(4, Death(3, 4)), "ps", steps=80)
    lost, back = hit.summary.recoveries
    assert (lost.lost, lost.nodes) == ((3,), 3)
    assert (back.lost, back.nodes, back.generation) == ((), 4, 2)
    assert back.step > lost.step
    assert counted(hit) == Counter(range(1, 80)), "no step is done again"
    log = list(events.read(hit.run_dir / "events.jsonl"))
    again = [each.step for each in log if isinstance(each, events.NodeStep) and each.node == 3]
    assert max(again) == 79


def test_the_last_worker_and_a_server_without_replica_mean_the_checkpoint(base: Base) -> None:
    for pool, settings in ((Mortal(2, Death(1, 6)), {}), (Mortal(4, Death(1, 6)), {"servers": 2})):
        hit = base.run(pool, "ps", settings, KeepPart(checkpoint_every=4))
        (healed,) = hit.summary.recoveries
        assert healed.source == "checkpoint"
        assert healed.step % 4 == 0
        alone = base.run(InMemoryPool(pool.nodes), "ps", settings)
        assert same(hit, alone)


def test_without_protection_the_loss_of_an_allreduce_worker_ends_the_run(base: Base) -> None:
    with pytest.raises(NodeLost, match="node 2"):
        base.run(Mortal(3, Death(2, 4)), "allreduce", keep=KeepPart(protect="off"))


# -- real processes ---------------------------------------------------------------------------------------------------


def killed(folder: Path, victim: int, *flags: object) -> dict[str, Any]:
    """A run of four processes one of which is killed, to its end."""
    process = begin(
        "train", "--nodes", 4, "--steps", 200, "--json", "--quiet", "--run-dir", folder / "run", *flags, cwd=folder
    )
    try:
        wait_for_step(folder / "run", 40, process)
        workers = workers_of(process)
        workers[victim].kill()
        out, said = process.communicate(timeout=90)
    finally:
        process.kill()
    assert process.returncode == 0, said
    assert_all_gone(list(workers.values()))
    summary: dict[str, Any] = json.loads(out)
    assert "lost, noticed within" in said
    return summary


@pytest.mark.long
def test_a_killed_allreduce_process_is_replaced_by_one_that_gets_its_state_from_a_survivor(tmp_path: Path) -> None:
    flags = "--strategy", "allreduce", "--optimizer", "adamw"
    summary = killed(tmp_path, 2, *flags)
    (healed,) = summary["recoveries"]
    assert healed["source"] == "survivors"
    assert healed["lost"] == [2]
    assert healed["repeated"] <= 1
    assert healed["notice_s"] < 1
    calm = ringtmp("train", "--nodes", 4, "--steps", 200, "--json", "--quiet", *flags, cwd=tmp_path)
    assert summary["weights_sha256"] == json.loads(calm.stdout)["weights_sha256"]


@pytest.mark.long  # in memory above; a killed process of a ring in test_healing_processes
def test_a_killed_ps_worker_process_stops_nobody_and_another_takes_its_place(tmp_path: Path) -> None:
    summary = killed(tmp_path, 3, "--strategy", "ps")
    lost, replaced = summary["recoveries"]
    assert (lost["source"], lost["lost"], lost["repeated"], lost["nodes"]) == ("servers", [3], 0, 3)
    assert lost["notice_s"] < 1
    assert lost["seconds"] < 0.1
    assert (replaced["nodes"], replaced["lost"]) == (4, [])
    log = events.read(tmp_path / "run" / "events.jsonl")
    assert Counter(each.step for each in log if isinstance(each, events.StepDone)) == Counter(range(200))
    assert summary["accuracy"] > 0.9
