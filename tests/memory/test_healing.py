"""A node vanishes in mid-run, in memory: the ring heals and the bits are those of an undisturbed run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from ringtmp import api
from ringtmp.config import KeepPart, RingPart, RunConfig, TrainingPart
from ringtmp.data.tables_and_streams import from_python, tensors
from ringtmp.errors import NodeLost
from ringtmp.launch.ring_in_one_process import InMemoryPool, Wrapper
from ringtmp.metrics import events
from ringtmp.metrics.trace import chrome_trace
from ringtmp.runtime.mailbox import Endpoint
from ringtmp.strategies.ring.master import Master
from ringtmp.wire.messages import Restore
from test_training_loop import blobs, stack

STEPS = 12
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"clip_norm": 0.5, "lr_schedule": {"kind": "cosine", "total": STEPS}},
    "delayed": {"staleness": 1, "clip_norm": 0.5},
    "zero-bubble": {"schedule": "zero-bubble"},
}


class Ticking:
    """A clock that moves when it is read: the same run takes the same time on every machine."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.002
        return self.now


class Death(NamedTuple):
    node: int
    step: int  # that it has come to
    turns: int = 0  # of the pool, from there on
    generation: int = 1  # not before


class Mortal(InMemoryPool):
    """Nodes that stop without a word, one after the other."""

    def __init__(self, nodes: int, *deaths: Death, seed: int = 0, wrap: Wrapper = lambda transport: transport) -> None:
        super().__init__(nodes, seed, wrap, clock=Ticking())
        self._deaths = list(deaths)
        self._turns = 0

    def advance(self) -> bool:
        if self._deaths:
            node, step, turns, generation = self._deaths[0]
            there = any(
                each.endpoint.node == node and each.step >= step and each.endpoint.generation >= generation
                for each in self._workers
            )
            self._turns += there
            if there and self._turns > turns:
                del self._deaths[0]
                self._turns = 0
                self.kill(node)
        return super().advance()


def run(
    folder: Path,
    pool: InMemoryPool,
    keep: KeepPart | None = None,
    data: Any = None,
    watcher: Any = None,
    **training: Any,
) -> api.Result:
    schedule, cuts = training.pop("schedule", "1f1b"), training.pop("cuts", None)
    base = {"batch_size": 16, "microbatches": 4, "optimizer": "adamw", "optimizer_settings": {"lr": 0.01}}
    config = RunConfig(
        training=TrainingPart(data="given", steps=STEPS, **{**base, **training}),
        ring=RingPart(nodes=pool.nodes, schedule=schedule, all_devices=True, cuts=cuts),
        keep=keep or KeepPart(checkpoint_every=4),
    )
    data = data or (tensors("t", *blobs()), tensors("t", *blobs(30)))
    return api.start(config, stack(), data, None, run_dir=folder, watcher=watcher or api.Watcher(), pool=pool)


class Departing(InMemoryPool):
    """One dies when the last checkpoint is there, before it can be told to stop."""

    def __init__(self, nodes: int, node: int, run: Path) -> None:
        super().__init__(nodes, clock=Ticking())
        self._node, self._checkpoints, self._died = node, run / "checkpoints", False

    def advance(self) -> bool:
        if not self._died and list(self._checkpoints.glob(f"step-*{STEPS}")):
            self._died = True
            self.kill(self._node)
        return super().advance()


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.long] * (case in ("clipped", "delayed"))) for case in CASES]
)
def test_two_nodes_die_and_the_bits_are_those_of_an_undisturbed_run(case: str, tmp_path: Path) -> None:
    calm = run(tmp_path / "calm", InMemoryPool(4), **CASES[case])
    pool = Mortal(4, Death(2, 3, 5), Death(1, 7, 1))
    hit = run(tmp_path / "hit", pool, **CASES[case])
    assert len(hit.summary.recoveries) == 2
    assert hit.summary.weights_sha256 == calm.summary.weights_sha256
    assert hit.summary.loss == calm.summary.loss
    assert [each.lost for each in hit.summary.recoveries] == [(2,), (1,)]


def test_what_is_done_again_counts_once_and_is_marked_in_the_trace(tmp_path: Path) -> None:
    hit = run(tmp_path / "hit", Mortal(3, Death(1, 5)), KeepPart(protect="checkpoint"))
    (event,) = hit.summary.recoveries
    assert event.step == 0
    assert event.repeated > 0
    log = list(events.read(hit.run_dir / "events.jsonl"))
    assert sum(isinstance(each, events.StepDone) for each in log) == STEPS + event.repeated
    assert hit.summary.steps == STEPS
    for node in hit.summary.per_node:
        assert node.idle_s >= 0
    marks = [row for row in chrome_trace(log)["traceEvents"] if row["ph"] == "i"]
    assert len(marks) == 1


def test_a_loss_after_the_last_layer_was_saved_is_recorded_too(tmp_path: Path) -> None:
    calm = run(tmp_path / "calm", InMemoryPool(3))
    assert not calm.summary.recoveries
    hit = run(tmp_path / "hit", Departing(3, 2, tmp_path / "hit"))
    assert hit.summary.weights_sha256 == calm.summary.weights_sha256
    (lost,) = hit.summary.recoveries
    assert (lost.lost, lost.step, lost.repeated, lost.source) == ((2,), STEPS, 0, "checkpoint")
    assert hit.summary.steps == STEPS
    assert any("node 2 was killed" in text for text in hit.summary.warnings)


def test_a_loss_while_healing_begins_the_healing_anew(tmp_path: Path) -> None:
    calm = run(tmp_path / "calm", InMemoryPool(4))
    hit = run(tmp_path / "hit", Mortal(4, Death(2, 5), Death(3, 0, 0, 2), Death(2, 0, 3, 3)))
    assert hit.summary.weights_sha256 == calm.summary.weights_sha256
    (healed,) = hit.summary.recoveries
    assert healed.lost == (2, 3)
    assert healed.generation == 4, "one after each loss"


def test_a_node_that_always_dies_ends_the_run_with_its_name(tmp_path: Path) -> None:
    pool = Mortal(3, *[Death(1, 5)] * 20)
    with pytest.raises(NodeLost, match="node 1"):
        run(tmp_path / "hit", pool)


def test_with_protection_off_a_loss_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(NodeLost, match="node 2"):
        run(tmp_path / "hit", Mortal(3, Death(2, 2)), KeepPart(protect="off"))


def test_a_streams_batches_are_kept_until_nobody_can_ask_for_them(tmp_path: Path) -> None:
    inputs, labels = blobs(16 * STEPS)

    def stream() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for step in range(STEPS):
            part = slice(16 * step, 16 * step + 16)
            yield inputs[part], labels[part]

    calm = run(tmp_path / "calm", InMemoryPool(3), data=(from_python(stream()), None))
    hit = run(tmp_path / "hit", Mortal(3, Death(1, 6)), data=(from_python(stream()), None))
    assert len(hit.summary.recoveries) == 1
    assert hit.summary.weights_sha256 == calm.summary.weights_sha256


class DyingTogether(Mortal):
    """Others die with the first, before anybody looks."""

    def __init__(self, nodes: int, death: Death, *others: int) -> None:
        super().__init__(nodes, death)
        self._others = others

    def kill(self, node: int) -> None:
        super().kill(node)
        for other in self._others:
            super().kill(other)


@pytest.mark.parametrize("others", [(1, 3), *(pytest.param((each,), marks=pytest.mark.long) for each in (1, 3))])
def test_nodes_that_die_together_are_all_named(tmp_path: Path, others: tuple[int, ...]) -> None:
    said: list[str] = []

    class Listener(api.Watcher):
        def warn(self, text: str) -> None:
            said.append(text)

    calm = run(tmp_path / "calm", InMemoryPool(4))
    hit = run(tmp_path / "hit", DyingTogether(4, Death(2, 5, 2), *others), watcher=Listener())
    assert hit.summary.weights_sha256 == calm.summary.weights_sha256
    (healed,) = hit.summary.recoveries
    assert sorted(healed.lost) == sorted([2, *others])
    for node in healed.lost:
        assert f"node {node} was killed" in healed.reason
        assert any(f"node {node} was killed" in text for text in said)


def test_a_node_lost_while_the_ring_is_laid_out_anew_for_another_reason_is_named(tmp_path: Path) -> None:
    class Dies(InMemoryPool):
        """One dies when all are asked to lay the ring out anew, before anybody has looked."""

        asked = False

        def all_anew(self) -> bool:
            return False

        def changed(self) -> str | None:
            if self.asked or not any(each.step >= 4 for each in self._workers):
                return None
            return "somebody joined"

        def replace_lost(self, *given: Any) -> Any:
            if not self.asked:
                self.asked = True
                self.kill(2)
            return super().replace_lost(*given)

    hit = run(tmp_path / "hit", Dies(4))
    (moved,) = hit.summary.recoveries
    assert moved.lost == (2,)
    assert "somebody joined" in moved.reason
    assert "node 2 was killed" in moved.reason


def test_survivors_bring_their_layers_back_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The master waits for nobody's layers before everyone who has its own was told to take them."""
    told: list[str] = []
    post, wait = Endpoint.post, Master._until_taken

    def posted(this: Endpoint, peer: int, message: Any, *more: Any) -> None:
        told.extend(["restore"] * isinstance(message, Restore))
        post(this, peer, message, *more)

    def waiting(this: Master, *layer: int) -> None:
        told.append("wait")
        wait(this, *layer)

    monkeypatch.setattr(Endpoint, "post", posted)
    monkeypatch.setattr(Master, "_until_taken", waiting)
    healed = run(tmp_path / "healed", Mortal(4, Death(2, 9)), KeepPart(checkpoint_every=100))
    assert [each.source for each in healed.summary.recoveries] == ["snapshot"]
    restores = [at for at, each in enumerate(told) if each == "restore"]
    assert len(restores) >= 3  # the master's front and tail, and two workers
    assert "wait" not in told[restores[0] : restores[-1]]
