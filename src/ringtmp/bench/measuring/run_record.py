"""What a run did, step by step and node by node, as a measurement keeps it. Pure: the fold of its events in, Record out.

Everything an experiment says of time, idleness, bytes and joules comes from here, so that a run is measured once and
every experiment reads from it what it needs.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from ringtmp.metrics.energy import Power
from ringtmp.metrics.events import NodeStarted
from ringtmp.metrics.fold_events import Part, work_in


class Bar(msgspec.Struct, frozen=True, array_like=True):
    """Something a node did in the step that is kept whole. Seconds since the step began."""

    node: int
    kind: str
    start_s: float
    end_s: float


class Score(msgspec.Struct, frozen=True):
    step: int
    at_s: float
    loss: float
    accuracy: float | None


class Track(msgspec.Struct, frozen=True):
    """One node, a value per step. A step it has no record of has zeros."""

    node: int
    role: str
    parameters: int
    busy_s: tuple[float, ...]
    idle_s: tuple[float, ...]
    sent_bytes: tuple[int, ...]
    received_bytes: tuple[int, ...]
    causes: dict[str, float]  # seconds idle, over all steps
    peak_rss_bytes: int | None = None
    power: Power | None = None  # what is known of its device
    sent_to: dict[int, int] = {}  # bytes over the whole run by receiver, evaluations included

    @property
    def server(self) -> bool:
        return self.role == "server"

    @property
    def idle_share(self) -> float:
        whole = sum(self.busy_s) + sum(self.idle_s)
        return sum(self.idle_s) / whole if whole else 0.0


class Record(msgspec.Struct, frozen=True):
    """Of the steps that count. `ended_s` is since the first of all steps began, `took_s` from end to end."""

    steps: tuple[int, ...]
    ended_s: tuple[float, ...]
    took_s: tuple[float, ...]
    loss: tuple[float, ...]
    samples: tuple[int, ...]
    tracks: tuple[Track, ...]
    scores: tuple[Score, ...] = ()
    bars: tuple[Bar, ...] = ()
    scale: float = 1.0  # a second here stands for so much of the described devices' time

    @property
    def workers(self) -> list[Track]:
        """Dedicated servers are listed apart."""
        return [track for track in self.tracks if not track.server] or list(self.tracks)


def record(part: Part) -> Record:
    if not part.steps:
        return Record((), (), (), (), (), ())
    origin = part.steps[0].at - part.steps[0].wall_s
    return Record(
        steps=tuple(each.step for each in part.steps),
        ended_s=tuple(each.at - origin for each in part.steps),
        took_s=tuple(each.wall_s for each in part.steps),
        loss=tuple(each.loss for each in part.steps),
        samples=tuple(each.samples for each in part.steps),
        tracks=tuple(_track(part, part.nodes[node]) for node in sorted(part.nodes)),
        scores=tuple(Score(each.step, each.at - origin, each.loss, each.accuracy) for each in part.evaluations),
        bars=tuple(Bar(*each) for each in work_in(part.typical_step())),
        scale=part.started.facts.get("lab_scale", 1.0),
    )


def from_facts(facts: dict[str, Any]) -> Record:
    """From what a measurement keeps, be it just made or read from its file."""
    return msgspec.convert(facts["record"], Record, str_keys=True)


def _track(part: Part, start: NodeStarted) -> Track:
    by_step = {each.step: each for each in part.node_steps.get(start.node, ())}
    mine = [by_step.get(each.step) for each in part.steps]
    causes: Counter[str] = Counter()
    for each in filter(None, mine):
        causes.update(each.idle)
    end = part.ends.get(start.node)
    return Track(
        node=start.node,
        role=start.role,
        parameters=start.parameters,
        busy_s=tuple(each.busy_s if each else 0.0 for each in mine),
        idle_s=tuple(each.idle_s if each else 0.0 for each in mine),
        sent_bytes=tuple(each.sent_bytes if each else 0 for each in mine),
        received_bytes=tuple(each.received_bytes if each else 0 for each in mine),
        causes=dict(causes),
        peak_rss_bytes=end.peak_rss_bytes if end else None,
        power=part.powers.get(start.node),
        sent_to=end.sent_to if end else {},
    )
