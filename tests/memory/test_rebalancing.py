"""A device is not as fast as planned: when the ring is laid out anew, when it is left alone, and that no bit changes."""

from __future__ import annotations

import json
import math
import random
import re
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path as Folder
from typing import Any

import pytest
import torch
from test_lab import begin, device, devices_file, finish, needs_isolation, throttle
from torch import nn

from costs import layers
from ringtmp import api
from ringtmp.config import KeepPart, RingPart, RunConfig, TrainingPart
from ringtmp.data.tables_and_streams import tensors
from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.metrics import events
from ringtmp.model.profile import Profiler
from ringtmp.plan import when_to_rebalance
from ringtmp.plan.devices import Device, LayerCost, Link, Path
from ringtmp.plan.planner import Plan, PlanOptions, plan
from ringtmp.plan.when_to_rebalance import ASK_EVERY_S, PAUSE_S, WATCH_S, Balance, Move, at_pace
from ringtmp.run.rebalancing import Rebalancing
from ringtmp.runtime.snapshot_schedule import Protection
from ringtmp.runtime.stage import Stage
from ringtmp.strategies.ring.node import Node
from test_training_loop import blobs

DEVICES = tuple(Device(name) for name in ("desk", "shelf", "attic", "shed"))
MOVE_S = 2.0
LONG = 10**6


def model() -> list[LayerCost]:
    return layers(16, forward_s=0.002, backward_s=0.002)


def planned(devices: tuple[Device, ...] = DEVICES, keep_all: bool = True) -> Plan:
    return plan(model(), devices, PlanOptions(8, 8, process_bytes=0.0, keep_all=keep_all))


class Run:
    """A ring that reports step after step, on a clock of its own."""

    def __init__(self, made: Plan, members: tuple[int, ...] = (0, 1, 2, 3), not_before: float = 0.0) -> None:
        self.made, self.members, self.now = made, members, 0.0
        self.balance = Balance(made, DEVICES, members, not_before)

    def steps(
        self, seconds: float, factors: dict[str, float], luck: random.Random | None = None, left: int = LONG
    ) -> Move | None:
        """The first move decided on within these seconds. `luck`: noise of a fifth either way."""
        end = self.now + seconds
        while self.now < end:
            took = self.made.step_s * max(factors.values(), default=1.0)
            self.now += took
            for member, node, number in zip(self.made.devices, self.made.simulated.nodes, self.members, strict=True):
                noise = luck.uniform(0.8, 1.2) if luck is not None else 1.0
                self.balance.heard(number, self.now, node.busy_s * factors.get(member.name, 1.0) * noise)
            self.balance.step_took(self.now, took)
            if (move := self.balance.decide(self.now, left, MOVE_S)) is not None:
                return move
        return None


def test_a_device_slowed_four_times_is_noticed_and_gets_fewer_layers() -> None:
    run = Run(planned())
    assert run.steps(30, {}) is None
    slowed_at = run.now
    move = run.steps(60, {"attic": 4.0})
    assert move is not None
    assert run.now - slowed_at <= 2 * WATCH_S + ASK_EVERY_S
    assert move.reason == "attic takes 4 times as long as planned"
    before, after = (made.bounds[2][1] - made.bounds[2][0] for made in (run.made, move.plan))
    assert after < before
    best = planned(tuple(replace(each, speed=0.25) if each.name == "attic" else each for each in DEVICES))
    assert move.plan.bounds == best.bounds, "as if it had been known from the start"
    assert move.promised_s == pytest.approx(run.made.step_s * 4 * (1 - move.gain))


def test_a_device_that_becomes_faster_gets_more_layers() -> None:
    slow = tuple(replace(each, speed=0.25) if each.name == "attic" else each for each in DEVICES)
    run = Run(planned(slow))
    run.balance = Balance(run.made, slow, run.members)
    move = run.steps(60, {"attic": 0.25})
    assert move is not None
    assert move.plan.bounds == planned().bounds


def test_reports_are_told_apart_by_the_numbers_of_the_ring_not_by_their_order() -> None:
    run = Run(planned(), members=(0, 5, 2, 3))
    move = run.steps(60, {"shelf": 4.0})
    assert move is not None
    assert move.reason.startswith("shelf ")
    run.balance.heard(77, run.now, 1.0)  # somebody who has left


def test_noise_alone_moves_nothing() -> None:
    run = Run(planned())
    assert run.steps(600, {}, random.Random(1)) is None


def test_a_short_hiccup_moves_nothing() -> None:
    run = Run(planned())
    for _ in range(10):
        assert run.steps(WATCH_S, {}) is None
        assert run.steps(WATCH_S / 4, {"attic": 4.0}) is None


def test_a_forecast_wrong_for_all_alike_moves_nothing() -> None:
    run = Run(planned())
    assert run.steps(120, dict.fromkeys((each.name for each in DEVICES), 2.0)) is None


def test_a_gain_too_small_moves_nothing() -> None:
    run = Run(planned())
    assert run.steps(120, {"attic": 1.0 + when_to_rebalance.TOLERANCE + 0.01}) is None, "one layer is more than that"


def test_a_move_that_steps_to_come_do_not_repay_is_not_made() -> None:
    made = planned()
    few = int(MOVE_S / (4 * made.step_s))
    assert Run(made).steps(60, {"attic": 4.0}, left=few) is None
    assert Run(made).steps(60, {"attic": 4.0}, left=20 * few) is not None


def test_a_move_that_gave_nothing_is_blamed_unless_a_device_has_changed_since() -> None:
    run = Run(planned())
    move = run.steps(60, {"attic": 4.0})
    assert move is not None

    def kept(factors: dict[str, float], longer: float) -> bool:
        after = Run(move.plan)
        after.balance = Balance(move.plan, move.devices, after.members)
        after.steps(30, factors)
        for _ in range(1000):  # what the reports of the nodes do not explain
            after.now += 0.02
            after.balance.step_took(after.now, move.step_s * longer)
        return after.balance.kept(move)

    assert kept({}, longer=1 - move.gain)
    assert not kept({}, longer=1.0)
    assert kept({"shelf": 4.0}, longer=1.5)


def test_a_ring_left_alone_for_longer_moves_all_the_same_when_a_device_changes() -> None:
    run = Run(planned())
    run.balance.calm(1000.0)
    assert run.steps(100, {"attic": 1.4}) is None
    move = run.steps(60, {"attic": 4.0})
    assert move is not None
    assert run.now < 200
    patient = Run(planned())
    assert patient.steps(100, {"attic": 1.4}) is not None


def test_nothing_moves_before_the_pause_is_over() -> None:
    run = Run(planned(), not_before=60.0)
    move = run.steps(120, {"attic": 4.0})
    assert move is not None
    assert 60.0 <= run.now < 60.0 + ASK_EVERY_S


def test_a_device_without_layers_is_taken_to_be_as_far_off_as_the_others() -> None:
    devices = (*DEVICES[:3], Device("snail", 0.01))
    made = planned(devices, keep_all=False)
    assert [each.device for each in made.left_out] == ["snail"]
    balance = Balance(made, devices, (0, 1, 2))
    run = Run(made, (0, 1, 2))
    run.balance = balance
    move = run.steps(60, {"desk": 2.0, "shelf": 8.0, "attic": 2.0})
    assert move is not None
    assert {each.name: each.speed for each in move.devices}["snail"] == pytest.approx(0.005)


@pytest.mark.parametrize("told_s", [0.0, -1e-3, 5e-324, 4e9, 1e308])
@pytest.mark.parametrize("others", [1.0, 2.0])
def test_a_node_may_say_any_time_and_the_master_bears_it(told_s: float, others: float) -> None:
    """The run goes on; what was asked once is asked again, with other times than before."""
    run = Run(planned())
    for step in range(200):
        run.now += 0.5
        for node, number in zip(run.made.simulated.nodes, run.members, strict=True):
            run.balance.heard(number, run.now, told_s if number == 2 else node.busy_s * (others + step // 50))
        run.balance.step_took(run.now, run.made.step_s)
        move = run.balance.decide(run.now, LONG, MOVE_S)
        if move is not None:
            assert all(0 < each.speed < math.inf for each in move.devices)
            assert 0 < move.gain <= 1


def test_at_another_pace_work_around_the_layers_takes_longer_too_and_lines_do_not() -> None:
    slow = at_pace(replace(DEVICES[1], link=replace(DEVICES[1].link, message_cpu_s=0.5, up_bytes_per_s=10.0)), 4.0)
    assert (slow.speed, slow.link.message_cpu_s, slow.link.up_bytes_per_s) == (0.25, 2.0, 10.0)


def test_a_line_is_suspected_when_steps_get_longer_and_nobody_computes_longer() -> None:
    run = Run(slow_lines())
    run.balance = Balance(run.made, run.made.devices, run.members)
    assert run.steps(30, {}) is None
    assert not run.balance.suspects_lines(run.now)
    for _ in range(200):
        run.now += 0.2
        for node, number in zip(run.made.simulated.nodes, run.members, strict=True):
            run.balance.heard(number, run.now, node.busy_s)
        run.balance.step_took(run.now, 2 * run.made.step_s)
    assert run.balance.suspects_lines(run.now)
    assert run.balance.decide(run.now, LONG, MOVE_S) is None, "nobody strays"
    run.balance.lines_found(run.now, {1: (1e6, 1e6), 2: (1e5, 1e6), 3: (2e6, 1e6)})
    assert not run.balance.suspects_lines(run.now), "that is what steps take now"
    move = run.balance.decide(run.now + 5, LONG, MOVE_S)
    assert move is not None
    assert move.reason == "the link of attic carries 10% of what it used to"
    assert [each.link.down_bytes_per_s for each in move.devices] == [math.inf, 1e6, 1e5, 1e6]


def test_lines_that_carry_what_they_did_move_nothing_and_are_not_tried_again_at_once() -> None:
    run = Run(slow_lines())
    run.balance = Balance(run.made, run.made.devices, run.members)
    assert run.steps(30, {}) is None
    run.balance.lines_found(run.now, dict.fromkeys((1, 2, 3), (0.9e6, 3e6)))
    assert run.balance.decide(run.now + ASK_EVERY_S + 1, LONG, MOVE_S) is None


def test_a_slower_way_to_the_master_is_not_taken_for_a_slower_line() -> None:
    """A device behind a slow way to the master, with a good line of its own: what is tried from there is that way."""
    usual, names = slow_lines(), [each.name for each in DEVICES]
    way = {("desk", "attic"): Path(1e5, 0.0), ("attic", "desk"): Path(1e5, 0.0)}
    made = plan(usual.layers, usual.devices, usual.options, way)
    run = Run(made, tuple(names.index(each.name) for each in made.devices))
    run.balance = Balance(made, usual.devices, run.members)
    assert run.steps(30, {}) is None
    run.balance.lines_found(run.now, {1: (1e6, 1e6), 2: (1e5, 1e5), 3: (1e6, 1e6)})
    assert run.balance.decide(run.now + ASK_EVERY_S + 1, LONG, MOVE_S) is None, "as it was"
    run.balance.lines_found(run.now, {1: (1e6, 1e6), 2: (1e4, 1e5), 3: (1e6, 1e6)})
    assert run.balance._slow_line == "the link of attic carries 10% of what it used to"
    assert run.balance._paths["desk", "attic"] == Path(1e4, 0.0)
    assert {each.link.down_bytes_per_s for each in run.balance._everyone[1:]} == {1e6}


def slow_lines() -> Plan:
    """Workers with lines of a megabyte a second, and layers of which some give much less than others."""
    lines = tuple(replace(each, link=Link(1e6, 1e6)) if number else each for number, each in enumerate(DEVICES))
    made = [
        replace(each, measured=(replace(each.measured[0], output_bytes=4000.0 if number % 5 else 400.0),))
        for number, each in enumerate(model())
    ]
    return plan(made, lines, PlanOptions(8, 8, process_bytes=0.0, keep_all=False))


# -- the real session, nodes and snapshots, in memory ----------------------------------------------------------------------

STEPS = 45
LAYER_S = 0.05


class Clock:
    """Moves when a layer is computed, and a little when it is read."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now


class Throttled(InMemoryPool):
    """From a step on, one node takes four times as long for each of its layers."""

    def __init__(self, nodes: int, slow: int = 2, step: int = 20) -> None:
        self.clock = Clock()
        super().__init__(nodes, clock=self.clock)
        self.slow, self.step = slow, step
        self.layers: dict[int, int] = {}  # by generation, on the slow node
        self.stage: Stage | None = None

    def advance(self) -> bool:
        for worker in self._workers:
            if worker.endpoint.node == self.slow and isinstance(worker.member, Node):
                self.stage = next(iter(worker.member.visits.values())).stage
                self.layers[worker.endpoint.generation] = len(self.stage.visit.layers)
        return super().advance()


@pytest.fixture
def throttled(monkeypatch: pytest.MonkeyPatch) -> Throttled:
    """Layers that take LAYER_S each, in the forecast and on the pool's clock."""
    cost, forward, pool = Profiler.cost, Stage.forward, Throttled(3)

    def alike(self: Profiler, built: Any) -> LayerCost:
        real = cost(self, built)
        measured = tuple(replace(each, forward_s=LAYER_S, backward_s=0.0) for each in real.measured)
        return replace(real, measured=measured, update_s=0.0)

    def slowly(self: Stage, microbatch: int, step: int, *rest: Any) -> list[torch.Tensor]:
        slow = self is pool.stage and step >= pool.step
        pool.clock.now += len(self.visit.layers) * LAYER_S * (4 if slow else 1)
        return forward(self, microbatch, step, *rest)

    monkeypatch.setattr(Profiler, "cost", alike)
    monkeypatch.setattr(Stage, "forward", slowly)
    monkeypatch.setattr(when_to_rebalance, "REPAID", 0.0)  # steps take real time, and little of it
    return pool


def deep() -> nn.Sequential:
    torch.manual_seed(2)
    inner = [part for _ in range(3) for part in (nn.Linear(8, 8), nn.Dropout(0.1))]
    return nn.Sequential(nn.Linear(6, 8), *inner, nn.Linear(8, 3))


def train(
    folder: Folder, pool: InMemoryPool, staleness: int = 0, keep: KeepPart | None = None, **ring: Any
) -> api.Result:
    training = TrainingPart(
        data="given", steps=STEPS, batch_size=16, microbatches=2, clip_norm=0.5, staleness=staleness
    )
    config = RunConfig(training=training, ring=RingPart(nodes=pool.nodes, **ring), keep=keep or KeepPart())
    return api.start(
        config, deep(), (tensors("t", *blobs()), None), None, run_dir=folder, watcher=api.Watcher(), pool=pool
    )


@pytest.mark.parametrize(
    ("source", "how"),
    [
        ("snapshot", {}),
        pytest.param("snapshot", {"staleness": 1}, marks=pytest.mark.long),
        ("checkpoint", {"keep": KeepPart(protect="off")}),
    ],
)
def test_a_throttled_node_gets_fewer_layers_and_the_bits_stay(
    source: str, how: dict[str, Any], throttled: Throttled, tmp_path: Folder
) -> None:
    calm = train(tmp_path / "calm", InMemoryPool(1), **how)
    hit = train(tmp_path / "hit", throttled, **how)
    assert hit.summary.weights_sha256 == calm.summary.weights_sha256
    assert hit.summary.steps == STEPS
    (moved,) = hit.summary.recoveries
    assert (moved.kind, moved.source) == ("rebalanced", source)
    assert moved.reason.startswith("node 2 takes ")
    assert throttled.layers[moved.generation] < throttled.layers[1]
    log = list(events.read(hit.run_dir / "events.jsonl"))
    assert sum(isinstance(each, events.StepDone) for each in log) == STEPS + moved.repeated


def test_lines_tried_between_steps_change_no_bit(tmp_path: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    calm = train(tmp_path / "calm", InMemoryPool(1))
    tried: list[dict[int, tuple[float, float]]] = []

    def at_rest(self: Rebalancing, leader: Any, protection: Protection) -> bool:
        if protection.quiet and len(tried) < 3:
            tried.append(leader.try_lines())
        return True

    monkeypatch.setattr(Rebalancing, "at_rest", at_rest)
    hit = train(tmp_path / "hit", InMemoryPool(3), rebalance=False)
    assert hit.summary.weights_sha256 == calm.summary.weights_sha256
    assert tried
    assert all(set(rates) == {1, 2} and min(map(min, rates.values())) > 0 for rates in tried)


@pytest.mark.parametrize("how", [{"rebalance": False}, {"cuts": "0-1,2-4,5-6,7"}])
def test_a_ring_told_not_to_or_cut_by_hand_stays_as_it_is(
    how: dict[str, Any], throttled: Throttled, tmp_path: Folder
) -> None:
    assert train(tmp_path / "hit", throttled, **how).summary.recoveries == ()


# -- emulated devices ------------------------------------------------------------------------------------------------------

BEFORE_S, AFTER_S, REBALANCED_S = 30.0, 20.0, 90.0
MODEL = ["--set", "depth=16", "--set", "width=512", "--batch-size", 128, "--seed", 3]


class Lab:
    """A run on four emulated devices, looked at through the events it writes."""

    def __init__(self, folder: Folder, attic: float, *flags: str) -> None:
        self.folder = folder
        folder.mkdir()
        shares = {"desk": 0.4, "shelf": 0.4, "attic": attic, "shed": 0.4}
        file = devices_file(folder, *(device(name, cpu) for name, cpu in shares.items()))
        words = ["train", "--all-devices", *MODEL, *flags, "--steps", 10**6, "--run-dir", "run"]
        self.process = begin("lab", "--devices", file, "--", *words, cwd=folder)

    def events(self) -> list[Any]:
        log = self.folder / "run" / "events.jsonl"
        return list(events.read(log)) if log.exists() else []

    def step_s(self, since: float, seconds: float) -> float:
        """The median of the steps that end in so many seconds from a moment on."""

        def steps() -> list[events.StepDone]:
            return [each for each in self.events() if isinstance(each, events.StepDone) and each.at > since]

        self.until(lambda: [each for each in steps() if each.at > since + seconds], seconds + 60)
        return statistics.median(each.wall_s for each in steps())

    def until(self, true: Callable[[], Any], limit_s: float) -> Any:
        limit = time.monotonic() + limit_s
        while not (found := true()):
            assert self.process.poll() is None, f"ended too early: {self.process.communicate()}"
            told = [f"{each.at:.0f}: {each.reason}" for each in self.moves()]
            assert time.monotonic() < limit, f"not within {limit_s:.0f} s, at {limit:.0f}: {self.layers()} {told}"
            time.sleep(0.2)
        return found

    def layers(self) -> list[str]:
        return [
            f"{each.generation}: {each.node} {', '.join(part.split()[0] for part in each.segments)}"
            for each in self.events()
            if isinstance(each, events.NodeStarted)
        ]

    def moves(self) -> list[events.Regrouped]:
        return [each for each in self.events() if isinstance(each, events.Regrouped)]

    def moves_since(self, at: float) -> list[events.Regrouped]:
        """Because of the device that was throttled."""
        slower = re.compile(r"attic (?:takes )?([\d.]+) times")
        found = [(each, slower.search(each.reason)) for each in self.moves() if each.at > at]
        return [each for each, match in found if match is not None and float(match[1]) > 1.5]

    def settle(self) -> None:
        """Devices measured while the machine was busy with something else move before, and then a pause begins."""
        self.until(lambda: not (moves := self.moves()) or time.monotonic() > moves[-1].at + PAUSE_S - 15, 150)

    def first_step(self) -> float:
        found = self.until(lambda: [each for each in self.events() if isinstance(each, events.StepDone)], 90)
        return float(found[0].at)

    def end(self) -> None:
        """On whatever way out."""
        if self.process.poll() is None:
            self.process.terminate()
            self.process.communicate(timeout=90)

    def stop(self) -> str:
        """Returns what was said."""
        self.process.send_signal(signal.SIGINT)
        return finish(self.process, 130)[1]


@needs_isolation
@pytest.mark.nightly  # in memory: test_a_throttled_node_gets_fewer_layers_and_the_bits_stay
@pytest.mark.alone
@pytest.mark.timeout(1200)
def test_a_device_throttled_four_times_is_rebalanced_within_90_s_to_85_percent_of_the_best(tmp_path: Folder) -> None:
    slowed = Lab(tmp_path / "slowed", 0.4)
    try:
        before_s = slowed.step_s(slowed.first_step(), BEFORE_S)
        slowed.settle()
        throttle(slowed.process.pid, "attic", 0.1)
        throttled_at = time.monotonic()
        moved = slowed.until(lambda: slowed.moves_since(throttled_at), REBALANCED_S)[0]
        after_s = slowed.step_s(moved.at + 3, AFTER_S)
        said = slowed.stop()
    finally:
        slowed.end()
    during_s = statistics.median(
        each.wall_s
        for each in slowed.events()
        if isinstance(each, events.StepDone) and throttled_at + 1 < each.at < moved.at
    )
    known = Lab(tmp_path / "known", 0.1, "--no-rebalance")
    try:
        best_s = known.step_s(known.first_step() + 3, AFTER_S)
        known.stop()
    finally:
        known.end()
    print(
        f"a step took {before_s:.3f} s, throttled {during_s:.3f} s, rebalanced {after_s:.3f} s, with a plan for the slowed "
        f"device from the start {best_s:.3f} s; moved {moved.at - throttled_at:.1f} s after it was slowed, in "
        f"{moved.seconds:.1f} s, {moved.repeated} steps again, from a {moved.source}; layers {slowed.layers()} and "
        f"{known.layers()}"
    )
    assert moved.kind == "rebalanced"
    assert f"rebalanced: {moved.reason}" in said
    assert best_s / after_s >= 0.85
    steps = max(each.step for each in slowed.events() if isinstance(each, events.StepDone)) + 1
    flags = ["--nodes", 1, "--threads", 1, "--steps", steps, "--json"]
    resumed = begin("train", "--resume", "run", "--nodes", 1, "--steps", steps, "--json", cwd=tmp_path / "slowed")
    alone = begin("train", *MODEL, *flags, "--run-dir", "alone", cwd=tmp_path)
    assert (
        json.loads(finish(resumed)[0])["weights_sha256"]
        == json.loads(alone.communicate(timeout=300)[0])["weights_sha256"]
    )
