"""Events become a Chrome trace: open it in https://ui.perfetto.dev or chrome://tracing.

One process per node, lanes for compute, send and receive. Things that overlap never share a lane: sends that are under
way at the same time get lanes of their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ringtmp.metrics.events import Event, NodeStarted, NodeStep, Regrouped, RunStarted, Span

_GROUPS = ("compute", "send", "receive")


def chrome_trace(stream: Iterable[Event]) -> dict[str, Any]:
    """Of the last start in the log. Times in microseconds from its first span."""
    names: dict[int, str] = {}
    marks: list[Regrouped] = []
    spans: dict[int, list[tuple[int, Span]]] = {}
    for event in stream:
        if isinstance(event, RunStarted):
            names, spans, marks = {}, {}, []
        elif isinstance(event, NodeStarted):
            names[event.node] = f"{'master' if event.node == 0 else f'node {event.node}'}: {', '.join(event.segments)}"
        elif isinstance(event, NodeStep):
            spans.setdefault(event.node, []).extend((event.step, span) for span in event.spans)
        elif isinstance(event, Regrouped):
            marks.append(event)
    origin = min((span.start for each in spans.values() for _, span in each), default=0.0)
    rows: list[dict[str, Any]] = []
    for node, each in sorted(spans.items()):
        rows.append({"ph": "M", "name": "process_name", "pid": node, "args": {"name": names.get(node, str(node))}})
        for order, group in enumerate(_GROUPS):
            mine = [(step, span) for step, span in each if _group(span) == group]
            for lane, (step, span) in assign_lanes(mine):
                thread = order * 100 + lane
                rows.append(_row(node, thread, step, span, origin))
            for lane in range(1 + max((lane for lane, _ in assign_lanes(mine)), default=-1)):
                label = group if lane == 0 else f"{group} {lane + 1}"
                rows.append(
                    {"ph": "M", "name": "thread_name", "pid": node, "tid": order * 100 + lane, "args": {"name": label}}
                )
    rows += [
        {"ph": "i", "s": "g", "name": f"generation {mark.generation}: {mark.reason}", "pid": 0, "tid": 0,
         "ts": (mark.at - origin) * 1e6}
        for mark in marks
    ]  # fmt: skip
    return {"traceEvents": rows, "displayTimeUnit": "ms"}


def assign_lanes(spans: Iterable[tuple[int, Span]]) -> list[tuple[int, tuple[int, Span]]]:
    """Each span with the first lane that is free when it begins."""
    free_at: list[float] = []
    placed: list[tuple[int, tuple[int, Span]]] = []
    for step, span in sorted(spans, key=lambda each: (each[1].start, each[1].end)):
        lane = next((index for index, free in enumerate(free_at) if free <= span.start), len(free_at))
        if lane == len(free_at):
            free_at.append(0.0)
        free_at[lane] = span.end
        placed.append((lane, (step, span)))
    return placed


def _group(span: Span) -> str:
    return span.kind if span.kind in ("send", "receive") else "compute"


def _row(node: int, thread: int, step: int, span: Span, origin: float) -> dict[str, Any]:
    name = span.kind if span.microbatch < 0 else f"{span.kind} {span.microbatch}"
    return {
        "ph": "X",
        "name": name,
        "cat": _group(span),
        "pid": node,
        "tid": thread,
        "ts": (span.start - origin) * 1e6,
        "dur": max(0.0, span.end - span.start) * 1e6,
        "args": {"step": step, "visit": span.visit, "microbatch": span.microbatch, "bytes": span.bytes},
    }
