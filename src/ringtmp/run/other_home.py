"""A run with another home: after every so many steps both go on from an outer step over what each has made of them.

Each home is a whole ring with a master and data of its own. An exchange goes through the masters and their checkpoints: the
ring's layers come to the master one at a time, as for any checkpoint, each is exchanged and stepped, and a new generation is
laid out from the result. So a master needs room for one layer of the other home beside its own, whatever the model's size, and
whatever heals, resumes or moves a ring needs to know nothing of homes.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from ringtmp.config import RingPart
from ringtmp.config.settings import HomeAlone
from ringtmp.errors import CheckpointError, Interrupted, NodeLost
from ringtmp.metrics.events import HomesMet
from ringtmp.model.frozen_parameters import frozen_names
from ringtmp.model.run_graph import dtype_of
from ringtmp.run.healing import Healing
from ringtmp.run.meet_home import Limits, Line, Meeting, Met, NoWord, OtherLost, Verdict
from ringtmp.run.members_and_plan import Generation, Run
from ringtmp.run.outer_rounds import Begun, BegunWriter, Rounds, trained
from ringtmp.runtime.checkpoint import Checkpoint, CheckpointWriter, Progress
from ringtmp.runtime.outer_step import Outer, mean_of, outer_step
from ringtmp.strategies.base import Leader
from ringtmp.wire.home_messages import HOMES, At, Here, Part, Terms
from ringtmp.wire.tensors import raw_bytes

#: A connected home may take so many times as long for a round as this one.
SLOWER = 20
#: One that has come back asks so long whether the other has gone on. If it is at its steps it says nothing until it has done
#: them, which may take hours: then this one makes its own, and both see at the exchange who is right.
WORD_S = 20.0


@dataclass(frozen=True)
class Settings:
    local_steps: int
    outer: Outer
    alone: HomeAlone
    wait_s: float

    @classmethod
    def of(cls, ring: RingPart) -> Settings:
        assert ring.local_steps is not None
        return cls(ring.local_steps, Outer(ring.outer_lr, ring.outer_momentum), ring.home_alone, ring.home_wait_s)


class OtherHome:
    """This home's side of all meetings of a run. `line` is opened and closed elsewhere."""

    def __init__(self, run: Run, healing: Healing, line: Line, settings: Settings) -> None:
        assert run.total_steps is not None
        self.run = run
        self._healing = healing
        self.line = line
        self.settings = settings
        self._total = run.total_steps
        self.rounds = Rounds(run.job.run.path / "homes", run.index.run, run.layers, run.index.aside)
        self._begun: Begun | None = None
        self._terms: Terms | None = None
        self._lost = False  # when it was last waited for
        self._round_began = time.monotonic(), 0  # or this part of it, with its first step
        self._round_s = 0.0

    def due(self, progress: Progress) -> bool:
        """Whether there is an exchange before the next step."""
        step = progress.step
        return step > self.begun_of(progress).manifest.step and (
            step % self.settings.local_steps == 0 or step >= self._total
        )

    def may_pass(self, step: int) -> bool:
        """Whether a step may begin before the one before it has ended."""
        return step % self.settings.local_steps != 0 and step < self._total

    def start(self, leader: Leader, progress: Progress) -> Generation | None:
        """Before the first step of this part of the run. None: the ring stays as it is laid out."""
        self._round_began = time.monotonic(), progress.step
        self.begun_of(progress)
        if self.due(progress):  # interrupted before the exchange
            return self.exchange(leader, progress)
        generation = self._adopted(leader, progress, "start")
        self._round_began = time.monotonic(), progress.step if generation is None else generation.progress.step
        return generation

    def exchange(self, leader: Leader, progress: Progress) -> Generation:
        """Between two rounds. A new generation, whose progress may lie further ahead."""
        began, first = self._round_began
        self._round_s = of_a_round(time.monotonic() - began, progress.step - first, self.settings.local_steps)
        self.run.record.watcher.phase("exchanging with the other home")
        self.run.saving.save(leader, progress, needed=True)
        generation = self._adopted(leader, progress, "exchange")
        assert generation is not None
        self._round_began = time.monotonic(), generation.progress.step
        return generation

    # -- what a round began with --------------------------------------------------------------------------------------

    def begun_of(self, progress: Progress) -> Begun:
        """Of the round that `progress` is in. The first begins with the first weights, and without velocity."""
        if self._begun is None or self._begun.manifest.round != progress.outer_round:
            try:
                self._begun = self.rounds.read(progress.outer_round)
            except CheckpointError:
                if progress.outer_round or progress.step:
                    raise
                self._begun = self._first()
        return self._begun

    def _first(self) -> Begun:
        saved, writer = self.run.saving.newest(), BegunWriter(self.rounds, 0, 0)
        for index in range(len(self.run.layers)):
            weights = self.weights_of(saved, index)
            some = {each.name for each in trained(self.rounds.layers[index])}
            named = zip(self.rounds.layers[index], weights, strict=True)
            writer.add(index, weights, [torch.zeros_like(value) for each, value in named if each.name in some])
        return writer.commit()

    def weights_of(self, saved: Checkpoint, index: int) -> list[torch.Tensor]:
        layer = self.run.layers[index]
        names = {each.name for each in self.rounds.layers[index]}
        held = zip(layer.tensors, saved.mapped_layer(index, layer)[0], strict=True)
        return [value for each, value in held if each.name in names]

    # -- meetings -----------------------------------------------------------------------------------------------------

    def _adopted(self, leader: Leader, progress: Progress, at: At) -> Generation | None:
        """After the meeting, and whatever follows from it."""
        began = time.monotonic()
        taken: list[_Taken] = []
        try:
            met = self._meet(leader, progress, at, taken)
            if met.verdict is Verdict.GO or (at == "start" and met.verdict in (Verdict.SERVE, Verdict.ALONE)):
                if met.verdict is Verdict.SERVE:
                    self._tell_met(met, progress, "served", began)
                return None
            if met.verdict is Verdict.ALONE:
                taken.append(_Taken(self, progress, None))
                taken[-1].all_alone()
            done = taken.pop()
            reached, self._begun = done.commit(), done.begun
        finally:
            for each in taken:
                each.abandon()
        kind = {Verdict.MIX: "exchanged", Verdict.ALONE: "alone", Verdict.ADOPT: "adopted"}[met.verdict]
        if met.verdict is Verdict.ALONE and met.theirs is not None:  # it waits for what this round has come to
            served = self._meet(leader, reached, "start", taken, optional=True)
            met.sent_bytes += served.sent_bytes
        generation = self._healing.lay_out_again(reached)
        self._tell_met(met, reached, kind, began)
        return generation

    def _meet(
        self, leader: Leader, progress: Progress, at: At, taken: list[_Taken], optional: bool = False
    ) -> Met:  # fmt: skip
        """`taken` gets what is under way, the newest last."""
        state, settings = self.begun_of(progress), self.settings
        here = Here(
            HOMES, self.line.home, visit="", terms=self._agreed(), at=at, round=state.manifest.round,
            begun=state.manifest.step, state=state.manifest.state,
        )  # fmt: skip

        def begin(found: Verdict) -> _Taken:
            for each in taken:  # of a meeting that began anew
                each.abandon()
            adopted = meeting.theirs if found is Verdict.ADOPT else None
            taken[:] = [_Taken(self, progress, adopted)]
            return taken[-1]

        def idle() -> None:
            leader.keep_in_touch()
            self.run.record.still_here()
            if self.run.interrupted():
                raise Interrupted(
                    f"interrupted while the other home was waited for; the checkpoint of step {self.run.saving.step} is "
                    f"saved: {self.run.job.how_to_go_on}"
                )

        patience = max(settings.wait_s, SLOWER * self._round_s)
        meeting = Meeting(
            self.line, here, _Store(self, progress), begin, Limits(settings.wait_s, patience), idle=idle,
            lost_before=self._lost and settings.alone == "go-on",
            word_s=WORD_S if at == "start" and progress.step and not optional else None,
        )  # fmt: skip
        try:
            met = meeting.hold()
        except NoWord:
            return Met(Verdict.GO)
        except OtherLost as lost:
            if optional:
                return Met(Verdict.GO)
            if settings.alone == "wait":
                saved = self.run.saving.step
                raise NodeLost(
                    f"{lost}; the checkpoint of step {saved} is saved: {self.run.job.how_to_go_on} when it is back, or let "
                    "this home train alone meanwhile with --home-alone go-on"
                ) from None
            self.run.record.warn(f"{lost}: going on alone until it comes back")
            self._lost = True
            for each in taken:
                each.abandon()
            taken.clear()
            return Met(Verdict.ALONE)
        if met.theirs is not None:
            if self._lost:
                self.run.record.watcher.tell("the other home is back")
            self._lost = False
        return met

    def _agreed(self) -> Terms:
        if self._terms is None:
            digest, run = hashlib.sha256(), self.run
            for layer in self.rounds.layers:
                for each in layer:
                    digest.update(f"{each.full or each.name}\0{each.kind}\0{each.dtype}\0{each.shape}\0".encode())
                digest.update(b"\n")
            for name, held in sorted(run.saving.newest().manifest.frozen.items()):
                digest.update(f"{name}\0{held}\n".encode())
            outer = self.settings.outer
            self._terms = Terms(
                digest.hexdigest(), self.settings.local_steps, outer.lr, outer.momentum, self._total
            )  # fmt: skip
        return self._terms

    def _tell_met(self, met: Met, progress: Progress, kind: str, began: float) -> None:
        now, record = time.monotonic(), self.run.record
        record.write(
            HomesMet(
                now, progress.step, progress.outer_round, kind, seconds=now - began, sent_bytes=met.sent_bytes,
                received_bytes=met.received_bytes,
            )
        )  # fmt: skip
        record.log.flush()
        if kind == "adopted":
            record.watcher.tell(f"took over what the other home had at step {progress.step}, and goes on from there")


def of_a_round(seconds: float, steps: int, local_steps: int) -> float:
    """Seconds of a whole round, by those of the steps that were made: one that came back has made a part of it."""
    return seconds * local_steps / steps if steps else seconds


class _Store:
    """What this home gives: the newest checkpoint, and what the round began with."""

    def __init__(self, home: OtherHome, progress: Progress) -> None:
        self._home = home
        self._state = home.begun_of(progress)
        self.layers = len(home.run.layers)
        self._sizes: dict[tuple[Part, int], Sequence[int]] = {}
        self._opened: tuple[Part, int] | None = None
        self._held: list[torch.Tensor] = []

    def sizes(self, part: Part, layer: int) -> Sequence[int]:
        if (part, layer) not in self._sizes:
            tensors = self._home.rounds.layers[layer]
            given = trained(tensors) if part == "velocity" else tensors
            self._sizes[part, layer] = [
                torch.Size(each.shape).numel() * dtype_of(each.dtype).itemsize for each in given
            ]
        return self._sizes[part, layer]

    def bytes_of(self, part: Part, layer: int, tensor: int) -> memoryview:
        if self._opened != (part, layer):
            self._opened, self._held = (part, layer), [each.contiguous() for each in self._read(part, layer)]
        return raw_bytes(self._held[tensor])

    def _read(self, part: Part, layer: int) -> list[torch.Tensor]:
        if part == "own":
            return self._home.weights_of(self._home.run.saving.newest(), layer)
        return self._state.weights(layer) if part == "begun" else self._state.velocity(layer)


class _Taken:
    """A new beginning under way: what a round begins with, and the checkpoint of it, layer by layer."""

    def __init__(self, home: OtherHome, progress: Progress, adopted: Here | None) -> None:
        """`adopted`: of the other home, whose beginning is taken as it is."""
        self._home = home
        self._adopted = adopted
        run = home.run
        self._saved = run.saving.newest()
        self._state = home.begun_of(progress)
        number = progress.outer_round + 1 if adopted is None else adopted.round
        step = progress.step if adopted is None else max(progress.step, adopted.begun)
        self._progress = msgspec.structs.replace(progress, step=step, outer_round=number)
        if (per_epoch := run.batches.steps_per_epoch) is not None and step > progress.step:
            self._progress = msgspec.structs.replace(self._progress, epochs_done=step // per_epoch)
        self._rounds = BegunWriter(home.rounds, number, step if adopted is None else adopted.begun)
        self._writer: CheckpointWriter = run.saving.writer(self._progress)
        self.begun: Begun | None = None

    def all_alone(self) -> None:
        for index in range(len(self._home.run.layers)):
            self._step(index, None)

    def add(self, layer: int, parts: dict[Part, list[bytearray]]) -> None:
        tensors = self._home.rounds.layers[layer]
        if self._adopted is None:
            self._step(layer, _as_tensors(tensors, parts["own"]))
        else:
            weights, velocity = _as_tensors(tensors, parts["begun"]), _as_tensors(trained(tensors), parts["velocity"])
            self._write(layer, weights, velocity)

    def _step(self, index: int, theirs: list[torch.Tensor] | None) -> None:
        """The outer step of a layer's parameters; the mean of its other floating-point ones; the rest is the first home's."""
        home, tensors = self._home, self._home.rounds.layers[index]
        own, begun = home.weights_of(self._saved, index), self._state.weights(index)
        velocity = iter(self._state.velocity(index))
        stepped = {each.name for each in trained(tensors)}
        weights, velocities = list[torch.Tensor](), list[torch.Tensor]()
        for at, each in enumerate(tensors):
            first, second = own[at], own[at] if theirs is None else theirs[at]
            if home.line.home == 1:
                first, second = second, first
            mean = mean_of(first, second) if theirs is not None and first.is_floating_point() else first
            if each.name in stepped:
                mean, grown = outer_step(begun[at], mean, next(velocity), home.settings.outer)
                velocities.append(grown)
            weights.append(mean)
        self._write(index, weights, velocities)

    def _write(self, index: int, weights: Sequence[torch.Tensor], velocity: Sequence[torch.Tensor]) -> None:
        self._rounds.add(index, weights, velocity)
        run = self._home.run
        layer = run.layers[index]
        tensors, state = self._saved.mapped_layer(index, layer)
        fresh = dict(zip((each.name for each in self._home.rounds.layers[index]), weights, strict=True))
        whole = [
            torch.empty_strided(tuple(old.shape), old.stride(), dtype=old.dtype).copy_(fresh[each.name])
            if each.name in fresh
            else old
            for each, old in zip(layer.tensors, tensors, strict=True)
        ]
        self._writer.add(index, layer, whole, state, frozen_names(layer, run.index.aside))

    def commit(self) -> Progress:
        """The round first: a checkpoint that says it is of a round needs that."""
        self.begun = self._rounds.commit()
        if self._adopted is not None and self.begun.manifest.state != self._adopted.state:
            raise CheckpointError("what the other home sent is not what it says it has: is its disk sound?")
        self._home.run.saving.take(self._writer, self._progress)
        return self._progress

    def abandon(self) -> None:
        self._rounds.abandon()
        self._writer.abandon()


def _as_tensors(tensors: Sequence[Any], held: Sequence[bytearray]) -> list[torch.Tensor]:
    found = []
    for each, data in zip(tensors, held, strict=True):
        flat = (
            torch.frombuffer(data, dtype=dtype_of(each.dtype)) if data else torch.empty(0, dtype=dtype_of(each.dtype))
        )
        found.append(flat.reshape(each.shape))
    return found
