"""Many short runs of the real session, nodes and recovery on the in-memory transport, every fault decided by one seed.

A seed decides who crashes when (also while the ring heals, also a neighbour of one just lost), which packets are lost,
doubled or out of order, and in which order nodes work. The clock moves when it is read, so a hang is a timeout.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from ringtmp import api
from ringtmp.config import KeepPart, RingPart, RunConfig, TrainingPart
from ringtmp.data.sources import tensors
from ringtmp.errors import RingError
from ringtmp.launch.memory import MemoryCrew
from ringtmp.metrics import events
from ringtmp.ring import protect
from ringtmp.ring.endpoint import Endpoint
from ringtmp.ring.keeping import Keeping
from ringtmp.ring.node import Node
from ringtmp.ring.protect import Protection
from ringtmp.ring.stage import Stage
from ringtmp.transport.base import Transport
from ringtmp.transport.shaped import Faults, Shaped
from ringtmp.wire import link
from ringtmp.wire.message import Held
from test_healing import Ticking
from test_session import blobs, stack

STEPS = 8
QUICK_S = 15.0
QUICK_SEEDS = 20
LONG_SEEDS = 2000


class Simulated(MemoryCrew):
    """Crashes and faults by a seed; watches that a layer has one owner in a generation."""

    def __init__(self, nodes: int, seed: int) -> None:
        self.luck = random.Random(seed)
        luck = self.luck
        faults = Faults(luck.choice([0, 0.02]), luck.choice([0, 0.05]), luck.choice([0, 0.1]))

        def wrap(transport: Transport) -> Transport:
            return Shaped(transport, faults, luck.randrange(10**9))

        super().__init__(nodes, seed, wrap, clock=Ticking())
        self.left = luck.randint(1, 3)
        self.crashes = 0
        self.owners: dict[tuple[int, int], int] = {}
        self._next = luck.randint(1, 200)
        self._master: Endpoint | None = None
        self.announced: tuple[int, int] | None = None  # generation and step of the last whole snapshot

    def start(self, ring: str, generation: int) -> Endpoint:
        self._master = super().start(ring, generation)
        return self._master

    def announce(self, step: int) -> None:
        assert self._master is not None
        self.announced = (self._master.generation, step)
        self.check_held()

    def check_held(self) -> None:
        """What was announced as whole can be had after the loss of any one node."""
        if self.announced is None or self._dead or self._master is None:
            return
        generation, step = self.announced
        if any(each.endpoint.generation != generation for each in self._workers):
            return
        shelves = {each.endpoint.node: each.endpoint.shelf.contents() for each in self._workers}
        shelves[0] = self._master.shelf.contents()
        for worker in self._workers:
            member = worker.member
            assert isinstance(member, Node)
            for state in member.visits.values():
                for layer, staged in state.stage._layers.items():
                    if staged.layer.tensors:
                        found = [node for node, contents in shelves.items() if (step, layer) in contents]
                        assert len(found) >= 2, f"layer {layer} of step {step} is on {found} alone"

    def advance(self) -> bool:
        self.check_held()
        self._next -= 1
        if self._next <= 0 and self.left and self._workers:
            self.left -= 1
            self.crashes += 1
            victim = self.luck.choice(self._workers).endpoint.node
            self.kill(victim)
            # Sometimes at once again: while healing, or a neighbour with what it holds.
            self._next = self.luck.choice([1, 30, 100, 300])
        worked = super().advance()
        for worker in self._workers:
            if isinstance(worker.member, Node):
                for state in worker.member.visits.values():
                    for layer in state.visit.layers:
                        key = (worker.endpoint.generation, layer)
                        owner = self.owners.setdefault(key, worker.endpoint.node)
                        assert owner == worker.endpoint.node, f"two owners of layer {layer}"
        return worked


class Base:
    """A run of one step, to be gone on with as often as one likes: its model is read only once."""

    def __init__(self, folder: Path, staleness: int) -> None:
        self.folder = folder
        training = TrainingPart(
            data="given", steps=1, batch_size=12, microbatches=3, optimizer="adamw", clip_norm=0.5, staleness=staleness
        )
        config = RunConfig(training=training, ring=RingPart(nodes=1), keep=KeepPart())
        api.start(config, stack(), self.data(), None, folder / "base", api.Silent(), MemoryCrew(1))
        self.digest = self.run("calm", MemoryCrew(3)).summary.weights_sha256

    @staticmethod
    def data() -> tuple[api.Source, None]:
        return tensors("t", *blobs()), None

    def run(self, name: str, crew: MemoryCrew, checkpoint_every: int = 100) -> api.Result:
        shutil.copytree(self.folder / "base", self.folder / name)
        changes = {"nodes": crew.nodes, "steps": STEPS, "checkpoint_every": checkpoint_every}
        try:
            return api.resume(self.folder / name, changes, self.data(), None, api.Silent(), crew)
        finally:
            for part in ("layers", "checkpoints"):
                shutil.rmtree(self.folder / name / part, ignore_errors=True)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> list[Base]:
    return [Base(tmp_path_factory.mktemp(f"staleness-{each}"), each) for each in (0, 1)]


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot whenever the one before is whole: more to go wrong, and nothing depends on measured time."""
    monkeypatch.setattr(protect, "BUDGET", 1e9)


def simulate(bases: list[Base], seed: int) -> tuple[Simulated, api.Result]:
    luck = random.Random(seed)
    base, nodes = luck.choice(bases), luck.choice([2, 3, 4])
    crew = Simulated(nodes, seed)
    whole = Protection.held

    def watched(self: Protection, message: Held, holder: int) -> bool:
        done = whole(self, message, holder)
        if done:
            assert self.whole is not None
            crew.announce(self.whole.step)
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Protection, "held", watched)
        result = base.run(f"seed-{seed}-{time.monotonic_ns()}", crew, luck.choice([3, 100]))
    summary = result.summary
    assert summary.weights_sha256 == base.digest, f"seed {seed}: other bits"
    assert summary.steps == STEPS
    log = list(events.read(result.run_dir / "events.jsonl"))
    start = max(index for index, event in enumerate(log) if isinstance(event, events.RunStarted))
    kept = [event.step for event in log[start:] if isinstance(event, events.SnapshotWhole)]
    assert kept == sorted(set(kept)), f"seed {seed}: snapshots {kept}"
    done = sum(isinstance(event, events.StepDone) for event in log[start:])
    again = sum(each.repeated for each in summary.recoveries)
    assert done == STEPS - 1 + again, f"seed {seed}: {done} steps, {again} of them again"
    shutil.rmtree(result.run_dir)
    return crew, result


def test_crashes_and_faults_by_seed_change_no_bit(bases: list[Base]) -> None:
    began, seed, healed = time.monotonic(), 0, 0
    while seed < QUICK_SEEDS or time.monotonic() - began < QUICK_S:  # a slow machine takes its time
        _, result = simulate(bases, seed)
        healed += len(result.summary.recoveries)
        seed += 1
    print(f"{seed} seeds, {healed} healings")
    assert healed >= seed // 2


@pytest.mark.long
@pytest.mark.timeout(1400)
def test_two_thousand_seeds_change_no_bit(bases: list[Base]) -> None:
    for seed in range(10_000, 10_000 + LONG_SEEDS):
        simulate(bases, seed)


class Anything(int):
    """A number that equals every other."""

    def __ne__(self, other: object) -> bool:
        return False


def no_generation_check(patch: pytest.MonkeyPatch) -> None:
    decode = link.decode_packet
    patch.setattr(link, "decode_packet", lambda frame: msgspec.structs.replace(decode(frame), generation=Anything()))


def no_holder_acknowledgement(patch: pytest.MonkeyPatch) -> None:
    """Whole as soon as the first layer is held."""
    begin = Protection.begin
    patch.setattr(Protection, "begin", lambda self, layers: begin(self, list(layers)[:1]))


def freeing_before_completion(patch: pytest.MonkeyPatch) -> None:
    take = Keeping.take

    def hasty(self: Keeping, step: int, stage: Stage) -> None:
        self._endpoint.shelf.free(step)
        take(self, step, stage)

    patch.setattr(Keeping, "take", hasty)


@pytest.mark.parametrize("mutant", [no_generation_check, no_holder_acknowledgement, freeing_before_completion])
def test_a_broken_rule_is_found_by_the_simulation(
    mutant: Callable[[pytest.MonkeyPatch], None], bases: list[Base], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    with pytest.raises((AssertionError, RingError)):
        [simulate(bases, seed) for seed in range(40)]


def test_the_same_seed_gives_the_same_story(bases: list[Base]) -> None:
    stories = []
    for _ in range(2):
        _, result = simulate(bases, 11)
        stories.append([(each.generation, each.step, each.lost, each.source) for each in result.summary.recoveries])
    assert stories[0] == stories[1]
    assert stories[0]
