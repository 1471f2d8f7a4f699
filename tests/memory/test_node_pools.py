"""What a run does when its pool changes in an awkward moment, in memory."""

from __future__ import annotations

import errno
import gc
from collections import Counter
from collections.abc import Callable, Collection, Set
from pathlib import Path
from typing import Any

import pytest

from ringtmp.config import KeepPart
from ringtmp.errors import DoesNotFit, Interrupted
from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.metrics import events
from ringtmp.run.interruption import Interruption
from ringtmp.run.record_events import unlike
from ringtmp.runtime.checkpoint import CheckpointWriter, Progress
from ringtmp.runtime.run_directory import RunDirectory
from ringtmp.runtime.stage import Stage
from ringtmp.wire.messages import Hello
from test_healing import Death, Mortal, run


class Strangers(Mortal):
    """Devices that are tried before a plan is made, as those that joined are."""

    same_machine = False


@pytest.mark.long
@pytest.mark.parametrize("turns", [1, 6, 30])
def test_a_device_lost_while_devices_are_tried_is_a_loss_like_any_other(turns: int, tmp_path: Path) -> None:
    calm = run(tmp_path / "calm", InMemoryPool(3))
    hit = run(tmp_path / "hit", Strangers(3, Death(1, 0, turns), seed=turns))
    assert hit.summary.weights_sha256 == calm.summary.weights_sha256
    assert len(hit.summary.recoveries) == 1
    starts = [each for each in events.read(hit.run_dir / "events.jsonl") if isinstance(each, events.RunStarted)]
    assert len(starts) == 1


class Short(Mortal):
    """After a loss the remaining devices have too little memory, until another one joins."""

    def __init__(self, *deaths: Death, comes: bool) -> None:
        super().__init__(3, *deaths)
        self._comes = comes
        self.paused: list[str] = []

    def replace_lost(
        self, ring: str, generation: int, compact: bool, need_bytes: int, spared: Set[int] = frozenset()
    ) -> Collection[int]:
        if not self.paused:
            raise DoesNotFit("the remaining devices are 5.0 MiB of memory short")
        return super().replace_lost(ring, generation, compact, need_bytes, spared)

    def await_another(self, why: str, leaving: Callable[[], bool]) -> bool:
        self.paused.append(why)
        return self._comes


def test_a_run_that_does_not_fit_the_survivors_pauses_until_another_comes(tmp_path: Path) -> None:
    calm = run(tmp_path / "calm", InMemoryPool(3))
    pool = Short(Death(2, 4), comes=True)
    hit = run(tmp_path / "hit", pool)
    assert pool.paused == ["the remaining devices are 5.0 MiB of memory short"]
    assert hit.summary.weights_sha256 == calm.summary.weights_sha256
    with pytest.raises(DoesNotFit, match="5.0 MiB"):
        run(tmp_path / "nobody", Short(Death(2, 4), comes=False))


def test_a_user_who_stops_a_paused_run_is_told_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Short(Death(2, 4), comes=False)
    monkeypatch.setattr(Interruption, "__call__", lambda self: bool(pool.paused))
    with pytest.raises(Interrupted, match="paused: resume with Ring\\(...\\).resume"):
        run(tmp_path / "run", pool)


class Leaving(InMemoryPool):
    """One is asked to leave after some steps."""

    def advance(self) -> bool:
        if self.nodes == 4 and self._leaving is None and any(worker.step >= 5 for worker in self._workers):
            self.release(3)
        return super().advance()


def test_a_full_disk_delays_a_change_of_the_crew_and_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm = run(tmp_path / "calm", InMemoryPool(4))
    commit, refused = CheckpointWriter.commit, Counter[str]()

    def full_once(self: CheckpointWriter) -> Any:
        refused["all"] += 1
        if refused["all"] == 2:  # the first is of the model as it was built
            raise OSError(errno.ENOSPC, "No space left on device")
        return commit(self)

    monkeypatch.setattr(CheckpointWriter, "commit", full_once)
    monkeypatch.setattr("ringtmp.run.training_loop.RETRY_S", 0.0)
    hit = run(tmp_path / "hit", Leaving(4), KeepPart())
    assert hit.summary.weights_sha256 == calm.summary.weights_sha256
    said = [each.text for each in events.read(hit.run_dir / "events.jsonl") if isinstance(each, events.Warned)]
    assert any("No space left" in each for each in said)
    assert len([each for each in events.read(hit.run_dir / "events.jsonl") if isinstance(each, events.Regrouped)]) == 1


class Failing:
    """The n-th time it is asked for, there is no room."""

    def __init__(self, made: Any, at: int) -> None:
        self._made, self._at, self._count = made, at, 0

    def __call__(self, *args: Any, **named: Any) -> Any:
        self._count += 1
        if self._count == self._at:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self._made(*args, **named)


def test_a_disk_too_full_for_a_folder_or_the_settings_costs_neither_run_nor_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm = run(tmp_path / "calm", InMemoryPool(4))
    monkeypatch.setattr("ringtmp.run.save_checkpoints.CheckpointWriter", Failing(CheckpointWriter, 1))
    full = Failing(RunDirectory.write_config, 2)  # of the healing
    monkeypatch.setattr(RunDirectory, "write_config", lambda *args: full(*args))
    hit = run(tmp_path / "hit", Mortal(4, Death(2, 6)))
    assert hit.summary.weights_sha256 == calm.summary.weights_sha256
    said = [each.text for each in events.read(hit.run_dir / "events.jsonl") if isinstance(each, events.Warned)]
    assert any("no checkpoint of step 4: No space left" in each for each in said), said
    assert any("cannot rewrite the run's settings: No space left" in each for each in said), said


def test_after_a_checkpoint_the_next_snapshot_comes_at_once(tmp_path: Path) -> None:
    """Owner and holder are lost together: the snapshot that was whole is gone, and none of its step or later counts."""

    class Both(Mortal):
        def kill(self, node: int) -> None:
            super().kill(node)
            if node == 1:
                super().kill(2)

    calm = run(tmp_path / "calm", InMemoryPool(4))
    # By hand, so that node 1 has something to lose: a ReLU alone would not be missed.
    hit = run(tmp_path / "hit", Both(4, Death(1, 8)), KeepPart(checkpoint_every=100), cuts="0-0,1-2,3-3,4-4,5-5")
    assert hit.summary.weights_sha256 == calm.summary.weights_sha256
    log = list(events.read(hit.run_dir / "events.jsonl"))
    (at,) = [index for index, each in enumerate(log) if isinstance(each, events.Regrouped)]
    assert log[at].source == "checkpoint"  # type: ignore[union-attr]
    before = [each.step for each in log[:at] if isinstance(each, events.SnapshotWhole)]
    after = [each.step for each in log[at:] if isinstance(each, events.SnapshotWhole)]
    assert before
    assert after
    assert after[0] < before[-1], "of a step that had a snapshot before"


def test_a_generation_that_ends_lets_its_layers_go_at_once(tmp_path: Path) -> None:
    gc.collect()
    gc.disable()
    try:
        run(tmp_path / "run", Mortal(4, Death(2, 4), Death(3, 8)))
        alive = [each for each in gc.get_objects() if type(each) is Stage]
        # Those of the last generation (a front, a tail and three workers) and of the two that were killed.
        assert len(alive) <= 5 + 2, f"{len(alive)} stages are still there"
    finally:
        gc.enable()


def test_whoever_computes_otherwise_is_named() -> None:
    own = {"torch": "2.13.0", "capability": "AVX2"}
    hellos = {1: Hello(1, "2.13.0", "AVX2"), 2: Hello(2, "2.13.0", "NEON"), 3: Hello(3, "2.12.0", "AVX2")}
    first, second = unlike(hellos, own).values()
    assert first.startswith("node 2 has torch 2.13.0 with NEON, the master 2.13.0 with AVX2")
    assert second.startswith("node 3")
    on_gpu = unlike({1: Hello(1, "2.13.0", "AVX2", device="NVIDIA H200")}, own)
    assert on_gpu[1].startswith("node 1 has torch 2.13.0 with NVIDIA H200, the master 2.13.0 with AVX2")


def test_a_checkpoint_that_was_never_finished_goes_with_the_next(tmp_path: Path) -> None:
    (tmp_path / ".step-00000007.4711").mkdir()
    CheckpointWriter(tmp_path, "run", Progress(9)).abandon()
    assert not list(tmp_path.iterdir())
