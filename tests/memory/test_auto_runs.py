"""`--strategy auto` in whole runs: what is chosen is trained, recorded, healed and kept on resume, with the bits asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ringtmp import api
from ringtmp.config import KeepPart, RingPart, RunConfig, TrainingPart
from ringtmp.data.tables_and_streams import tensors
from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.metrics import events
from ringtmp.metrics.events import RunStarted
from ringtmp.plan.devices import Device, Link
from ringtmp.plan.memory_forecast import PROCESS_BYTES
from ringtmp.strategies.ring import device_trials
from ringtmp.wire.messages import Timed
from test_healing import Death, Mortal
from test_training_loop import blobs


class Described(Mortal):
    """Its devices are as slow, and their lines as fast, as a test wants them."""

    def __init__(self, nodes: int, speed: float, rate: float, *deaths: Death) -> None:
        super().__init__(nodes, *deaths)
        self._speed, self._rate = speed, rate

    def devices(self) -> tuple[Device, ...]:
        return tuple(replace(each, speed=self._speed, link=Link(self._rate, self._rate)) for each in super().devices())


class Strangers(Described):
    same_machine = False

    def alone(self) -> None:
        return None


def heavy() -> nn.Sequential:
    """One layer has nearly all the work, so that a ring cannot share it."""
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 600), nn.Tanh(), nn.Linear(600, 600), nn.Tanh(), nn.Linear(600, 3))


def train(folder: Path, pool: InMemoryPool, watcher: api.Watcher | None = None, **given: Any) -> api.Result:
    training = {key: given.pop(key) for key in ("sum_tree", "steps", "staleness") if key in given}
    config = RunConfig(
        training=TrainingPart(**{
            "data": "given", "steps": 6, "batch_size": 24, "microbatches": 8, "optimizer_settings": {"lr": 0.01}, **training,
        }),
        ring=RingPart(**{"nodes": pool.nodes, "strategy": "auto", **given}),
        keep=KeepPart(checkpoint_every=2),
    )  # fmt: skip
    return api.start(config, heavy(), data(), None, run_dir=folder, watcher=watcher or api.Watcher(), pool=pool)


def data() -> Any:
    return tensors("t", *blobs()), tensors("t", *blobs(30))


class Listening(api.Watcher):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def expect(self, lines: Any) -> None:
        self.lines += lines


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str | None]:
    folder = tmp_path_factory.mktemp("one")
    return {
        parts: train(folder / str(parts), InMemoryPool(1), strategy="ring", sum_tree=parts).summary.weights_sha256
        for parts in (1, 4)
    }


@pytest.mark.parametrize("deaths", [(), (Death(2, 3, 2),)], ids=["calm", "a node dies"])
def test_copies_of_the_model_are_chosen_with_leave_and_keep_the_bits_of_one_process(
    deaths: tuple[Death, ...], tmp_path: Path, one_process: dict[int, str | None]
) -> None:
    seen = Listening()
    done = train(tmp_path / "run", Described(4, 1e-4, 1e12, *deaths), seen, sum_tree=4, share_data=True).summary
    assert done.strategy in ("ps", "allreduce")
    assert len(done.recoveries) == len(deaths)
    assert (done.exactness, done.weights_sha256) == ("bits", one_process[4])
    assert done.strategy_chosen.startswith(f"auto: {done.strategy}:")
    assert "inputs and labels leave the master" in done.strategy_chosen
    assert seen.lines[0] == done.strategy_chosen
    taken = {each.strategy: each for each in done.considered}
    assert taken["ring"].step_s is not None
    assert taken["allreduce:ring"].problem.startswith("--sum-tree 4 keeps the bits")
    first, *_ = (each for each in events.read(tmp_path / "run" / "events.jsonl") if isinstance(each, RunStarted))
    assert first.config["ring"]["strategy"] == done.strategy

    again = {"strategy": "auto", "share_data": True, "steps": 8}
    longer = api.resume(tmp_path / "run", again, data(), pool=Described(4, 1.0, 1.0)).summary
    assert longer.strategy == done.strategy, "the devices are others now, and the choice is kept"
    assert longer.steps == 8
    assert longer.strategy_chosen == done.strategy_chosen


def test_over_slow_lines_the_master_trains_alone_and_the_others_go_home(
    tmp_path: Path, one_process: dict[int, str | None]
) -> None:
    pool = Described(3, 1.0, 10.0)
    done = train(tmp_path / "run", pool).summary
    assert pool.nodes == done.nodes == len(done.per_node) == 1
    assert done.strategy == "ring"
    assert done.strategy_chosen.startswith("auto: master alone, about ")
    assert done.weights_sha256 == one_process[1]
    saved = api.settings_of(tmp_path / "run", {"strategy": "auto", "nodes": 3})
    assert saved.ring.nodes == 1


@pytest.mark.parametrize(
    "deaths", [(), pytest.param((Death(2, 0, 0), Death(1, 0, 3, 2)), marks=pytest.mark.long)], ids=["calm", "nodes die"]
)
def test_devices_that_joined_are_tried_before_the_choice_and_once(
    deaths: tuple[Death, ...], tmp_path: Path, one_process: dict[int, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_trials, "timed", lambda sample, frozen_bytes: Timed(0.01, PROCESS_BYTES, 2**40))
    phases: list[str] = []

    class Noting(api.Watcher):
        def phase(self, text: str) -> None:
            phases.append(text)

    done = train(tmp_path / "run", Strangers(3, 1.0, 1e9, *deaths), Noting(), sum_tree=4).summary
    assert done.strategy == "ring"
    assert done.weights_sha256 == one_process[4]
    order = [each for each in phases if each in ("measuring the devices", "choosing a strategy")]
    assert order[-1] == "choosing a strategy"
    assert order.count("choosing a strategy") == 1
    if not deaths:
        assert order == ["measuring the devices", "choosing a strategy"]


@pytest.mark.long
def test_with_leave_to_delay_gradients_the_run_is_one_with_staleness(tmp_path: Path) -> None:
    done = train(tmp_path / "run", Described(3, 1e-4, 1e12), any_bits=True).summary
    by_hand = train(tmp_path / "hand", Described(3, 1e-4, 1e12), strategy="ring", staleness=done.staleness).summary
    assert done.weights_sha256 == by_hand.weights_sha256
    assert done.strategy_chosen.startswith("auto: ring:staleness=1") == (done.staleness == 1)
