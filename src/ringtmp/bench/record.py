"""What a run did, step by step and node by node, as a measurement keeps it. Pure: events in, Record out.

Everything an experiment says of time, idleness, bytes and joules comes from here, so that a run is measured once and
every experiment reads from it what it needs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from ringtmp.metrics import events
from ringtmp.metrics.energy import Power

#: Kinds of span that are computing; sends and receives overlap them and each other.
_COMPUTE = ("forward", "backward", "weights", "update", "serialise", "mail")


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


def record(stream: Iterable[events.Event]) -> Record:
    """Of the last start. A step that was done again counts once, as it was done last."""
    nodes: dict[int, events.NodeStarted] = {}
    ends: dict[int, events.NodeEnded] = {}
    done: dict[int, events.StepDone] = {}
    parts: dict[int, dict[int, events.NodeStep]] = {}
    scores: list[events.Evaluated] = []
    scale = 1.0
    for event in stream:
        if isinstance(event, events.RunStarted):
            nodes, ends, done, parts, scores = {}, {}, {}, {}, []
            scale = event.facts.get("lab_scale", 1.0)
        elif isinstance(event, events.NodeStarted):
            nodes[event.node] = event
        elif isinstance(event, events.NodeEnded):
            ends[event.node] = event
        elif isinstance(event, events.StepDone):
            done[event.step] = event
        elif isinstance(event, events.NodeStep):
            parts.setdefault(event.node, {})[event.step] = event
        elif isinstance(event, events.Evaluated):
            scores.append(event)
    steps = sorted(done)
    if not steps:
        return Record((), (), (), (), (), ())
    origin = done[steps[0]].at - done[steps[0]].wall_s
    tracks = tuple(_track(nodes[node], steps, parts.get(node, {}), ends.get(node)) for node in sorted(nodes))
    return Record(
        steps=tuple(steps),
        ended_s=tuple(done[step].at - origin for step in steps),
        took_s=tuple(done[step].wall_s for step in steps),
        loss=tuple(done[step].loss for step in steps),
        samples=tuple(done[step].samples for step in steps),
        tracks=tracks,
        scores=tuple(Score(each.step, each.at - origin, each.loss, each.accuracy) for each in scores),
        bars=_bars(parts, steps),
        scale=scale,
    )


def from_facts(facts: dict[str, Any]) -> Record:
    """From what a measurement keeps, be it just made or read from its file."""
    return msgspec.convert(facts["record"], Record, str_keys=True)


def _track(
    start: events.NodeStarted, steps: list[int], parts: dict[int, events.NodeStep], end: events.NodeEnded | None
) -> Track:
    mine = [parts.get(step) for step in steps]
    causes: dict[str, float] = {}
    for part in mine:
        for cause, seconds in (part.idle if part else {}).items():
            causes[cause] = causes.get(cause, 0.0) + seconds
    return Track(
        start.node,
        start.role,
        start.parameters,
        tuple(part.busy_s if part else 0.0 for part in mine),
        tuple(part.idle_s if part else 0.0 for part in mine),
        tuple(part.sent_bytes if part else 0 for part in mine),
        tuple(part.received_bytes if part else 0 for part in mine),
        causes,
        end.peak_rss_bytes if end else None,
        end.power if end else None,
        end.sent_to if end else {},
    )


def _bars(parts: dict[int, dict[int, events.NodeStep]], steps: list[int]) -> tuple[Bar, ...]:
    """Of one step in the middle of those whose every span was kept on every node."""
    whole = [step for step in steps if parts and all(mine.get(step) and mine[step].spans for mine in parts.values())]
    if not whole:
        return ()
    chosen = [mine[whole[len(whole) // 2]] for mine in parts.values()]
    origin = min(part.start for part in chosen)
    return tuple(
        Bar(part.node, span.kind, span.start - origin, span.end - origin)
        for part in chosen
        for span in part.spans
        if span.kind in _COMPUTE and span.end >= part.start
    )
