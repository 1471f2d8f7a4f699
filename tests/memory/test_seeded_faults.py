"""Many short runs of the real session, nodes and recovery on the in-memory transport, every fault decided by one seed.

A seed decides who crashes when (also while the ring heals, also a neighbour of one just lost), which packets are lost,
doubled, out of order or come when their sender is long dead, which lines are cut, in one direction or both, for a while
or for good, and in which order nodes work. The clock moves when it is read and jumps when all wait, so a hang is a timeout.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from ringtmp import api
from ringtmp.config import KeepPart, RingPart, RunConfig, TrainingPart
from ringtmp.data.tables_and_streams import tensors
from ringtmp.errors import RingError
from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.metrics import events
from ringtmp.run.check_settings import resolve
from ringtmp.run.interruption import Interruption
from ringtmp.run.session import Session
from ringtmp.run.what_to_train import Job
from ringtmp.runtime import snapshot_schedule
from ringtmp.runtime.losses import cross_entropy
from ringtmp.runtime.mailbox import Endpoint
from ringtmp.runtime.run_directory import RunDirectory
from ringtmp.runtime.snapshot_schedule import Protection
from ringtmp.runtime.stage import Stage
from ringtmp.strategies.ring.exchange_snapshots import NodeSnapshots
from ringtmp.strategies.ring.node import Node
from ringtmp.transport.base import Channel, Frame, Transport
from ringtmp.transport.faults import Faults, Severed, Shaped
from ringtmp.wire import reliable_link
from ringtmp.wire.messages import Held

STEPS = 4
QUICK_SEEDS = 90
#: 20,000 in all: 3,000 in `make long`, the rest in `make nightly`.
PART_SEEDS, LONG_PARTS, NIGHTLY_PARTS = 500, 1, 40
MEMORY_BYTES = 2**30
#: Front, workers and tail; the third layer is a Dropout, of which there is nothing to keep.
CUTS = {2: ("0,1-3,4", "0-1,2-3,4"), 3: ("0,1,2-3,4", "0,1-2,3,4"), 4: ("0,1,2,3,4",)}


class Clock:
    """Moves a little when it is read: work takes the same time on every machine."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.0005
        return self.now


class Line(Severed):
    """A node's end of the network: some lines are cut, waiting takes no time, and what was sent is remembered."""

    def __init__(self, inner: Transport, pool: Simulated) -> None:
        super().__init__(inner, pool.cuts)
        self._node_pool = pool
        self.last: deque[tuple[int, Channel, list[bytes]]] = deque(maxlen=4)

    def send(self, peer: int, channel: Channel, frames: Sequence[Frame]) -> None:
        self._node_pool.story.update(f"{self.node}>{peer}.{channel}.{len(frames)};".encode())
        self.last.append((peer, channel, [bytes(frame) for frame in frames]))
        super().send(peer, channel, frames)

    def wait(self, timeout_s: float) -> bool:
        if not super().wait(0):
            self._node_pool.clock.now += 5 * timeout_s
        return True


class Simulated(InMemoryPool):
    """Faults by a seed; watches that a layer has one owner in a generation."""

    def __init__(self, nodes: int, seed: int) -> None:
        self.luck = luck = random.Random(seed)
        self.clock, self.cuts, self.story = Clock(), set[tuple[int, int]](), hashlib.sha256()
        self.faults: Counter[str] = Counter()
        self._lines: dict[int, Line] = {}
        faults = Faults(luck.choice([0, 0.02]), luck.choice([0, 0.05]), luck.choice([0, 0.1]))

        def wrap(transport: Transport) -> Transport:
            self._lines[transport.node] = made = Line(transport, self)
            return Shaped(made, faults, luck.randrange(10**9))

        super().__init__(nodes, seed, wrap, clock=self.clock, memory_bytes=MEMORY_BYTES)
        self._left = luck.randint(1, 3)  # faults to come
        self._next = luck.randint(1, 80)  # turns until then
        self._due: list[tuple[int, Callable[[], None]]] = []  # what a fault does later
        self._turns = 0
        self.owners: dict[tuple[int, int], int] = {}
        self._master: Endpoint | None = None
        self.announced: tuple[int, int] | None = None  # generation and step of the last whole snapshot
        self.whole: list[int] = []  # the steps of all of them

    def start(self, ring: str, generation: int) -> Endpoint:
        self._master = super().start(ring, generation)
        return self._master

    def _make(self, node: int, ring: str, generation: int) -> None:
        """Another device in this place: it reaches the master."""
        self.cuts -= {(0, node), (node, 0)}
        super()._make(node, ring, generation)

    # -- faults -------------------------------------------------------------------------------------------------------

    def _fault(self) -> None:
        kind = self.luck.choices(["crash", "cut", "pair", "master"], [66, 24, 5, 5])[0]
        workers = [worker.endpoint.node for worker in self._workers]
        if kind == "pair" and len(workers) > 1:
            one, other = self.luck.sample(workers, 2)
            self.cuts |= {(one, other), *([(other, one)] if self.luck.random() < 0.5 else [])}
        elif kind == "master" and workers:
            ends = [0, self.luck.choice(workers)]
            self.luck.shuffle(ends)
            self.cuts.add((ends[0], ends[1]))
        elif kind == "cut":
            one, other = self.luck.sample(range(self.nodes), 2)
            lines = {(one, other), *([(other, one)] if self.luck.random() < 0.5 else [])} - self.cuts
            self.cuts |= lines
            self._later(self.luck.choice([5, 50, 200]), lambda: self.cuts.difference_update(lines))
        elif workers:
            kind = "crash"
            self._crash(self.luck.choice(workers))
        else:
            return
        self.faults[kind] += 1

    def _crash(self, node: int) -> None:
        old = self._lines[node]
        last = list(old.last)
        self.kill(node)

        def zombie() -> None:
            for peer, channel, frames in last:
                old.send(peer, channel, frames)

        self._later(self.luck.choice([1, 20, 100]), zombie)

    def _later(self, turns: int, what: Callable[[], None]) -> None:
        self._due.append((self._turns + turns, what))

    def advance(self) -> bool:
        self.check_held()
        self._turns += 1
        self._next -= 1
        for each in [each for each in self._due if each[0] <= self._turns]:
            self._due.remove(each)
            each[1]()
        if self._next <= 0 and self._left:
            self._left -= 1
            self._fault()
            # Sometimes at once again: while healing, or a neighbour with what it holds.
            self._next = self.luck.choice([1, 15, 50, 150])
        worked = super().advance()
        self.check_owners()
        return worked

    # -- what must hold -----------------------------------------------------------------------------------------------

    def announce(self, step: int) -> None:
        assert self._master is not None
        self.announced = (self._master.generation, step)
        self.whole.append(step)
        self.check_held()

    def check_held(self) -> None:
        """What was announced as whole can be had after the loss of any one node."""
        if self.announced is None or self._dead or self._master is None:
            return
        generation, step = self.announced
        if any(each.endpoint.generation != generation for each in self._workers):
            return
        shelves = {each.endpoint.node: each.endpoint.snapshots.contents() for each in self._workers}
        shelves[0] = self._master.snapshots.contents()
        for worker in self._workers:
            for state in worker.member.visits.values() if isinstance(worker.member, Node) else ():
                for layer, staged in state.stage._layers.items():
                    if staged.layer.tensors:
                        found = [node for node, contents in shelves.items() if (step, layer) in contents]
                        assert len(found) >= 2, f"layer {layer} of step {step} is on {found} alone"

    def check_owners(self) -> None:
        for worker in self._workers:
            for state in worker.member.visits.values() if isinstance(worker.member, Node) else ():
                for layer in state.visit.layers:
                    owner = self.owners.setdefault((worker.endpoint.generation, layer), worker.endpoint.node)
                    assert owner == worker.endpoint.node, f"two owners of layer {layer}"


class Base:
    """A run of no step, to be gone on with as often as one likes: its model is read only once."""

    def __init__(self, folder: Path, staleness: int) -> None:
        self.folder = folder
        self.training = training = TrainingPart(
            data="given", steps=STEPS, batch_size=4, microbatches=2, optimizer="adamw", clip_norm=0.5, staleness=staleness,
            optimizer_settings={"lr": 0.01}, lr_schedule={"kind": "cosine", "total": STEPS},
        )  # fmt: skip
        config = RunConfig(training=msgspec.structs.replace(training, steps=1), ring=RingPart(), keep=KeepPart())
        torch.manual_seed(2)
        model = nn.Sequential(
            nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.1), nn.Linear(5, 5), nn.Linear(5, 3)
        )  # fmt: skip
        self.data = tensors("t", torch.randn(24, 4), torch.arange(24) % 3), None
        api.start(config, model, self.data, None, run_dir=folder / "base", watcher=api.Watcher(), pool=InMemoryPool(1))
        for step in (folder / "base" / "checkpoints").glob("step-*1"):
            shutil.rmtree(step)  # back to step 0
        self.digest = self.run("calm", InMemoryPool(3, memory_bytes=MEMORY_BYTES)).summary.weights_sha256

    def run(self, name: str, pool: InMemoryPool, checkpoint_every: int = 100, cuts: str | None = None) -> api.Result:
        """The result of a run whose folder is still there."""
        base, own = self.folder / "base", self.folder / name
        (own / "checkpoints").mkdir(parents=True)
        (own / "layers").symlink_to(base / "layers")
        for step in (base / "checkpoints").iterdir():
            shutil.copytree(step, own / "checkpoints" / step.name, copy_function=os.link)
        shutil.copy(base / "config.json", own)
        (own / "logs").mkdir()
        cuts = cuts or CUTS[pool.nodes][0]
        keep = KeepPart(checkpoint_every=checkpoint_every)
        config = RunConfig(
            training=self.training, ring=RingPart(nodes=pool.nodes, cuts=cuts, schedule="1f1b"), keep=keep
        )
        job = Job(resolve(config), None, *self.data, cross_entropy, "cross_entropy", RunDirectory(own))
        Session(job, pool, api.Watcher(), Interruption()).train()
        return api.Result(own)


def bases_in(folder: Path) -> list[Base]:
    made = []
    for staleness in (0, 1):
        (folder / str(staleness)).mkdir()
        made.append(Base(folder / str(staleness), staleness))
    return made


def memory_folder() -> str:
    """Disks are slow, and not what is tested."""
    return tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None, prefix="rt-")


@pytest.fixture(scope="module")
def bases() -> Iterator[list[Base]]:
    folder = memory_folder()
    yield bases_in(Path(folder))
    shutil.rmtree(folder)


def snapshots_often(patch: pytest.MonkeyPatch) -> None:
    """From the second step on, whenever the one before is whole: more to go wrong, and no matter what time it takes."""
    patch.setattr(snapshot_schedule, "BUDGET", 1e9)
    patch.setattr(snapshot_schedule, "FIRST_AFTER", 1)


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshots_often(monkeypatch)


def simulate(bases: list[Base], seed: int) -> tuple[Simulated, api.Result]:
    luck = random.Random(seed)
    base, nodes = luck.choice(bases), luck.choice([2, 3, 4])
    pool = Simulated(nodes, seed)
    whole = Protection.held

    def watched(self: Protection, message: Held, holder: int) -> bool:
        done = whole(self, message, holder)
        if done:
            assert self.whole is not None
            pool.announce(self.whole.step)
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Protection, "held", watched)
        name = f"seed-{seed}-{time.monotonic_ns()}"
        try:
            result = base.run(name, pool, luck.choice([2, 100, 100]), luck.choice(CUTS[nodes]))
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
    summary = result.summary
    assert summary.weights_sha256 == base.digest, f"seed {seed}: other bits"
    assert summary.steps == STEPS
    log = list(events.read(result.run_dir / "events.jsonl"))
    recorded = [event.step for event in log if isinstance(event, events.SnapshotWhole)]
    assert recorded == pool.whole, f"seed {seed}: snapshots {recorded} are recorded, and whole were {pool.whole}"
    for kept in _snapshots(log):
        assert kept == sorted(set(kept)), f"seed {seed}: snapshots {kept}"
    done = sum(isinstance(event, events.StepDone) for event in log)
    again = sum(each.repeated for each in summary.recoveries)
    assert done == STEPS + again, f"seed {seed}: {done} steps, {again} of them again"
    shutil.rmtree(result.run_dir)
    return pool, result


def _snapshots(log: list[events.Event]) -> list[list[int]]:
    """Steps of the whole ones. Where one was lost with those who held it, the run goes back behind it, and its step may have
    another."""
    stretches: list[list[int]] = [[]]
    for event in log:
        if isinstance(event, events.SnapshotWhole):
            stretches[-1].append(event.step)
        elif isinstance(event, events.Regrouped) and stretches[-1] and event.step < stretches[-1][-1]:
            assert event.source == "checkpoint"
            stretches.append([])
    return stretches


class Tally:
    """What many seeds brought about."""

    def __init__(self) -> None:
        self.seeds = self.healings = 0
        self.faults: Counter[str] = Counter()
        self.failed: list[str] = []

    def add(self, bases: list[Base], seed: int) -> None:
        """One that fails does not keep the others from being tried."""
        self.seeds += 1
        try:
            pool, result = simulate(bases, seed)
        except Exception as error:
            self.failed.append(f"seed {seed}: {type(error).__name__}: {str(error).splitlines()[0]}")
            return
        self.healings += len(result.summary.recoveries)
        self.faults += pool.faults


def check(bases: list[Base], seeds: Iterable[int]) -> None:
    tally, began = Tally(), time.process_time()
    for seed in seeds:
        tally.add(bases, seed)
    print(f"{tally.seeds} seeds, {tally.healings} healings, {tally.faults}, {time.process_time() - began:.1f} s")
    assert not tally.failed, f"{len(tally.failed)} of {tally.seeds}:\n" + "\n".join(tally.failed)
    assert tally.healings >= tally.seeds // 3
    assert all(tally.faults[kind] for kind in ("crash", "cut", "pair", "master"))


@pytest.mark.parametrize("rest", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.timeout(400)  # on a busy machine; a hang is a limit of the virtual clock
def test_crashes_cuts_and_faults_by_seed_change_no_bit(rest: bool, bases: list[Base]) -> None:
    check(bases, [seed for seed in range(QUICK_SEEDS) if bool(seed % 3) == rest])


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(part, marks=pytest.mark.long if part < LONG_PARTS else pytest.mark.nightly)
        for part in range(NIGHTLY_PARTS)
    ],
)
@pytest.mark.timeout(1400)
def test_twenty_thousand_seeds_change_no_bit(part: int, bases: list[Base]) -> None:
    first = 10_000 + part * PART_SEEDS
    check(bases, range(first, first + PART_SEEDS))


def test_a_snapshot_whole_in_a_step_that_never_ended_is_recorded(bases: list[Base]) -> None:
    """Both who had it die within that step; its step is reached again, and so is that of the one before."""
    pool, _ = simulate(bases, 10_054)
    assert pool.whole == [1, 2, 3, 2, 3], "the seed's story has become another: find one that has this"


def test_every_seed_that_fails_is_named(bases: list[Base], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bases[0], "digest", "of another model")
    with pytest.raises(AssertionError) as told:
        check(bases, range(6))
    named = [line.split(":")[0].strip() for line in str(told.value).splitlines() if line.lstrip().startswith("seed")]
    assert named == [f"seed {seed}" for seed in range(6) if random.Random(seed).choice([0, 1]) == 0]
    assert 1 < len(named) < 6


class Anything(int):
    """A number that equals every other."""

    def __ne__(self, other: object) -> bool:
        return False


def no_generation_check(patch: pytest.MonkeyPatch) -> None:
    decode = reliable_link.decode_packet
    patch.setattr(
        reliable_link, "decode_packet", lambda frame: msgspec.structs.replace(decode(frame), generation=Anything())
    )


def no_holder_acknowledgement(patch: pytest.MonkeyPatch) -> None:
    """Whole as soon as the first layer is held."""
    begin = Protection.begin
    patch.setattr(Protection, "begin", lambda self, layers: begin(self, list(layers)[:1]))


def freeing_before_completion(patch: pytest.MonkeyPatch) -> None:
    take = NodeSnapshots.take

    def hasty(self: NodeSnapshots, step: int, stage: Stage) -> None:
        self._endpoint.snapshots.free(step)
        take(self, step, stage)

    patch.setattr(NodeSnapshots, "take", hasty)


@pytest.mark.usefixtures("offenders")  # who breaks the rules is blamed
@pytest.mark.parametrize("mutant", [no_generation_check, no_holder_acknowledgement, freeing_before_completion])
def test_a_broken_rule_is_found_by_the_simulation(
    mutant: Callable[[pytest.MonkeyPatch], None], bases: list[Base], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    with pytest.raises((AssertionError, RingError)):
        [simulate(bases, seed) for seed in range(60)]  # which change no bit as long as the rule holds


def test_the_same_seed_gives_the_same_story(bases: list[Base]) -> None:
    stories = []
    seed = next(seed for seed in range(50) if simulate(bases, seed)[1].summary.recoveries)
    for _ in range(2):
        pool, result = simulate(bases, seed)
        recoveries = [(each.generation, each.step, each.lost, each.source) for each in result.summary.recoveries]
        stories.append((pool.story.hexdigest(), recoveries))
    assert stories[0] == stories[1]
