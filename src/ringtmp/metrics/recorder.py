"""What a node did during a step, as it happens: busy spans, and gaps with the reason for each.

A step begins where the one before ended, so that waiting between steps counts as idle; after an evaluation or a
checkpoint (`fresh`) it begins with its own first work.
"""

from __future__ import annotations

from collections.abc import Callable

from ringtmp.metrics.events import NodeStep, Span


class Recorder:
    def __init__(self, node: int, clock: Callable[[], float], detailed_steps: int) -> None:
        self._node = node
        self._clock = clock
        self._detailed_steps = detailed_steps
        self._start: float | None = None  # of the step; None: begins with the next work
        self._last_end = 0.0
        self._busy = 0.0
        self._idle: dict[str, float] = {}
        self._cause = "activations"
        self._spans: list[Span] = []
        self._sent = 0
        self._received = 0

    def waiting_for(self, cause: str) -> None:
        """Nothing is runnable; the gap until the next work has this reason."""
        self._cause = cause

    def fresh(self) -> None:
        """The step about to begin does not follow directly on another."""
        self._start = None
        self._idle.clear()
        self._busy = 0.0
        self._spans.clear()

    def begin(self) -> float:
        now = self._clock()
        if self._start is None:
            self._start = self._last_end = now
        elif now > self._last_end:
            self._idle[self._cause] = self._idle.get(self._cause, 0.0) + now - self._last_end
        return now

    def end(self, started: float, kind: str, visit: int, microbatch: int) -> None:
        now = self._clock()
        self._busy += now - started
        self._last_end = now
        self._spans.append(Span(kind, visit, microbatch, started, now))

    def sent(self, posted: float, acknowledged: float, size: int) -> None:
        self._spans.append(Span("send", -1, -1, posted, acknowledged, size))

    def received(self, visit: int, microbatch: int, first: float, arrived: float, size: int) -> None:
        self._received += size
        self._spans.append(Span("receive", visit, microbatch, first, arrived, size))

    def count_sent(self, size: int) -> None:
        self._sent += size

    def close_step(self, step: int, first_step: int, oldest: int | None = None) -> NodeStep:
        """The step is over for this node. Spans are kept for the first steps and every hundredth after."""
        start = self._start if self._start is not None else self._last_end
        detailed = step - first_step < self._detailed_steps or step % 100 == 0
        record = NodeStep(
            self._node, step, start, self._last_end, self._busy, sum(self._idle.values()), dict(self._idle),
            self._sent, self._received, tuple(self._spans) if detailed else (), oldest,
        )  # fmt: skip
        self._start = self._last_end
        self._busy = 0.0
        self._idle.clear()
        self._spans.clear()
        self._sent = self._received = 0
        return record
