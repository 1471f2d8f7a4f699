"""Pipeline schedules: what a visit may do early or put off, and what it holds meanwhile. To add one, write its entry.

None changes the bits of a run. How they look, and the rule that asks them: `next_action.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ringtmp.errors import unknown

ScheduleName = Literal["1f1b", "gpipe", "zero-bubble"]
#: A schedule, or that the plan chooses one.
ScheduleChoice = Literal["auto", "1f1b", "gpipe", "zero-bubble"]
AUTO: ScheduleChoice = "auto"


@dataclass(frozen=True, slots=True)
class PipelineSchedule:
    name: ScheduleName
    all_forward_first: bool = False  # no gradient goes back before a step's last microbatch has gone forward
    defers_weights: bool = False  # gradients of weights wait for time in which nothing else is runnable

    def default_window(self, visits: int, microbatches: int, staleness: int = 0) -> int:
        """Enough microbatches in flight to cover every visit and the transfer between each two; all of them, where no gradient
        comes back before the last has gone in. Delayed steps overlap, so that those of the next one count too."""
        if self.all_forward_first:
            return microbatches
        return max(1, min(microbatches * (1 + staleness), 2 * visits - 1))

    def places(self, window: int) -> int:
        """Microbatches a visit stores at most."""
        return window + self._deferred(window)

    def held(self, visit: int, visits: int, window: int, safe: bool) -> int:
        """Microbatches a visit holds where all take about the same time; `safe`: whatever happens."""
        if self.all_forward_first:
            return self.places(window)
        if safe:
            return 1 if visit == visits - 1 and not self.defers_weights else self.places(window)
        return min(self.places(window), 2 * (visits - 1 - visit) + 1 + self._deferred(window))

    def _deferred(self, window: int) -> int:
        """Deferred weight gradients fill the wait for the ring to drain, about half of a default window at the front; more of
        them would cost memory and find no gap."""
        return (window + 1) // 2 if self.defers_weights else 0


DEFAULT_SCHEDULE = PipelineSchedule("1f1b")
SCHEDULES: dict[str, PipelineSchedule] = {
    each.name: each
    for each in (
        DEFAULT_SCHEDULE,
        PipelineSchedule("gpipe", all_forward_first=True),
        PipelineSchedule("zero-bubble", defers_weights=True),
    )
}


def schedule_named(name: str) -> PipelineSchedule:
    if name not in SCHEDULES:
        raise unknown("schedule", name, SCHEDULES)
    return SCHEDULES[name]
