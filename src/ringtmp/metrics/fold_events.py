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
    unlike: bool  # a node whose arithmetic may not be the master's had a share in it
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


class Fold:
    """Events in, one at a time; parts out, whenever they are asked for.

    `recent`: for who follows a run that lasts for days. Of what a node did, only so many of its last steps are kept apart;
    those before are added up in one. A loss that undoes more than that is not in these sums: `undone_too_far` says so, and
    the events must be read again from their beginning.
    """

    def __init__(self, recent: int | None = None) -> None:
        self.recent = recent
        self._tallies: list[_Tally] = []
        self._waiting: list[str] = []  # warnings that come before the start they belong to

    @property
    def undone_too_far(self) -> bool:
        return any(each.undone_too_far for each in self._tallies)

    def run_s(self, at: float) -> float:
        """A moment of the master's clock, in the part that was begun last, as seconds since the run first began."""
        if not self._tallies:
            return 0.0
        return sum(each.seconds for each in self._tallies[:-1]) + at - self._tallies[-1].began

    def take_node_steps(self, several: Sequence[events.NodeStep]) -> None:
        """One after the other, as `take` does it. A day has millions of them."""
        if self._tallies:
            self._tallies[-1].take_node_steps(several)

    def take(self, event: events.Event) -> None:
        tallies = self._tallies
        if isinstance(event, events.NodeStep):  # nearly all are: first
            self.take_node_steps((event,))
        elif isinstance(event, events.StepDone):
            if tallies:
                tallies[-1].take_step(event)
        elif isinstance(event, events.RunStarted):
            for earlier in tallies:
                earlier.resume_from(event.first_step)
            tallies.append(_Tally(event, self._waiting, self.recent))
            self._waiting = []
        elif isinstance(event, events.Warned) and (not tallies or tallies[-1].ended):
            self._waiting.append(event.text)
        elif isinstance(event, events.RunEnded) and (not event.begun or not tallies or tallies[-1].ended):
            self._waiting.append(f"an attempt to go on with the run failed: {event.error or event.outcome}")
        elif tallies:
            tallies[-1].take(event)
            if isinstance(event, events.Evaluated):
                for earlier in tallies[:-1]:
                    earlier.evaluations.pop(event.step, None)

    def parts(self) -> tuple[Part, ...]:
        found: list[Part] = []
        for tally in self._tallies:
            found.append(tally.part(sum(each.seconds for each in found)))
        if found and self._waiting:
            found[-1] = msgspec.structs.replace(found[-1], warnings=(*found[-1].warnings, *self._waiting))
        return tuple(found)


class _Tally:
    """One part while its events come."""

    def __init__(self, started: events.RunStarted, warnings: list[str], recent: int | None) -> None:
        self._started = started
        self._recent = recent
        self._added_up: dict[int, int] = {}  # by node: the last step that is no longer apart
        self.undone_too_far = False
        self._warnings = warnings
        self._last_at = started.at
        self._nodes: dict[int, events.NodeStarted] = {}
        self._ends: dict[int, events.NodeEnded] = {}
        self._powers: dict[int, Power] = {}
        self._steps: list[events.StepDone] = []
        self._every_step: list[events.StepDone] = []
        self._node_steps: dict[int, list[events.NodeStep]] = {}
        self._recoveries: list[events.Regrouped] = []
        self._meetings: list[events.HomesMet] = []
        self._lost = 0
        self._strayed: list[events.StreamStrayed] = []
        self._left_out = 0
        self._unlike = False
        self._pauses: list[float] = []
        self.evaluations: dict[int, events.Evaluated] = {}
        self.ended: events.RunEnded | None = None

    def take_node_steps(self, several: Sequence[events.NodeStep]) -> None:
        most = None if self._recent is None else 2 * self._recent + 1
        for event in several:
            if event.power is not None:
                self._powers[event.node] = event.power
            done = self._node_steps.get(event.node)
            if done is None:
                done = self._node_steps[event.node] = []
            done.append(event)
            if most is not None and len(done) > most:
                self._add_up(event.node, done, most // 2)

    def _add_up(self, node: int, done: list[events.NodeStep], recent: int) -> None:
        self._added_up[node] = done[-recent - 1].step
        self._node_steps[node] = [_together(done[:-recent]), *done[-recent:]]

    def take_step(self, event: events.StepDone) -> None:
        self._steps.append(event)
        self._every_step.append(event)
        self._last_at = event.at

    def take(self, event: events.Event) -> None:
        """Any but a step, and a node's share of one."""
        if isinstance(event, events.NodeStarted):
            self._nodes[event.node] = event
            self._unlike = self._unlike or event.unlike
        elif isinstance(event, events.NodeEnded):
            self._ends[event.node] = event
            if event.power is not None:
                self._powers[event.node] = event.power
        elif isinstance(event, events.Evaluated):
            self.evaluations[event.step] = event
        elif isinstance(event, events.RunEnded):
            self.ended = event
        elif isinstance(event, events.Regrouped):
            self._recoveries.append(event)
            self._nodes = {node: each for node, each in self._nodes.items() if each.generation == event.generation}
            self._keep_before(event.step)
        elif isinstance(event, events.HomesMet):
            self._meetings.append(event)
        elif isinstance(event, events.StreamStrayed):
            self._strayed.append(event)
        elif isinstance(event, events.SamplesLeftOut):
            self._left_out = event.count
        elif isinstance(event, events.Warned):
            self._warnings.append(event.text)
        else:
            assert isinstance(event, events.CheckpointSaved | events.SnapshotWhole | events.LineTried | events.NodeGone)
        if isinstance(event, events.Evaluated | events.CheckpointSaved | events.Regrouped | events.HomesMet):
            self._last_at = event.at
            self._pauses.append(event.at)
        elif isinstance(event, events.RunEnded):
            self._last_at = event.at

    @property
    def began(self) -> float:
        return self._started.at

    @property
    def seconds(self) -> float:
        return self._last_at - self._started.at

    def resume_from(self, step: int) -> None:
        """A later part begins with this step."""
        before = len(self._steps)
        self._keep_before(step)
        self._lost += before - len(self._steps)

    def _keep_before(self, step: int) -> None:
        """What is done again counts once. An evaluation's step is the one that follows it."""
        self.undone_too_far = self.undone_too_far or any(last >= step for last in self._added_up.values())
        self._steps = [each for each in self._steps if each.step < step]
        self._node_steps = {
            node: [each for each in done if each.step < step] for node, done in self._node_steps.items()
        }
        self.evaluations = {at: each for at, each in self.evaluations.items() if at <= step}

    def part(self, before_s: float) -> Part:
        return Part(
            started=self._started, ended=self.ended, nodes=self._nodes, ends=self._ends, powers=self._powers,
            steps=tuple(self._steps), every_step=tuple(self._every_step),
            node_steps={node: tuple(done) for node, done in self._node_steps.items()},
            evaluations=tuple(self.evaluations.values()), recoveries=tuple(self._recoveries),
            meetings=tuple(self._meetings), warnings=tuple(self._warnings), lost_steps=self._lost, seconds=self.seconds,
            before_s=before_s, strayed=tuple(self._strayed), left_out=self._left_out, unlike=self._unlike,
            pauses=tuple(self._pauses),
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
