"""scaling: the same task on 1 to 8 equal devices. Strong: the batch stays; weak: it grows with the devices.

Speed-up is samples per second over those of one device alone; efficiency is speed-up over devices, servers included.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ringtmp.bench.analysis import intervals, page_drawings, per_step_values, ring_against_server
from ringtmp.bench.analysis.intervals import Interval
from ringtmp.bench.bench_request import ALONE, Choices
from ringtmp.bench.experiments import learning_progress
from ringtmp.bench.measuring.measurement_files import Measured
from ringtmp.bench.training_runs import common_runs
from ringtmp.bench.training_runs.strategy_variants import Way
from ringtmp.bench.training_runs.train_commands import Cell, cell
from ringtmp.bench.training_runs.workloads import Workload
from ringtmp.report.page_content import Figure, Section, Series, Skipped, Table, Verdict
from ringtmp.units import bytes_text

AIM = "RingTMP is at least as scalable"
STRONG, WEAK = "strong", "weak"
QUICK_WAYS = ("ring", "ps:bsp")
FULL_WAYS = ("ring", "ring:staleness=1", "ps:bsp", "ps:bsp:servers=workers", "allreduce:ring")
#: Of weak scaling.
SAMPLES_PER_DEVICE = 8


def cells(choices: Choices) -> list[Cell]:
    return [*_kind(choices, STRONG), *([] if choices.quick else _kind(choices, WEAK))]


def section(choices: Choices, measured: Measured) -> Section:
    verdicts, figures, tables = [], [], []
    for kind in (STRONG, WEAK):
        group = [each for each in cells(choices) if each.label == kind]
        base = next((each for each in group if each.way is ALONE), None)
        if base is None or not measured.records(base.job):
            continue
        verdicts.append(_verdict(kind, group, base, choices, measured))
        figures += _figures(kind, group, base, measured, choices)
        tables.append(_table(kind, group, base, measured, choices.seed))
    return Section(
        "scaling",
        "Scaling",
        f"The model is {choices.scaled().name}. Speed-up is samples per second over those of one such device alone; a "
        "dedicated server counts as a device. Every device has the same share of a core at every size.",
        tuple(verdicts),
        tuple(figures),
        tuple(tables),
        (
            *_skipped(choices),
            *common_runs.learned(common_runs.task_cells(choices), measured)[1],
            *common_runs.missing(cells(choices), measured),
        ),
    )


def _verdict(kind: str, group: Sequence[Cell], base: Cell, choices: Choices, measured: Measured) -> Verdict:
    most = max(each.nodes for each in group)
    compared = common_runs.not_behind([each for each in group if each.nodes == most], choices, measured)
    (alone,) = page_drawings.sampled([base], measured, per_step_values.sample_times, "ratio")
    found = page_drawings.sampled(compared, measured, per_step_values.sample_times, "ratio")
    return ring_against_server.verdict(
        f"{AIM} ({kind})",
        f"time per sample on {most} devices",
        lambda side: f"{alone.middle / side.middle:.2f} times one device",
        ring_against_server.both(found, choices.seed),
        as_good=True,
    )


def _kind(choices: Choices, kind: str) -> list[Cell]:
    counts = choices.node_counts
    found = []
    for count in counts:
        devices = choices.place(count, most=max(counts))
        for way in _ways(choices) if count > 1 else [ALONE]:
            if way.refusal(count, common_runs.layers(choices.scaled()), batches=True) is None:
                found.append(cell(choices, way, _work(choices, kind, count, way), devices, kind))
    return found


def _ways(choices: Choices) -> list[Way]:
    """Each costs a run for every number of devices."""
    return choices.some_of(QUICK_WAYS if choices.quick else FULL_WAYS)


def _work(choices: Choices, kind: str, nodes: int, way: Way) -> Workload:
    if not choices.quick:
        work = choices.scaled()
        return msgspec.structs.replace(work, batch_size=SAMPLES_PER_DEVICE * nodes if kind == WEAK else work.batch_size)
    # In a small bench the smallest and the largest are runs that are there already.
    shared = nodes in (1, choices.nodes)
    work = learning_progress.alone(choices).work if way is ALONE else common_runs.tuned(choices, way)
    return work if shared else msgspec.structs.replace(work, steps=12)


def _speedup(each: Cell, base: Cell, measured: Measured, seed: int) -> Interval | None:
    records, alone = measured.records(each.job), measured.records(base.job)
    if not records or not alone:
        return None
    over = [per_step_values.sample_times(record, base.job.warm_up) for record in alone]
    under = [per_step_values.sample_times(record, each.job.warm_up) for record in records]
    return intervals.ratio(over, "ratio", under, "ratio", seed)


def _figures(kind: str, group: Sequence[Cell], base: Cell, measured: Measured, choices: Choices) -> list[Figure]:
    points: dict[str, list[tuple[float, Interval]]] = {}
    busiest: dict[str, list[tuple[float, Interval]]] = {}
    for each in group:
        speedup = _speedup(each, base, measured, choices.seed)
        if speedup is None or each.way is ALONE:
            continue
        points.setdefault(each.way.label, [(1.0, Interval(1.0, 1.0, 1.0))]).append((float(each.nodes), speedup))
        moved = [per_step_values.busiest_bytes(record, each.job.warm_up) for record in measured.records(each.job)]
        middle = sum(moved) / len(moved)
        busiest.setdefault(each.way.label, []).append((float(each.nodes), Interval(middle, min(moved), max(moved))))
    if not points:
        return []
    made = page_drawings.lines(f"speed-up-{kind}", f"Speed-up, {kind} scaling", "devices", "times one device", points)
    counts = tuple(float(count) for count in choices.node_counts)
    ideal = Series("ideal", counts, counts)
    made = Figure(made.name, made.title, "lines", made.x_label, made.y_label, (*made.series, ideal),
                  caption="Bands are 95 % intervals; the ideal line is one device's speed times devices.")  # fmt: skip
    link = page_drawings.lines(f"busiest-link-{kind}", f"Bytes per step through the busiest link, {kind} scaling", "devices",
                      "bytes per step", busiest, log_y=True)  # fmt: skip
    return [made, link]


def _table(kind: str, group: Sequence[Cell], base: Cell, measured: Measured, seed: int) -> Table:
    rows = []
    for each in group:
        speedup = _speedup(each, base, measured, seed)
        if speedup is None:
            continue
        moved = max(per_step_values.busiest_bytes(record, each.job.warm_up) for record in measured.records(each.job))
        times = [per_step_values.sample_times(record, each.job.warm_up) for record in measured.records(each.job)]
        rate = intervals.interval(times, "ratio", seed)
        rows.append(
            (
                each.way.label,
                str(each.nodes),
                str(each.work.batch_size),
                f"{1 / rate.middle:.0f}",
                page_drawings.ranged(speedup, lambda value: f"{value:.2f}"),
                f"{speedup.middle / each.nodes:.0%}",
                bytes_text(moved),
            )
        )
    columns = ("strategy", "devices", "batch", "samples per second", "speed-up", "efficiency", "busiest link, per step")
    return Table(f"{kind.capitalize()} scaling", columns, tuple(rows))


def _skipped(choices: Choices) -> list[Skipped]:
    found = [each for count in choices.node_counts if count > 1 for each in common_runs.refused(choices, count)]
    found += common_runs.not_chosen(choices, _ways(choices))
    found += common_runs.whole_data(choices, "scaling")
    if choices.quick:
        found.append(Skipped("weak scaling, larger rings", "small sizes; ringtmp bench scaling measures them"))
    elif choices.devices:
        most = max(choices.node_counts)
        found.append(Skipped(f"more than {most} devices", f"the devices file has {len(choices.devices)}"))
    return found
