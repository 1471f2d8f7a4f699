"""Is the ring better? The best ring against the best parameter server, with an interval, in one sentence. Pure.

A ratio below 1 is in the ring's favour: everything compared here is a cost. If the 95 % interval has 1 inside, no
difference was found, and that is what is said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from ringtmp.bench.analysis import intervals
from ringtmp.bench.analysis.intervals import Centre, Interval, Step
from ringtmp.bench.training_runs.strategy_variants import RING, SERVER, Way
from ringtmp.report.page_content import Holds, Verdict
from ringtmp.wire.formats import wire_format

#: So much more is as good.
MARGIN = 0.05


class Sampled(msgspec.Struct, frozen=True):
    """A way with what was measured of it: repeats, each with its steps."""

    way: Way
    samples: tuple[tuple[Step, ...], ...]
    centre: Centre = "mean"

    @property
    def middle(self) -> float:
        return intervals.middle(self.samples, self.centre)


class Contrast(msgspec.Struct, frozen=True):
    ring: Sampled
    server: Sampled
    ratio: Interval

    @property
    def single(self) -> bool:
        """One value on a side has no spread: nothing can be said of chance."""
        return min(sum(map(len, each.samples)) for each in (self.ring, self.server)) < 2

    @property
    def holds(self) -> Holds:
        """yes: the ring costs less; no: it costs more; open: no difference was found."""
        if self.single:
            return "open"
        return "yes" if self.ratio.high < 1 else "no" if self.ratio.low > 1 else "open"

    @property
    def as_good(self) -> bool:
        return not self.single and self.ratio.high <= 1 + MARGIN

    @property
    def ratio_text(self) -> str:
        if self.single:
            return f"{_short(self.ratio.middle)} (measured once, no interval)"
        return f"{_short(self.ratio.middle)} ({_short(self.ratio.low)}–{_short(self.ratio.high)})"


def contrast(found: Sequence[Sampled], seed: int) -> Contrast | None:
    """None where one side was not measured."""
    rings = [each for each in found if each.way.strategy == RING and each.samples]
    servers = [each for each in found if each.way.strategy == SERVER and each.samples]
    if not rings or not servers:
        return None
    ring, server = (min(side, key=lambda each: each.middle) for side in (rings, servers))
    under = server.middle
    if under == 0:  # nothing to divide by: as good as it gets
        return Contrast(ring, server, Interval(1.0, 1.0, 1.0) if ring.middle == 0 else Interval(9e9, 9e9, 9e9))
    ratio = intervals.ratio(ring.samples, ring.centre, server.samples, server.centre, seed)
    return Contrast(ring, server, ratio)


def both(found: Sequence[Sampled], seed: int) -> list[tuple[str, Contrast]]:
    """At the same wire precision (and no delay), and each at its best."""
    plain = [each for each in found if wire_format(each.way.wire).exact and not each.way.delayed]
    same, best = contrast(plain, seed), contrast(found, seed)
    if same is not None and same == best:
        return [("same precision and each at its best", same)]
    made = [("same precision", same), ("each at its best", best)]
    return [(name, each) for name, each in made if each is not None]


def verdict(
    aim: str, what: str, text: Callable[[Sampled], str], pairs: Sequence[tuple[str, Contrast]], *, as_good: bool = False
) -> Verdict:
    """`what` is the cost in words, `text` the figure of a side with its unit. `as_good`: the aim is to be as good, and holds
    where the ring certainly costs no more than a little more."""
    if not pairs:
        return Verdict(
            aim, f"Open: the ring or the parameter server was not measured, so {what} cannot be compared.", "open"
        )
    parts = []
    for name, each in pairs:
        ring, server = (f"{side.way.label} {text(side)}" for side in (each.ring, each.server))
        said = {
            "yes": f"{_times(1 / each.ratio.middle) if each.ratio.middle else 'infinitely'} less",
            "no": f"{_times(each.ratio.middle)} more",
            "open": "measured once, so open" if each.single else "no difference found",
        }[each.holds]
        if as_good and each.as_good and each.holds != "yes":
            said = f"as good, within {MARGIN:.0%}"
        parts.append(f"{name}, {ring} against {server}: {said}, ratio {each.ratio_text}")
    answers: set[Holds] = {"yes" if as_good and each.as_good else each.holds for _, each in pairs}
    holds: Holds = answers.pop() if len(answers) == 1 else "mixed"
    return Verdict(aim, f"{what[0].upper()}{what[1:]}: {'; '.join(parts)}.", holds, pairs[0][1].ratio_text)


def figures(found: Sequence[Sampled], seed: int) -> dict[str, Interval]:
    return {each.way.label: intervals.interval(each.samples, each.centre, seed) for each in found if each.samples}


def _times(ratio: float) -> str:
    return f"{ratio:.3g} times"


def _short(value: float) -> str:
    return f"{value:.2f}" if 0.1 <= value < 100 else f"{value:.3g}"
