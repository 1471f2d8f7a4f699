"""equations: how long is a step when links get slower? Measured, against the three equations of the idea.

    (1) TIME = I T             computing alone, links cost nothing
    (2) TIME = I (c + T)       computing, then communicating
    (3) TIME = I max(c, T)     computing and communicating at once: what the ring aims at

T is the longest any node was busy in a step on the fastest links; c is what the busiest link carried in a step over its
rate. (3) has no room for filling and draining a pipe, so an exact schedule lies above it.
"""

from __future__ import annotations

from statistics import median

import msgspec

from ringtmp.bench.analysis import intervals, page_drawings, per_step_values
from ringtmp.bench.analysis.intervals import Interval
from ringtmp.bench.bench_request import LINK_MBPS, Choices
from ringtmp.bench.measuring.measurement_files import Measured
from ringtmp.bench.measuring.run_record import Record
from ringtmp.bench.training_runs import common_runs
from ringtmp.bench.training_runs.strategy_variants import Way
from ringtmp.bench.training_runs.train_commands import Cell, cell
from ringtmp.report.page_content import Figure, Holds, Section, Series, Table, Verdict
from ringtmp.units import seconds_text

AIM = "Communication hides behind computing: equation (3)"
QUICK_WAYS = ("ring", "ps:bsp")
FULL_WAYS = ("ring", "ring:staleness=1", "ps:bsp", "allreduce:ring")
SLOW_MBPS = 10.0
APART = 0.2
RATES = {True: (20.0, LINK_MBPS), False: (1.0, 3.0, 10.0, 30.0, LINK_MBPS, 300.0, 1000.0, 10000.0)}


class Point(msgspec.Struct, frozen=True):
    mbps: float
    measured_s: Interval
    compute_s: float
    transfer_s: float

    @property
    def apart(self) -> bool:
        """Whether (2) and (3) differ by more than the overhead of anything."""
        return min(self.compute_s, self.transfer_s) > APART * max(self.compute_s, self.transfer_s)

    @property
    def predicted_s(self) -> tuple[float, float, float]:
        return self.compute_s, self.transfer_s + self.compute_s, max(self.transfer_s, self.compute_s)


def cells(choices: Choices) -> list[Cell]:
    found = []
    for way in _ways(choices):
        for rate in RATES[choices.quick]:
            # On a slow link a step of the parameter server takes half a minute, and each is as long as the one before.
            steps = 6 if choices.quick or rate < SLOW_MBPS else 16
            # The usual rate is that of a run which is there already.
            work = common_runs.tuned(choices, way, None if rate == LINK_MBPS and choices.quick else steps)
            found.append(cell(choices, way, work, choices.place(choices.nodes, link_mbps=rate), f"{rate:g} Mbit/s"))
    return found


def section(choices: Choices, measured: Measured) -> Section:
    figures, rows, verdicts = [], [], []
    for way in _ways(choices):
        points = curve([each for each in cells(choices) if each.way.label == way.label], measured, choices.seed)
        if not points:
            continue
        figures.append(_figure(way, points))
        rows += [_row(way, point) for point in points]
        verdicts.append(_verdict(way, points))
    columns = ("strategy", "Mbit/s", "measured", "T", "c", "(1) T", "(2) c + T", "(3) max(c, T)", "measured over (3)")
    return Section(
        "equations",
        "The equations",
        (__doc__ or "").partition("\n\n")[2].strip(),
        tuple(verdicts),
        tuple(figures),
        (Table("Step time by link rate", columns, tuple(rows)),),
        (
            *common_runs.refused(choices),
            *common_runs.not_chosen(choices, _ways(choices)),
            *common_runs.missing(cells(choices), measured),
        ),
    )


def curve(group: list[Cell], measured: Measured, seed: int) -> list[Point]:
    """Slowest link first. T is taken where links are fastest."""
    known = sorted(((_rate(each), each) for each in group if measured.records(each.job)), key=lambda pair: pair[0])
    if not known:
        return []
    fastest = known[-1][1]
    compute_s = median(busiest_s(record, fastest.job.warm_up) for record in measured.records(fastest.job))
    found = []
    for rate, each in known:
        records = measured.records(each.job)
        times = [per_step_values.step_s(record, each.job.warm_up) for record in records]
        moved = median(per_step_values.busiest_bytes(record, each.job.warm_up) for record in records)
        found.append(Point(rate, intervals.interval(times, each.way.centre, seed), compute_s, moved * 8 / (rate * 1e6)))
    return found


def busiest_s(record: Record, warm_up: int) -> float:
    """The median over steps of how long the busiest node was busy."""
    steps = range(warm_up, len(record.steps))
    return record.scale * median(max(track.busy_s[step] for track in record.tracks) for step in steps)


def _ways(choices: Choices) -> list[Way]:
    some = choices.some_of(QUICK_WAYS if choices.quick else FULL_WAYS)
    return [way for way in some if way.refusal(choices.nodes, common_runs.layers(choices.task())) is None]


def _rate(each: Cell) -> float:
    return float(each.label.split()[0])


def _figure(way: Way, points: list[Point]) -> Figure:
    measured = page_drawings.lines(
        "", "", "", "", {"measured": [(point.mbps, point.measured_s) for point in points]}
    ).series
    x = tuple(point.mbps for point in points)
    lines = tuple(
        Series(name, x, tuple(point.predicted_s[index] for point in points))
        for index, name in enumerate(("(1) T", "(2) c + T", "(3) max(c, T)"))
    )
    name, title = f"equations-{page_drawings.slug(way.label)}", f"Step time of {way.label} by link rate"
    return Figure(name, title, "lines", "Mbit/s", "seconds per step",
                  (*measured, *lines), log_x=True, log_y=True, caption="Slow links to the left.")  # fmt: skip


def _row(way: Way, point: Point) -> tuple[str, ...]:
    times = (point.compute_s, point.transfer_s, *point.predicted_s)
    return (
        way.label,
        f"{point.mbps:g}",
        page_drawings.ranged(point.measured_s, seconds_text),
        *(seconds_text(each) for each in times),
        f"{point.measured_s.middle / point.predicted_s[2]:.2f}",
    )


def _verdict(way: Way, points: list[Point]) -> Verdict:
    """Below (2), wherever (2) and (3) can be told apart?"""
    over2 = [point.measured_s.middle / point.predicted_s[1] for point in points]
    over3 = [point.measured_s.middle / point.predicted_s[2] for point in points]
    told = [point for point in points if point.apart]
    below = sum(point.measured_s.high < point.predicted_s[1] for point in told)
    above = sum(point.measured_s.low > point.predicted_s[1] for point in told)
    holds: Holds = "open" if not told else "yes" if below == len(told) else "no" if above == len(told) else "mixed"
    return Verdict(
        f"{AIM} ({way.label})",
        f"{way.label}: over {points[0].mbps:g} to {points[-1].mbps:g} Mbit/s a step takes {min(over3):.2f} to {max(over3):.2f} "
        f"times equation (3) and {min(over2):.2f} to {max(over2):.2f} times equation (2); of the {len(told)} rates at "
        f"which c and T are less than {1 / APART:g} times apart it is below (2) at {below}, above it at {above}.",
        holds,
        f"{min(over3):.2f}–{max(over3):.2f}",
    )
