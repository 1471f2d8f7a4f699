"""Records and intervals become the figures and tables that several experiments show. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ringtmp.bench.analysis import per_step_values
from ringtmp.bench.analysis.intervals import Centre, Interval, Step, interval
from ringtmp.bench.analysis.ring_against_server import Sampled, both
from ringtmp.bench.measuring.measurement_files import Measured
from ringtmp.bench.measuring.run_record import Record
from ringtmp.bench.training_runs.train_commands import Cell
from ringtmp.report.page_content import Figure, Series, Span, Table
from ringtmp.units import bytes_text, seconds_text

#: Record, steps to warm up -> a value per step
PerStep = Callable[[Record, int], Sequence[Step]]
#: Recorders' words for what a node waits for, in the order of the figure.
CAUSES = ("activations", "gradients", "parameters", "window")


def bars(
    name: str, title: str, unit: str, values: Mapping[str, Interval], caption: str = "", log: bool = False
) -> Figure:
    """A bar per way with its interval."""
    series = _series(unit, list(values.items()))
    return Figure(name, title, "bars", "", unit, (series,), caption=caption, log_y=log)


def lines(
    name: str, title: str, x: str, y: str, points: Mapping[str, Sequence[tuple[float, Interval]]], log_x: bool = False,
    log_y: bool = False, caption: str = "",
) -> Figure:  # fmt: skip
    made = tuple(_series(label, sorted(each, key=lambda point: point[0])) for label, each in points.items())
    return Figure(name, title, "lines", x, y, made, log_x=log_x, log_y=log_y, caption=caption)


def _series(name: str, points: Sequence[tuple[float | str, Interval]]) -> Series:
    x, values = zip(*points, strict=True) if points else ((), ())
    middle, low, high = (tuple(getattr(each, part) for each in values) for part in ("middle", "low", "high"))
    return Series(name, x, middle, low, high)


def causes_figure(name: str, title: str, records: Mapping[str, Sequence[Record]]) -> Figure:
    """Workers' time by what they waited for; the rest of a bar up to 1 is work."""
    shares = {label: cause_shares(each) for label, each in records.items()}
    known = sorted({cause for each in shares.values() for cause in each}, key=_rank)
    series = tuple(
        Series(cause, tuple(shares), tuple(each.get(cause, 0.0) for each in shares.values())) for cause in known
    )
    return Figure(
        name, title, "stacked", "", "share of workers' time in steps", series,
        caption="What workers waited for. What is missing to 1 is work. Dedicated servers are not in it.",
    )  # fmt: skip


def cause_shares(records: Sequence[Record]) -> dict[str, float]:
    """Of all workers' time in steps, over all repeats."""
    whole = sum(sum(t.busy_s) + sum(t.idle_s) for record in records for t in record.workers)
    found: dict[str, float] = {}
    for record in records:
        for track in record.workers:
            for cause, seconds in track.causes.items():
                found[cause] = found.get(cause, 0.0) + seconds / whole if whole else 0.0
    return found


def gantt(name: str, title: str, record: Record) -> Figure | None:
    """One step in the middle of the run; None where no step was kept whole."""
    if not record.bars:
        return None
    roles = {track.node: "server" if track.server else "master" if track.node == 0 else f"node {track.node}"
             for track in record.tracks}  # fmt: skip
    spans = tuple(Span(roles.get(bar.node, str(bar.node)), bar.kind, bar.start_s, bar.end_s) for bar in record.bars)
    return Figure(name, title, "gantt", spans=spans, caption="One step; where nothing is drawn a node waits.")


def sampled(cells: Sequence[Cell], measured: Measured, values: PerStep, centre: Centre = "mean") -> list[Sampled]:
    found = []
    for each in cells:
        repeats = tuple(tuple(values(record, each.job.warm_up)) for record in measured.records(each.job))
        if repeats and all(repeats):
            found.append(Sampled(each.way, repeats, centre))
    return found


#: What a step costs: in words, a value per step, how steps are averaged, as text.
_COSTS: tuple[tuple[str, PerStep, Centre, Callable[[float], str]], ...] = (
    ("time per step", per_step_values.step_s, "mean", seconds_text),
    ("idle share of workers", per_step_values.idle_times, "ratio", lambda value: share_text(value)),
    ("bytes per step", per_step_values.sent_bytes, "mean", bytes_text),
    ("busiest link, bytes per step", per_step_values.busiest_step_bytes, "mean", bytes_text),
    ("modelled joules per step", per_step_values.step_joules, "mean", lambda value: f"{value:.3g}"),
)


def cost_table(title: str, cells: Sequence[Cell], measured: Measured, seed: int) -> Table:
    """Time, idle share, bytes and joules per step, each with its interval."""
    rows = []
    for each in cells:
        records, found = measured.records(each.job), []
        for _, values, centre, text in _COSTS if records else ():
            repeats = [values(record, each.job.warm_up) for record in records]
            usual = each.way.centre if values is per_step_values.step_s else centre
            found.append(ranged(interval(repeats, usual, seed), text) if all(repeats) else "")
        rows += [(each.way.label, *found)] if found else []
    columns = ("strategy", *(what for what, *_ in _COSTS))
    return Table(title, columns, tuple(rows), "In brackets 95 % intervals over repeats and steps.")


def against_table(title: str, cells: Sequence[Cell], measured: Measured, seed: int) -> Table:
    """The best ring against the best parameter server, cost by cost, at the same precision and each at its best."""
    rows = []
    for what, values, centre, text in _COSTS:
        for kind, each in both(sampled(cells, measured, values, centre), seed):
            sides = (f"{side.way.label} {text(side.middle)}" for side in (each.ring, each.server))
            rows.append((what, kind, *sides, each.ratio_text))
    columns = ("cost", "compared", "ring", "parameter server", "ring over server")
    return Table(title, columns, tuple(rows), "In brackets 95 % intervals; below 1 the ring costs less.")


def ranged(value: Interval, text: Callable[[float], str]) -> str:
    """With its interval, unless that is nothing but the value."""
    middle, low, high = (text(each) for each in (value.middle, value.low, value.high))
    return middle if low == middle == high else f"{middle} ({low}–{high})"


def slug(label: str) -> str:
    """For names of files."""
    return "".join(each if each.isalnum() else "-" for each in label.lower())


def share_text(share: float) -> str:
    return f"{share:.1%}"


def _rank(cause: str) -> tuple[int, str]:
    return (CAUSES.index(cause) if cause in CAUSES else len(CAUSES), cause)
