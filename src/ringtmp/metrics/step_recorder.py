"""What a node did during a step, as it happens: work by kind, and gaps with the reason for each.

    forward, backward, weights, update    compute: backward is the input gradient where weight gradients wait
    serialise                             handing what was computed to the links
    mail                                  taking mail, deciding what to do, what lies between two steps
    idle, by cause                        nothing was runnable, until the mail came that changed it

Nothing in a step is left out: each of these begins where the one before ended. A step begins where the one before ended
too, so that waiting between steps counts; after an evaluation or a checkpoint (`fresh`) it begins with its own first
work. Only one clock reading per piece of work and one per message: arrivals carry theirs.
"""

from __future__ import annotations

from collections.abc import Callable

from ringtmp.metrics.energy import Power
from ringtmp.metrics.events import NodeStep, Reading, Span

#: Of one step; what is done beyond is counted and not shown.
MOST_SPANS = 8192
#: At most one reading of memory and traffic in so long.
READING_S = 1.0


def is_detailed(step: int, first_step: int, detailed_steps: int) -> bool:
    """Spans are kept for the first steps and every hundredth after."""
    return step - first_step < detailed_steps or step % 100 == 0


class Recorder:
    def __init__(
        self, node: int, clock: Callable[[], float], detailed_steps: int, joules: Callable[[], float] | None = None,
        power: Power | None = None, *, reading: Callable[[float], Reading] | None = None,
        asked: Callable[[], int] = lambda: -1,
    ) -> None:  # fmt: skip
        """`joules`: of the device's meter, since some moment. `power`: of the device, told with the first step. `reading`: of
        memory and traffic, at a moment. `asked`: the step that somebody wants to see in full."""
        self._asked = asked
        self._reading = reading
        self._read_at = -READING_S
        self._node = node
        self._power = power
        self._joules = joules
        self._joules_before = 0.0
        self._clock = clock
        self._detailed_steps = detailed_steps
        self._start: float | None = None  # of the step; None: begins with the next work
        self._last_end = 0.0
        self._busy: dict[str, float] = {}
        self._idle: dict[str, float] = {}
        self._cause = "activations"
        self._waiting = False
        self._heard: float | None = None  # when the first mail after a wait came
        self._sending: float | None = None  # since when the work under way has been handing on its result
        self._keep_spans = True
        self._spans: list[Span] = []
        self._sent = 0
        self._received = 0

    def waiting_for(self, cause: str) -> None:
        """Nothing is runnable; the gap until the next work has this reason."""
        self._cause = cause
        self._waiting = True
        self._heard = None

    def heard(self, at: float) -> None:
        """Mail has come. If work follows, the wait ended here."""
        if self._heard is None:
            self._heard = at

    def fresh(self) -> None:
        """The step about to begin does not follow directly on another."""
        self._start = None
        self._idle.clear()
        self._busy.clear()
        self._spans.clear()

    def begin(self) -> float:
        now = self._clock()
        if self._start is None:
            self._start = self._last_end = now
            self._joules_before = self._joules() if self._joules is not None else 0.0
        elif now > self._last_end:
            ended = self._last_end
            if self._waiting:
                ended = now if self._heard is None else min(max(self._heard, ended), now)
                self._idle[self._cause] = self._idle.get(self._cause, 0.0) + ended - self._last_end
            self._add("mail", -1, -1, ended, now)
        self._waiting = False
        self._heard = self._sending = None
        return now

    def sending(self) -> None:
        """The work under way is done; what follows until `end` hands on its result."""
        if self._sending is None:
            self._sending = self._clock()

    def end(self, started: float, kind: str, visit: int, microbatch: int) -> None:
        now = self._clock()
        done = now if self._sending is None else max(self._sending, started)
        self._add(kind, visit, microbatch, started, done)
        self._add("serialise", visit, microbatch, done, now)
        self._sending = None
        self._last_end = now

    def _add(self, kind: str, visit: int, microbatch: int, start: float, end: float) -> None:
        if end > start:
            self._busy[kind] = self._busy.get(kind, 0.0) + end - start
            if self._room():
                self._spans.append(Span(kind, visit, microbatch, start, end))

    def sent(self, posted: float, acknowledged: float, size: int) -> None:
        if self._room():
            self._spans.append(Span("send", -1, -1, posted, acknowledged, size))

    def received(self, visit: int, microbatch: int, first: float, arrived: float, size: int) -> None:
        self._received += size
        if self._room():
            self._spans.append(Span("receive", visit, microbatch, first, arrived, size))

    def count_sent(self, size: int) -> None:
        self._sent += size

    def close_step(self, step: int, first_step: int, oldest: int | None = None) -> NodeStep:
        """The step is over for this node."""
        start = self._start if self._start is not None else self._last_end
        kept = self._keep_spans and (is_detailed(step, first_step, self._detailed_steps) or step == self._asked())
        joules = self._joules() if self._joules is not None else None
        record = NodeStep(
            node=self._node, step=step, start=start, end=self._last_end, busy_s=sum(self._busy.values()),
            idle_s=sum(self._idle.values()), idle=dict(self._idle), sent_bytes=self._sent,
            received_bytes=self._received, spans=tuple(self._spans) if kept else (), busy=dict(self._busy),
            oldest=oldest, joules=joules - self._joules_before if joules is not None else None, power=self._power,
            reading=self._read(),
        )  # fmt: skip
        self._power = None
        # What is asked for while a step is under way is too late for it: its first spans are gone.
        self._keep_spans = is_detailed(step + 1, first_step, self._detailed_steps) or step + 1 == self._asked()
        self._start = self._last_end
        self._joules_before = joules or 0.0
        self._busy.clear()
        self._idle.clear()
        self._spans.clear()
        self._sent = self._received = 0
        return record

    def _read(self) -> Reading | None:
        if self._reading is None or self._last_end - self._read_at < READING_S:
            return None
        self._read_at = self._last_end
        return self._reading(self._last_end)

    def _room(self) -> bool:
        """For another span."""
        return self._keep_spans and len(self._spans) < MOST_SPANS
