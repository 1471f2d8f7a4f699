"""Channels keep no order among one another, and a node may sleep while others work: what overtakes what changes nothing."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ringtmp import api
from ringtmp.config import KeepPart, RingPart
from ringtmp.data.tables_and_streams import tensors
from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.runtime.checkpoint import Progress
from ringtmp.runtime.snapshot_schedule import Protection, Snapshot
from ringtmp.strategies.data_parallel import sum_over_workers
from ringtmp.transport.base import Arrival, Channel, Frame, Transport, TransportWrapper
from test_data_parallel_healing import STEPS, Base, counted, same
from test_healing import Death, Mortal
from test_training_loop import blobs, settings, stack, train


class Drifting(TransportWrapper):
    """Packets wait, in order per peer and channel, for as long as a seed will have it."""

    def __init__(self, inner: Transport, seed: int) -> None:
        super().__init__(inner)
        self._random = random.Random(seed * 100 + inner.node)
        self._waiting: dict[tuple[int, Channel], deque[list[bytes]]] = {}

    def send(self, peer: int, channel: Channel, frames: Sequence[Frame]) -> None:
        self._waiting.setdefault((peer, channel), deque()).append([bytes(frame) for frame in frames])

    def receive(self) -> list[Arrival]:
        for (peer, channel), queue in self._waiting.items():
            while queue and self._random.random() < (0.7 if channel is Channel.CONTROL else 0.2):
                self._inner.send(peer, channel, queue.popleft())
        return self._inner.receive()


class MasterFirst(TransportWrapper):
    """What the master says is read before what has come from others, as from a socket that stands first in the list."""

    def receive(self) -> list[Arrival]:
        return sorted(self._inner.receive(), key=lambda arrival: arrival.peer != 0)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Base]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sum_over_workers, "BUCKET", 32)
        yield Base(tmp_path_factory.mktemp("base"))


class Tardy(InMemoryPool):
    """A worker takes a turn only after the master has done all it can."""

    def __init__(self, nodes: int) -> None:
        super().__init__(nodes)
        self._asked = 0

    def advance(self) -> bool:
        self._asked += 1
        if self._asked % 60 == 0:
            for worker in self._workers:
                worker.turn()
        return True


def on(pool: InMemoryPool, folder: Path, ring: dict[str, Any] | None = None, **training: Any) -> api.Result:
    config = settings(pool.nodes, **training)
    config = msgspec.structs.replace(config, ring=msgspec.structs.replace(config.ring, **(ring or {})), keep=KeepPart())
    data = tensors("t", *blobs()), tensors("t", *blobs(30))
    return api.start(config, stack(), data, None, run_dir=folder, watcher=api.Watcher(), pool=pool)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_layer_is_not_sent_to_the_master_before_its_last_update(staleness: int, tmp_path: Path) -> None:
    """The master's step ends with its own update; a worker whose last gradient has only just left has still to make it."""
    whole = train(tmp_path / "whole", 1, steps=3, staleness=staleness).summary
    tardy = on(Tardy(2), tmp_path / "tardy", steps=3, staleness=staleness).summary
    assert tardy.weights_sha256 == whole.weights_sha256


@pytest.mark.parametrize("seed", range(3))
def test_norms_of_a_step_that_overlaps_the_one_before_are_sent_when_its_weight_gradients_are_done(
    seed: int, tmp_path: Path
) -> None:
    how = {"steps": 7, "staleness": 1, "clip_norm": 0.3, "microbatches": 2}
    whole = train(tmp_path / "whole", 1, **how).summary
    pool = InMemoryPool(3, seed, lambda transport: Drifting(transport, seed))
    parts = on(pool, tmp_path / "parts", {"schedule": "zero-bubble"}, **how).summary
    assert parts.weights_sha256 == whole.weights_sha256


@pytest.mark.parametrize("seed", [1, *(pytest.param(each, marks=pytest.mark.long) for each in (0, 2))])
def test_an_evaluation_that_asks_for_newer_parameters_than_the_next_step_would_gets_them(seed: int, base: Base) -> None:
    pool = InMemoryPool(5, seed, lambda transport: Drifting(transport, seed))
    done = base.run(pool, "ps", {"quorum": 2}, steps=30)
    assert set(counted(done)) == set(range(1, 30))


@pytest.mark.parametrize(
    "strategy",
    ["ps:bsp", *(pytest.param(each, marks=pytest.mark.long) for each in ("allreduce:ring", "allreduce:tree"))],
)
def test_drifting_channels_change_no_bit(strategy: str, base: Base) -> None:
    calm = base.run(InMemoryPool(4), strategy, clip_norm=1.0)
    for seed in range(3):
        pool = InMemoryPool(4, seed, lambda transport, seed=seed: Drifting(transport, seed))
        assert same(base.run(pool, strategy, clip_norm=1.0), calm), f"seed {seed}"


@pytest.mark.parametrize(
    "turns", [pytest.param(turns, marks=[pytest.mark.long] * (turns % 9 != 0)) for turns in range(3, 24, 3)]
)
@pytest.mark.parametrize("consistency", ["bsp", "async"])
def test_mail_of_a_lost_node_that_is_read_after_its_loss_is_left_alone(
    consistency: str, turns: int, base: Base
) -> None:
    given = {"servers": "workers", "replicas": 1, "consistency": consistency}
    hit = base.run(Mortal(4, Death(2, 5, turns), seed=turns, wrap=MasterFirst), "ps", given)
    assert [each.source for each in hit.summary.recoveries] == ["replica"]
    assert counted(hit) == Counter(range(1, STEPS))


@pytest.mark.parametrize(
    "turns", [pytest.param(turns, marks=[] if turns == 14 else pytest.mark.long) for turns in range(2, 30, 4)]
)
def test_a_server_lost_while_norms_are_added_up_changes_no_bit(turns: int, base: Base) -> None:
    given = {"servers": 3, "replicas": 1}
    calm = base.run(InMemoryPool(6), "ps", given, clip_norm=0.2)
    pool = Mortal(6, Death(1 + turns % 2, 4, turns), seed=turns, wrap=lambda transport: Drifting(transport, turns))
    hit = base.run(pool, "ps", given, clip_norm=0.2)
    assert [each.source for each in hit.summary.recoveries] == ["replica"]
    assert same(hit, calm)


def test_a_new_generation_does_not_write_over_the_snapshot_it_began_with() -> None:
    protection = Protection("auto")
    for _ in range(3):
        protection.step_took(0.1)
    protection.whole = Snapshot(Progress(5))
    protection.renew(5, 3)
    assert protection.unprotected, "whoever held a part of it may be the one that was lost"
    assert not protection.due(5)
    assert protection.due(6)
    protection.spoil()
    protection.renew(5, 3)
    assert protection.due(5)


@pytest.mark.parametrize("first", [0, *(pytest.param(each, marks=pytest.mark.long) for each in (1, 2, 3))])
def test_an_epoch_whose_last_step_is_done_again_ends_once(first: int, tmp_path: Path) -> None:
    """All-reduce without a test part: the epoch may have been counted before every worker had the step's last sums."""
    ring = RingPart(nodes=3, strategy="allreduce")
    data = tensors("t", *blobs()), None

    def run(name: str, pool: InMemoryPool) -> api.Result:
        config = msgspec.structs.replace(settings(3, epochs=3), ring=ring, keep=KeepPart())
        return api.start(config, stack(), data, None, run_dir=tmp_path / name, watcher=api.Watcher(), pool=pool)

    calm = run("calm", InMemoryPool(3))
    per_epoch = calm.summary.steps // 3
    for turns in range(first, 12, 4):
        hit = run(f"hit-{turns}", Mortal(3, Death(1, per_epoch - 1, turns), seed=turns))
        assert same(hit, calm), f"turns {turns}"
        saved = sorted(each.name for each in (hit.run_dir / "checkpoints").iterdir())
        assert saved == sorted(each.name for each in (calm.run_dir / "checkpoints").iterdir())
