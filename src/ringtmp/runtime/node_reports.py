"""What nodes report of their steps, checked: each step once, in order, of those they were given, and no more than fits.

Whoever reports anything else breaks the protocol. Times are cut to what the generation has lasted: the clock of a master
that slept does not show how long, so a long time alone is no offence.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ringtmp.errors import ProtocolError
from ringtmp.metrics import events
from ringtmp.metrics.events import NodeStep
from ringtmp.metrics.step_recorder import MOST_SPANS, is_detailed
from ringtmp.runtime import check_node_replies

#: More than any device sends, or receives, in one step.
MOST_STEP_BYTES = 2**42
#: Causes of idleness, and kinds of work.
MOST_KINDS = 32
#: Two clocks do not run quite alike, and a step may have begun a little before.
DRIFT, SLACK_S = 1.1, 1.0
MOST_W = 1e6


class Reports:
    """Of one generation, whose first step is `first_step`."""

    def __init__(self, first_step: int, detailed_steps: int, clock: Callable[[], float]) -> None:
        self._first_step = first_step
        self._detailed_steps = detailed_steps
        self._clock = clock
        self._since = clock()
        self.asked = -1  # a step that somebody wants to see in full
        self._next: dict[int, int] = {}  # by node: the first step it has not reported

    def line(self, data: bytes, sender: int, committed: int) -> bytes:
        """A node's share of a step, as a line for the log. `committed`: the first step nobody was given yet."""
        event = check_node_replies.node_step(data, sender)
        first = self._next.get(sender, self._first_step)
        if not first <= event.step < committed:
            raise ProtocolError(
                f"reports step {event.step}, which it has reported before, or was never given: from {first} to "
                f"{committed - 1} it may"
            )
        self._next[sender] = event.step + 1
        asked = event.step == self.asked or is_detailed(event.step, self._first_step, self._detailed_steps)
        if event.spans and not asked:
            raise ProtocolError(f"reports every span of step {event.step}, which nobody asked for")
        for what, count, most in (
            ("spans", len(event.spans), MOST_SPANS),
            ("kinds of work", len(event.busy), MOST_KINDS),
            ("kinds of waiting", len(event.idle), MOST_KINDS),
            ("bytes sent", event.sent_bytes, MOST_STEP_BYTES),
            ("bytes received", event.received_bytes, MOST_STEP_BYTES),
        ):
            if count > most:
                raise ProtocolError(f"reports {count} {what} in step {event.step}, over the limit of {most}")
        return events.encode(self._possible(event))

    def _possible(self, event: NodeStep) -> NodeStep:
        """With no time longer than the generation has lasted."""
        most_s = (self._clock() - self._since) * DRIFT + SLACK_S

        def cut(times: dict[str, float]) -> dict[str, float]:
            return {name: min(value, most_s) for name, value in times.items()}

        return msgspec.structs.replace(
            event,
            busy_s=min(event.busy_s, most_s),
            idle_s=min(event.idle_s, most_s),
            busy=cut(event.busy),
            idle=cut(event.idle),
            joules=None if event.joules is None else min(event.joules, most_s * MOST_W),
        )
