"""When devices are not as fast as planned: whether to rebuild the ring, and how.

Pure: how long every node computed in each step comes in, a move comes out. Only work on layers counts, because only that
moves with them. A node strays when this time, in both halves of the last WATCH_S seconds, is more than TOLERANCE off the
forecast. Then every device's speed is corrected by what was measured, and present and best cuts are simulated with it: what
is wrong with all forecasts alike cancels out.

    gain = 1 - best step / present step        move if gain * measured step * steps to come > REPAID * cost of the move

A device that is planned with nothing is not measured; it is taken to differ from its forecast as the others do.

Lines cannot be seen from busy times. When steps become longer than they were at first and nobody strays, the lines are
suspected: whoever leads tries them, as before the first plan, and what was found is planned with.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ringtmp.errors import RingError
from ringtmp.plan import planner
from ringtmp.plan.devices import Device, Path
from ringtmp.plan.layer_costs import CostTable
from ringtmp.plan.planner import Plan

TOLERANCE = 0.15
WATCH_S = 10.0
#: So often in that time: medians of many short steps are not for nothing.
LOOKS = 10
LEAST_STEPS = 6
#: The first steps of a generation warm caches and allocators.
WARM_UP_STEPS = 2
LEAST_GAIN = 0.1
REPAID = 2.0
#: Planning takes a moment: after a no it is not asked again at once, nor about the same.
ASK_EVERY_S = 15.0
NEWS = 0.1
#: Between two moves at least.
PAUSE_S = 60.0
#: Off the forecast by this much: the device has changed since the last move, which is then neither to blame nor waited out.
CHANGED = 0.5
#: Nobody is further off its forecast than this, either way: what nodes say of themselves must not upset the planner.
FURTHEST = 1000.0


@dataclass(frozen=True, slots=True)
class Move:
    """Rebuild the ring with these devices."""

    devices: tuple[Device, ...]  # everyone, as measured
    plan: Plan
    reason: str
    step_s: float  # measured
    gain: float  # of it, as predicted: 0.25 is a quarter less

    @property
    def promised_s(self) -> float:
        return self.step_s * (1 - self.gain)


class Balance:
    """What one generation measures. `members[n]` is the number under which device n of the plan reports."""

    def __init__(self, plan: Plan, everyone: Sequence[Device], members: Sequence[int], not_before: float = 0.0) -> None:
        self._plan = plan
        self._everyone = tuple(everyone)
        self._paths = dict(plan.paths)
        self._number = {number: node for node, number in enumerate(members)}
        self._not_before = not_before
        self._calm_until = 0.0
        self._next_look = 0.0
        self._forecast_s = _compute_s(plan)
        self._computed = [_Window() for _ in members]
        self._steps = _Window()
        self._usual_s: float | None = None  # a step, when the lines were last known
        self._slow_line: str | None = None
        self._asked: tuple[list[float], str | None] | None = None  # what no move followed from

    @property
    def step_s(self) -> float:
        return self._steps.halves()[1]

    @property
    def watched(self) -> bool:
        """Long enough to tell."""
        return all(window.full for window in (self._steps, *self._computed))

    def calm(self, until: float) -> None:
        """No move before, unless a device changes: forecasts have not been worth much."""
        self._calm_until = until

    def heard(self, number: int, at: float, compute_s: float) -> None:
        """A node's share of a step."""
        if (node := self._number.get(number)) is not None:
            self._computed[node].add(at, compute_s)

    def step_took(self, at: float, seconds: float) -> None:
        self._steps.add(at, seconds)

    def kept(self, move: Move) -> bool:
        """Whether the move this generation came of gave at least half of what it promised, as far as it could."""
        return self._changed() or self.step_s <= move.step_s * (1 - move.gain / 2)

    def decide(self, now: float, steps_left: int, move_s: float) -> Move | None:
        """`move_s`: what a new generation costs, without the steps done again."""
        if now < max(self._not_before, self._next_look):
            return None
        self._next_look = now + WATCH_S / LOOKS
        if not self.watched or (now < self._calm_until and not self._changed()):
            return None
        reason = self._slow_line or self._straying()
        ratios = [newer for _, newer in self._ratios()]
        if reason is None or self._answered(ratios):
            return None
        self._not_before = now + ASK_EVERY_S
        made, options = self._plan, self._plan.options
        factors = {device.name: ratio for device, ratio in zip(made.devices, ratios, strict=True)}
        usual = statistics.median(factors.values())
        devices = tuple(at_pace(device, factors.get(device.name, usual)) for device in self._everyone)
        named = {device.name: device for device in devices}
        members = [named[device.name] for device in made.devices]
        try:
            as_it_is = replace(options, cuts=made.bounds, window=made.window)
            present = planner.plan(made.layers, members, as_it_is, self._paths)
            best = planner.plan(made.layers, devices, options, self._paths)
        except RingError:
            return None  # no room for anything else
        if not present.step_s > 0:
            return None
        gain = 1 - best.step_s / present.step_s
        if gain < LEAST_GAIN or gain * self.step_s * steps_left < REPAID * move_s:
            return None
        return Move(devices, best, reason, self.step_s, gain)

    def _answered(self, ratios: list[float]) -> bool:
        """Whether about the same was asked before: the answer was no, and planning takes a moment."""
        before, self._asked = self._asked, (ratios, self._slow_line)
        if before is None or before[1] != self._slow_line:
            return False
        same = all(abs(new / old - 1) < NEWS for new, old in zip(ratios, before[0], strict=True))
        if same:
            self._asked = before
        return same

    def suspects_lines(self, now: float) -> bool:
        """Whether steps are longer than they were, and no processor is the reason."""
        if now < max(self._not_before, self._calm_until) or not self.watched:
            return False
        older, newer = self._steps.halves()
        if self._usual_s is None:
            self._usual_s = newer
        return min(older, newer) > self._usual_s * (1 + TOLERANCE) and self._straying() is None

    def lines_found(self, now: float, rates: Mapping[int, tuple[float, float]]) -> None:
        """Bytes per second to and from nodes, by their numbers."""
        self._not_before = now + ASK_EVERY_S
        self._usual_s = self.step_s
        found = {self._plan.devices[self._number[number]].name: rate for number, rate in rates.items()}
        worst, devices = 1 - TOLERANCE, []
        for device in self._everyone:
            before = self._from_master(device)
            down, up = (min(pair) for pair in zip(found.get(device.name, before), before, strict=True))
            share = min(down / before[0], up / before[1]) if math.isfinite(down + up) else 1.0
            if share < worst:
                worst = share
                self._slow_line = f"the link of {device.name} carries {share:.0%} of what it used to"
                self._not_before = now
            devices.append(self._with_line(device, down, up))
        self._everyone = tuple(devices)

    def _from_master(self, device: Device) -> tuple[float, float]:
        """Bytes per second to a device and from it, as they were known."""
        there, back = self._master_paths(device)
        if there is None or back is None:
            return device.link.down_bytes_per_s, device.link.up_bytes_per_s
        return there.bytes_per_s, back.bytes_per_s

    def _with_line(self, device: Device, down: float, up: float) -> Device:
        there, back = self._master_paths(device)
        if there is None or back is None:
            return replace(device, link=replace(device.link, down_bytes_per_s=down, up_bytes_per_s=up))
        master = self._everyone[0].name  # the way to it is slow, not the device's own line
        self._paths[master, device.name] = replace(there, bytes_per_s=down)
        self._paths[device.name, master] = replace(back, bytes_per_s=up)
        return device

    def _master_paths(self, device: Device) -> tuple[Path | None, Path | None]:
        master = self._everyone[0].name
        return self._paths.get((master, device.name)), self._paths.get((device.name, master))

    def _ratios(self) -> list[tuple[float, float]]:
        """By node, how many times as long as forecast it computes: in the older half of the time watched, in the newer."""
        found = []
        for forecast_s, window in zip(self._forecast_s, self._computed, strict=True):
            older, newer = window.halves()
            found.append((_ratio(older, forecast_s), _ratio(newer, forecast_s)))
        return found

    def _changed(self) -> bool:
        return any(min(_off(older), _off(newer)) > CHANGED for older, newer in self._ratios())

    def _straying(self) -> str | None:
        """Who is off, the furthest first; None if nobody is."""
        found = []
        for device, (older, newer) in zip(self._plan.devices, self._ratios(), strict=True):
            strays = min(_off(older), _off(newer)) if (older > 1) == (newer > 1) else 0.0
            if strays > TOLERANCE:
                found.append((-strays, device.name, f"{newer:.2g} times"))
        if not found:
            return None
        (_, name, times), *others = sorted(found)
        return f"{name} takes {times} as long as planned" + "".join(f", {who} {much}" for _, who, much in others)


class _Window:
    """Measurements of the last WATCH_S seconds, or of the last LEAST_STEPS steps where those take longer."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque()
        self._skipped = 0

    def add(self, at: float, value: float) -> None:
        if self._skipped < WARM_UP_STEPS:
            self._skipped += 1
            return
        seen = self._seen
        seen.append((at, value))
        while len(seen) > LEAST_STEPS and seen[1][0] <= at - WATCH_S:
            seen.popleft()

    @property
    def full(self) -> bool:
        return len(self._seen) >= LEAST_STEPS and self._seen[-1][0] - self._seen[0][0] >= WATCH_S

    def halves(self) -> tuple[float, float]:
        """The medians of the older and the newer half."""
        values = [value for _, value in self._seen]
        middle = len(values) // 2
        return statistics.median(values[:middle]), statistics.median(values[middle:])


def at_pace(device: Device, factor: float) -> Device:
    """The same device where everything takes `factor` times as long; its lines are what they were."""
    link = device.link
    slower = replace(link, message_cpu_s=link.message_cpu_s * factor, byte_cpu_s=link.byte_cpu_s * factor)
    return replace(device, speed=device.speed / factor, link=slower)


def _compute_s(plan: Plan) -> list[float]:
    """Seconds a step of work on layers takes each node, by the forecast."""
    count = plan.options.ring.microbatches
    table = CostTable(plan.layers, plan.options.batch_size / count, plan.options.wire_ratio)
    found = []
    for node, device in enumerate(plan.devices):
        stages = [table.stage(visit.first, visit.stop) for visit in plan.route.on(node)]
        work = sum(count * (stage.forward_s + stage.backward_s) + stage.update_s for stage in stages)
        found.append(work / device.pace)
    return found


def _ratio(measured_s: float, forecast_s: float) -> float:
    """A node that says it computed nothing, or had nothing to compute, is taken at its forecast."""
    if measured_s <= 0 or forecast_s <= 0:
        return 1.0
    return min(max(measured_s / forecast_s, 1 / FURTHEST), FURTHEST)


def _off(factor: float) -> float:
    return max(factor, 1 / factor) - 1
