"""What is asked of a run while it goes on: a checkpoint, an end, a device released, a step in full; and nothing else."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from ringtmp.errors import Interrupted
from ringtmp.metrics import events
from ringtmp.metrics.step_recorder import Recorder
from ringtmp.run.what_to_train import Watcher
from ringtmp.runtime import stop_and_checkpoint_requests
from ringtmp.runtime.stop_and_checkpoint_requests import (
    CHECKPOINT,
    DETAIL,
    FRESH_S,
    PAUSE_S,
    STOP,
    Requests,
    ask,
    release,
    released,
)
from test_training_loop import train


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_each_request_is_taken_once_and_what_was_asked_before_the_run_is_forgotten(tmp_path: Path) -> None:
    ask(tmp_path, STOP)
    clock = Clock()
    requests = Requests(tmp_path, clock)
    ask(tmp_path, CHECKPOINT)
    ask(tmp_path, release(3))
    (tmp_path / "requests/format-the-disk").touch()
    assert requests.taken() == [], "a moment ago it looked"
    clock.now = PAUSE_S
    assert requests.taken() == [CHECKPOINT, release(3)]
    clock.now = 2 * PAUSE_S
    assert requests.taken() == []
    assert (released(release(3)), released(CHECKPOINT)) == (3, None)
    assert (tmp_path / "requests").stat().st_mode & 0o777 == 0o700


def test_only_what_a_run_knows_can_be_asked(tmp_path: Path) -> None:
    for request in ("../stop", "", "release-", "release-x", "release-12345678", "STOP"):
        with pytest.raises(ValueError, match=f"^{re.escape(request)}$"):
            ask(tmp_path, request)
    assert not (tmp_path / "requests").exists()


def test_detail_is_wanted_as_long_as_somebody_renews_the_wish(tmp_path: Path) -> None:
    clock = Clock()
    requests = Requests(tmp_path, clock)
    ask(tmp_path, DETAIL)
    clock.now = PAUSE_S
    assert (requests.taken(), requests.wants_detail) == ([], True)
    assert (requests.taken(), requests.wants_detail) == ([], False), "at most one step a second"
    old = time.time() - FRESH_S - 1
    os.utime(tmp_path / "requests/detail", (old, old))
    clock.now = 2 * PAUSE_S
    assert (requests.taken(), requests.wants_detail) == ([], False)


class Asking(Watcher):
    """Asks for something when so many steps are done."""

    def __init__(self, run: Path, wishes: dict[int, str]) -> None:
        self._run = run
        self._wishes = wishes

    def step(self, done: int, total: int | None, event: events.StepDone, idle: float) -> None:
        if done in self._wishes:
            ask(self._run, self._wishes[done])


def test_a_run_saves_when_asked_ends_when_asked_and_says_who_cannot_be_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop_and_checkpoint_requests, "PAUSE_S", 0.0)
    run = tmp_path / "run"
    with pytest.raises(Interrupted, match="interrupted after step 6"):
        train(run, 3, steps=50, watcher=Asking(run, {3: CHECKPOINT, 6: STOP}))
    told = list(events.of_run(run))
    assert [each.step for each in told if isinstance(each, events.CheckpointSaved)] == [3, 6]
    assert [each.outcome for each in told if isinstance(each, events.RunEnded)] == ["interrupted"]


def test_a_step_is_recorded_in_full_on_every_node_when_somebody_looks_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop_and_checkpoint_requests, "PAUSE_S", 0.0)
    monkeypatch.setattr(stop_and_checkpoint_requests, "FRESH_S", 1e9)
    run = tmp_path / "run"

    class Looking(Asking):
        def step(self, done: int, total: int | None, event: events.StepDone, idle: float) -> None:
            super().step(done, total, event, idle)
            if done == 38:
                (run / "requests/detail").unlink()

    train(run, 3, steps=44, watcher=Looking(run, {36: DETAIL}))
    steps = [each for each in events.of_run(run) if isinstance(each, events.NodeStep) and each.spans]
    full = {step: {each.node for each in steps if each.step == step} for step in {each.step for each in steps}}
    asked = {step: nodes for step, nodes in full.items() if step >= 32}
    assert set(full) - set(asked) == set(range(32)), "the first are recorded in full anyway"
    assert asked, "the steps that were asked for"
    assert set(asked) <= {37, 38, 39}
    assert {0, 1, 2} in asked.values()


def test_what_is_asked_in_the_middle_of_a_step_is_of_the_next(tmp_path: Path) -> None:
    times = iter(range(100))
    asked = -1
    recorder = Recorder(1, lambda: float(next(times)), 0, asked=lambda: asked)
    recorder.end(recorder.begin(), "forward", 0, 0)
    recorder.close_step(0, 0)
    recorder.end(recorder.begin(), "forward", 0, 0)
    asked = 1
    assert recorder.close_step(1, 0).spans == (), "half of it would be wrong"
    asked = 3
    recorder.close_step(2, 0)
    recorder.end(recorder.begin(), "forward", 0, 0)
    assert recorder.close_step(3, 0).spans
