"""How a run went, thin enough to send: the loss and speed of steps, and what every node did in each stretch of time.

Both grow until they are full; then every two neighbours become one and from there on twice as much goes into each. So a day
is as long as a minute, and the newest is always there. Pure: steps in, rows out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ringtmp.metrics.events import NodeStep, Reading, StepDone
from ringtmp.metrics.fold_events import sums_by_name

MOST_POINTS = 1600
#: Stretches of time, and numbers of nodes times stretches.
MOST_FRAMES, MOST_NODE_FRAMES = 480, 16_000
FIRST_FRAME_S = 0.25
IDLE = "idle: "


@dataclass
class Point:
    """Steps in a row, as one."""

    first: int
    last: int
    at_s: float
    loss: float  # of the last
    low: float
    high: float
    samples: int
    wall_s: float

    def add(self, last: int, at_s: float, loss: float, *, low: float, high: float, samples: int, wall_s: float) -> None:
        """Steps that follow. A loss that is no number is drawn as such."""
        self.last, self.at_s, self.loss = last, at_s, loss
        self.low, self.high = min(self.low, low), max(self.high, high)
        self.samples += samples
        self.wall_s += wall_s

    @property
    def row(self) -> list[float]:
        return [
            self.last + 1, _short(self.at_s), _short(self.loss), _short(self.low), _short(self.high), self.samples,
            _short(self.wall_s),
        ]  # fmt: skip


@dataclass
class Points:
    """`changed_from`: rows from this place on are other than those told last."""

    rows: list[Point] = field(default_factory=list)
    steps_each: int = 1
    changed_from: int = 0

    def take(self, step: StepDone, at_s: float) -> None:
        loss = step.loss
        last = self.rows[-1] if self.rows else None
        if last is not None and last.last - last.first + 1 < self.steps_each and step.step == last.last + 1:
            last.add(step.step, at_s, loss, low=loss, high=loss, samples=step.samples, wall_s=step.wall_s)
            self.changed_from = min(self.changed_from, len(self.rows) - 1)
            return
        self.rows.append(
            Point(step.step, step.step, at_s, loss, low=loss, high=loss, samples=step.samples, wall_s=step.wall_s)
        )
        if len(self.rows) > MOST_POINTS:
            self._halve()

    def keep_before(self, step: int) -> None:
        """What is done again is drawn once. A point that is half undone goes."""
        while self.rows and self.rows[-1].last >= step:
            self.rows.pop()
        self.changed_from = min(self.changed_from, len(self.rows))

    def _halve(self) -> None:
        self.steps_each *= 2
        rows, self.rows = self.rows, []
        for row in rows:
            last = self.rows[-1] if self.rows else None
            if last is not None and row.last - last.first < self.steps_each and row.first == last.last + 1:
                last.add(
                    row.last, row.at_s, row.loss, low=row.low, high=row.high, samples=row.samples, wall_s=row.wall_s
                )  # fmt: skip
            else:
                self.rows.append(row)
        self.changed_from = 0


@dataclass
class NodeShare:
    """What one node did in a stretch of time."""

    busy: dict[str, float] = field(default_factory=dict)  # seconds by kind of work
    idle: dict[str, float] = field(default_factory=dict)  # seconds of waiting by cause
    sent_bytes: int = 0
    received_bytes: int = 0
    rss_bytes: int = 0
    sent_to: dict[int, int] = field(default_factory=dict)  # by reading
    read_s: float = 0.0  # that these readings cover

    def did(self, steps: list[NodeStep]) -> None:
        _add(self.busy, sums_by_name([each.busy for each in steps]))
        _add(self.idle, sums_by_name([each.idle for each in steps]))
        self.sent_bytes += sum([each.sent_bytes for each in steps])
        self.received_bytes += sum([each.received_bytes for each in steps])

    def read(self, before: Reading | None, now: Reading) -> None:
        self.rss_bytes = now.rss_bytes
        if before is not None and now.at > before.at:
            self.read_s += now.at - before.at
            for peer, count in now.sent_to.items():
                more = count - before.sent_to.get(peer, 0)
                if more > 0:
                    self.sent_to[peer] = self.sent_to.get(peer, 0) + more

    def add(self, later: NodeShare) -> None:
        _add(self.busy, later.busy)
        _add(self.idle, later.idle)
        _add(self.sent_to, later.sent_to)
        self.sent_bytes += later.sent_bytes
        self.received_bytes += later.received_bytes
        self.rss_bytes = later.rss_bytes or self.rss_bytes
        self.read_s += later.read_s

    def row(self, node: int, kinds: dict[str, int]) -> list[object]:
        """[node, [kind, seconds, kind, seconds, ...], sent, received, memory, [peer, bytes per second, ...]]

        A kind that is seen for the first time gets the next number."""
        work: list[float] = []
        for kind, seconds in (*self.busy.items(), *((IDLE + cause, waited) for cause, waited in self.idle.items())):
            work += (kinds.setdefault(kind, len(kinds)), _short(seconds))
        links = [each for peer, count in self.sent_to.items() for each in (peer, round(count / self.read_s))]
        return [node, work, self.sent_bytes, self.received_bytes, self.rss_bytes, links if self.read_s else []]


def _add(to: dict[str, float] | dict[int, int], more: Mapping[str, float] | Mapping[int, int]) -> None:
    for key, value in more.items():
        to[key] = to.get(key, 0) + value  # type: ignore[index, assignment, arg-type]


@dataclass
class Frame:
    """A stretch of time. Its number times its length is where it begins."""

    place: int
    at_s: float  # the last moment told of in it
    step: int
    nodes: dict[int, NodeShare] = field(default_factory=dict)


@dataclass
class Frames:
    """`kinds` names what nodes do; rows refer to it by number. A kind is named when a row with it is first made.

    Steps of the newest stretch wait to be added up together, until it is over or somebody wants to know."""

    frames: list[Frame] = field(default_factory=list)
    frame_s: float = FIRST_FRAME_S
    kinds: dict[str, int] = field(default_factory=dict)
    changed_from: int = 0
    nodes: int = 1
    readings: dict[int, Reading] = field(default_factory=dict)
    waiting: list[NodeStep] = field(default_factory=list)

    def take(self, steps: Iterable[NodeStep], step: int, at_s: float) -> None:
        """What all nodes reported until a moment."""
        place = max(int(at_s / self.frame_s), self.frames[-1].place if self.frames else 0)
        if not self.frames or self.frames[-1].place != place:
            self._add_up()
            self.frames.append(Frame(place, at_s, step))
            if len(self.frames) > max(60, min(MOST_FRAMES, MOST_NODE_FRAMES // self.nodes)):
                self._halve()
        frame = self.frames[-1]
        frame.at_s, frame.step = at_s, step
        self.changed_from = min(self.changed_from, len(self.frames) - 1)
        self.waiting += steps

    def _add_up(self) -> None:
        """What waits goes into the newest stretch."""
        if not self.waiting:
            return
        waiting, self.waiting = self.waiting, []
        by_node: dict[int, list[NodeStep]] = {}
        for each in waiting:
            by_node.setdefault(each.node, []).append(each)
        nodes = self.frames[-1].nodes
        for node, done in by_node.items():
            share = nodes.get(node)
            if share is None:
                share = nodes[node] = NodeShare()
            share.did(done)
            readings = [each.reading for each in done if each.reading is not None]
            if readings:  # counts of one process, which only grow: the first and the last are enough
                share.read(self.readings.get(node), readings[0])
                share.read(readings[0], readings[-1])
                self.readings[node] = readings[-1]
        self.nodes = max(self.nodes, len(nodes))

    def forget_readings(self, nodes: Iterable[int]) -> None:
        """Other processes take their places, and begin to count anew."""
        self._add_up()
        for node in nodes:
            self.readings.pop(node, None)

    def _halve(self) -> None:
        self.frame_s *= 2
        frames, self.frames = self.frames, []
        for frame in frames:
            frame.place = int(frame.at_s / self.frame_s)
            last = self.frames[-1] if self.frames else None
            if last is None or last.place != frame.place:
                self.frames.append(frame)
                continue
            last.at_s, last.step = frame.at_s, frame.step
            for node, share in frame.nodes.items():
                if node in last.nodes:
                    last.nodes[node].add(share)
                else:
                    last.nodes[node] = share
        self.changed_from = 0

    def rows(self, since: int) -> list[list[object]]:
        """[at_s, steps done, [what each node did]]"""
        self._add_up()
        return [
            [_short(each.at_s), each.step + 1, [share.row(node, self.kinds) for node, share in each.nodes.items()]]
            for each in self.frames[since:]
        ]


def _short(value: float) -> float:
    """Five digits are enough to draw."""
    return float(f"{value:.6g}")
