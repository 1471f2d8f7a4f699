"""Events become parts: what each start of a run did, and what of it counts.

A run has a part for its start and one for each time it was resumed. A part that was cut off may have gone beyond the
checkpoint from which the next one began: those steps were done again and count where they were done last. The master's
clock may begin anew between two parts, so the time of a run is that of its parts, added up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import itemgetter

import msgspec

from ringtmp.metrics import events
from ringtmp.metrics.energy import Power


class Part(msgspec.Struct, frozen=True):
    """`steps`, `node_steps` and `evaluations` are those that count; `every_step` has what was done again too."""

    started: events.RunStarted
    ended: events.RunEnded | None  # None: it goes on, or was cut off
    nodes: dict[int, events.NodeStarted]  # of the last generation
    ends: dict[int, events.NodeEnded]
    powers: dict[int, Power]  # what is known of their devices
    steps: tuple[events.StepDone, ...]
    every_step: tuple[events.StepDone, ...]
    node_steps: dict[int, tuple[events.NodeStep, ...]]
    evaluations: tuple[events.Evaluated, ...]
    recoveries: tuple[events.Regrouped, ...]
    meetings: tuple[events.HomesMet, ...]
    warnings: tuple[str, ...]
    lost_steps: int  # finished, and done again by a later part
    seconds: float
    before_s: float  # seconds of the parts before
    strayed: tuple[events.StreamStrayed, ...]
    left_out: int  # lines or samples that could not be read
    pauses: tuple[float, ...]  # when an evaluation, a checkpoint or a new generation was done, by the master's clock

    @property
    def first_step(self) -> int:
        return self.started.first_step

    def run_s(self, at: float) -> float:
        """A moment of the master's clock as seconds since the run first began."""
        return self.before_s + at - self.started.at

    def typical_step(self) -> tuple[events.NodeStep, ...]:
        """By node: the step of median length among those whose every span was kept on every node, the first step left out if
        possible. Empty where there is none."""
        kept: dict[int, list[events.NodeStep]] = {}
        for node in sorted(self.nodes):
            for each in self.node_steps.get(node, ()):
                if each.spans:
                    kept.setdefault(each.step, []).append(each)
        lengths = sorted(
            (each.wall_s, each.step) for each in self.steps if len(kept.get(each.step, ())) == len(self.nodes)
        )
        lengths = [each for each in lengths if each[1] != self.steps[0].step] or lengths
        return tuple(kept[lengths[(len(lengths) - 1) // 2][1]]) if lengths else ()


def work_in(done: Sequence[events.NodeStep]) -> tuple[tuple[int, str, float, float], ...]:
    """(node, kind, start, end) of all that was done in one step, in seconds since it began; without sending and receiving,
    which overlap computing and each other."""
    begin = min((each.start for each in done), default=0.0)
    return tuple(
        (each.node, span.kind, span.start - begin, span.end - begin)
        for each in done
        for span in each.spans
        if span.kind not in ("send", "receive")
    )


def parts_of(stream: Iterable[events.Event]) -> tuple[Part, ...]:
    """In order; none where nothing was started."""
    fold = Fold()
    for event in stream:
        fold.take(event)
    return fold.parts()


class Fold(msgspec.Struct):
    """Events in, one at a time; parts out, whenever they are asked for. It can be written down and gone on with.

    `recent`: for who follows a run that lasts for days. Of what a node did, only so many of its last steps are kept apart;
    those before are added up in one. A loss that undoes more than that is not in these sums: `undone_too_far` says so, and
    the events must be read again from their beginning.
    """

    recent: int | None = None
    tallies: list[Tally] = []
    waiting: list[str] = []  # warnings that come before the start they belong to
    before_s: float = 0.0  # seconds of all parts but the last

    @property
    def undone_too_far(self) -> bool:
        return any(each.undone_too_far for each in self.tallies)

    def run_s(self, at: float) -> float:
        """A moment of the master's clock, in the part that was begun last, as seconds since the run first began."""
        if not self.tallies:
            return 0.0
        return self.before_s + at - self.tallies[-1].began

    def take_node_steps(self, several: Sequence[events.NodeStep]) -> None:
        """One after the other, as `take` does it. A day has millions of them."""
        if self.tallies:
            self.tallies[-1].take_node_steps(several)

    def take(self, event: events.Event) -> None:
        tallies = self.tallies
        if isinstance(event, events.NodeStep):  # nearly all are: first
            self.take_node_steps((event,))
        elif isinstance(event, events.StepDone):
            if tallies:
                tallies[-1].take_step(event)
        elif isinstance(event, events.RunStarted):
            for earlier in tallies:
                earlier.resume_from(event.first_step)
            self.before_s = sum(each.seconds for each in tallies)
            tallies.append(Tally(event, self.waiting, self.recent, event.at))
            self.waiting = []
        elif isinstance(event, events.Warned) and (not tallies or tallies[-1].ended):
            self.waiting.append(event.text)
        elif isinstance(event, events.RunEnded) and (not event.begun or not tallies or tallies[-1].ended):
            self.waiting.append(f"an attempt to go on with the run failed: {event.error or event.outcome}")
        elif tallies:
            tallies[-1].take(event)
            if isinstance(event, events.Evaluated):
                for earlier in tallies[:-1]:
                    earlier.evaluations.pop(event.step, None)

    def parts(self) -> tuple[Part, ...]:
        found: list[Part] = []
        for tally in self.tallies:
            found.append(tally.part(sum(each.seconds for each in found)))
        if found and self.waiting:
            found[-1] = msgspec.structs.replace(found[-1], warnings=(*found[-1].warnings, *self.waiting))
        return tuple(found)


class Tally(msgspec.Struct):
    """One part while its events come."""

    started: events.RunStarted
    warnings: list[str]
    recent: int | None
    last_at: float
    added_up: dict[int, int] = {}  # by node: the last step that is no longer apart
    undone_too_far: bool = False
    nodes: dict[int, events.NodeStarted] = {}
    ends: dict[int, events.NodeEnded] = {}
    powers: dict[int, Power] = {}
    steps: list[events.StepDone] = []
    every_step: list[events.StepDone] = []
    node_steps: dict[int, list[events.NodeStep]] = {}
    recoveries: list[events.Regrouped] = []
    meetings: list[events.HomesMet] = []
    lost: int = 0
    strayed: list[events.StreamStrayed] = []
    left_out: int = 0
    pauses: list[float] = []
    evaluations: dict[int, events.Evaluated] = {}
    ended: events.RunEnded | None = None

    def take_node_steps(self, several: Sequence[events.NodeStep]) -> None:
        node_steps = self.node_steps
        for event in several:
            if event.power is not None:
                self.powers[event.node] = event.power
            try:
                node_steps[event.node].append(event)
            except KeyError:
                node_steps[event.node] = [event]
        recent = self.recent
        if recent is None:
            return
        for node, done in node_steps.items():
            if len(done) > 2 * recent + 1:
                self.added_up[node] = done[-recent - 1].step
                node_steps[node] = [_together(done[:-recent]), *done[-recent:]]

    def take_step(self, event: events.StepDone) -> None:
        self.steps.append(event)
        self.every_step.append(event)
        self.last_at = event.at

    def take(self, event: events.Event) -> None:
        """Any but a step, and a node's share of one."""
        if isinstance(event, events.NodeStarted):
            self.nodes[event.node] = event
        elif isinstance(event, events.NodeEnded):
            self.ends[event.node] = event
            if event.power is not None:
                self.powers[event.node] = event.power
        elif isinstance(event, events.Evaluated):
            self.evaluations[event.step] = event
        elif isinstance(event, events.RunEnded):
            self.ended = event
        elif isinstance(event, events.Regrouped):
            self.recoveries.append(event)
            self.nodes = {node: each for node, each in self.nodes.items() if each.generation == event.generation}
            self._keep_before(event.step)
        elif isinstance(event, events.HomesMet):
            self.meetings.append(event)
        elif isinstance(event, events.StreamStrayed):
            self.strayed.append(event)
        elif isinstance(event, events.SamplesLeftOut):
            self.left_out = event.count
        elif isinstance(event, events.Warned):
            self.warnings.append(event.text)
        else:
            assert isinstance(event, events.CheckpointSaved | events.SnapshotWhole | events.LineTried | events.NodeGone)
        if isinstance(event, events.Evaluated | events.CheckpointSaved | events.Regrouped | events.HomesMet):
            self.last_at = event.at
            self.pauses.append(event.at)
        elif isinstance(event, events.RunEnded):
            self.last_at = event.at

    @property
    def began(self) -> float:
        return self.started.at

    @property
    def seconds(self) -> float:
        return self.last_at - self.started.at

    def resume_from(self, step: int) -> None:
        """A later part begins with this step."""
        before = len(self.steps)
        self._keep_before(step)
        self.lost += before - len(self.steps)

    def _keep_before(self, step: int) -> None:
        """What is done again counts once. An evaluation's step is the one that follows it."""
        self.undone_too_far = self.undone_too_far or any(last >= step for last in self.added_up.values())
        self.steps = [each for each in self.steps if each.step < step]
        self.node_steps = {node: [each for each in done if each.step < step] for node, done in self.node_steps.items()}
        self.evaluations = {at: each for at, each in self.evaluations.items() if at <= step}

    def part(self, before_s: float) -> Part:
        return Part(
            started=self.started, ended=self.ended, nodes=self.nodes, ends=self.ends, powers=self.powers,
            steps=tuple(self.steps), every_step=tuple(self.every_step),
            node_steps={node: tuple(done) for node, done in self.node_steps.items()},
            evaluations=tuple(self.evaluations.values()), recoveries=tuple(self.recoveries),
            meetings=tuple(self.meetings), warnings=tuple(self.warnings), lost_steps=self.lost, seconds=self.seconds,
            before_s=before_s, strayed=tuple(self.strayed), left_out=self.left_out, pauses=tuple(self.pauses),
        )  # fmt: skip


def _together(done: Sequence[events.NodeStep]) -> events.NodeStep:
    """Several steps of a node as one, added from the first to the last."""
    joules = [each.joules for each in done if each.joules is not None]
    return msgspec.structs.replace(
        done[-1],
        start=done[0].start,
        busy_s=sum([each.busy_s for each in done]),
        idle_s=sum([each.idle_s for each in done]),
        idle=sums_by_name([each.idle for each in done]),
        busy=sums_by_name([each.busy for each in done]),
        sent_bytes=sum([each.sent_bytes for each in done]),
        received_bytes=sum([each.received_bytes for each in done]),
        spans=(),
        oldest=None,
        joules=sum(joules) if len(joules) == len(done) else None,
        power=None,
        reading=None,
    )


def sums_by_name(several: Sequence[dict[str, float]]) -> dict[str, float]:
    """Added from the first to the last, names in the order of first sight. Name by name: a day has millions of them."""
    first = several[0]
    if len(first) > 1 and sum(map(len, several)) == len(first) * len(several):
        try:
            columns = zip(*map(itemgetter(*first), several), strict=True)
            return {name: sum(column, 0.0) for name, column in zip(first, columns, strict=True)}
        except KeyError:  # as many names, and not the same
            pass
    names = dict.fromkeys(chain.from_iterable(several))
    return {name: sum([each[name] for each in several if name in each], 0.0) for name in names}
