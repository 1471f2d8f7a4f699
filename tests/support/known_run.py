"""A run of three steps on two nodes whose idle time, bytes and joules are round numbers, as its events."""

from __future__ import annotations

from ringtmp.metrics.energy import Power, Watts
from ringtmp.metrics.events import (
    Evaluated,
    Event,
    NodeEnded,
    NodeStarted,
    NodeStep,
    RunEnded,
    RunStarted,
    Span,
    StepDone,
)
from ringtmp.report import run_page, run_timeline
from ringtmp.report.page_content import Figure

CONFIG = {
    "ring": {"strategy": "ring", "schedule": "1f1b"},
    "model": {"name": "mlp"},
    "training": {"seed": 0, "staleness": 0, "wire": "float32"},
}
FACTS = {"data": "digits", "batch_size": 16, "microbatches": 4, "threads": 1, "torch": "2", "emulated": True}


def started(at: float = 0.0, first_step: int = 0) -> RunStarted:
    return RunStarted(at, "2026-01-01T00:00:00+00:00", 1, "r", "0.1", CONFIG, FACTS, 1, first_step)


def step(number: int, at: float, wall_s: float = 2.0) -> StepDone:
    return StepDone(at, number, 0, 3.0 - number, 0.1, 16, wall_s)


def node_step(node: int, number: int, start: float) -> NodeStep:
    """Two seconds: node 0 is busy for 1.5 of them, node 1 for 1; it waits 0.75 s for activations and 0.25 for gradients."""
    spans = (Span("forward", 0, 0, start, start + 1.0), Span("send", 0, 0, start, start + 2.0, 7))
    if node == 0:
        return NodeStep(0, number, start, start + 2, 1.5, 0.5, {"gradients": 0.5}, 1000, 500, spans, {"forward": 1.5})
    idle = {"activations": 0.75, "gradients": 0.25}
    return NodeStep(1, number, start, start + 2, 1.0, 1.0, idle, 500, 1000, spans, {"forward": 0.6, "backward": 0.4})


def ended(node: int) -> NodeEnded:
    power = Power("given", Watts(2.0, 6.0, 1e6), 0.5, f"host{node}")
    return NodeEnded(node, 300 * 2**20, 0, 0, 0, 0, 0, power=power, sent_to={1: 3100} if node == 0 else {0: 1600})


def known_events() -> list[Event]:
    found: list[Event] = [started()]
    found += [NodeStarted(0.0, node, "master" if node == 0 else "worker", 1, 1, ("0-1",), 10) for node in (0, 1)]
    for number in range(3):
        found += [
            node_step(0, number, 2.0 * number),
            node_step(1, number, 2.0 * number),
            step(number, 2.0 * number + 2),
        ]
    found.append(Evaluated(6.5, 3, 0, 10, 0.5, 0.9, None))
    return [*found, ended(0), ended(1), RunEnded(7.0, 3, "done", "ab" * 32)]


def figures_of(events: list[Event]) -> dict[str, Figure]:
    found = run_timeline.gather(events, "run")
    assert found is not None
    return {figure.name: figure for figure in run_page.page(found).figures}
