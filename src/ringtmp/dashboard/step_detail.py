"""One step in detail, for the Gantt chart: what each node did when, in seconds since the step began."""

from __future__ import annotations

import msgspec

from ringtmp.dashboard.follow_file import Follower
from ringtmp.metrics.events import Span
from ringtmp.metrics.trace import assign_lanes


class Bar(msgspec.Struct, frozen=True, array_like=True):
    kind: str
    visit: int
    microbatch: int
    start_s: float
    end_s: float
    bytes: int
    lane: int  # 0: computing; sends and receives that overlap have lanes of their own


class Lane(msgspec.Struct, frozen=True):
    node: int
    idle_s: float
    busy_s: float
    bars: list[Bar]


class StepDetail(msgspec.Struct, frozen=True):
    step: int  # counted from 1
    seconds: float
    nodes: list[Lane]


def detail_of(follower: Follower, step: int) -> StepDetail | None:
    """None: it was not recorded in full."""
    done = follower.spans_of(step)
    if not done:
        return None
    begin = min(min(each.start, *(span.start for span in each.spans)) for each in done)
    end = max(max(each.end, *(span.end for span in each.spans)) for each in done)
    lanes = [Lane(each.node, each.idle_s, each.busy_s, _bars(each.spans, begin)) for each in done]
    return StepDetail(step + 1, end - begin, lanes)


def _bars(spans: tuple[Span, ...], begin: float) -> list[Bar]:
    found = [_bar(each, 0, begin) for each in spans if each.kind not in ("send", "receive")]
    for kind in ("send", "receive"):
        for lane, (_, span) in assign_lanes((0, each) for each in spans if each.kind == kind):
            found.append(_bar(span, lane + 1, begin))
    return found


def _bar(span: Span, lane: int, begin: float) -> Bar:
    start, end = round(span.start - begin, 7), round(span.end - begin, 7)
    return Bar(span.kind, span.visit, span.microbatch, start, end, span.bytes, lane)
