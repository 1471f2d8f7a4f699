"""idle: how much of its time in training steps does a worker wait, and for what?

By strategy, number of nodes and batch size. Dedicated servers are listed apart: their waiting is no worker's. Time
throttled away from an emulated device counts as busy.
"""

from __future__ import annotations

from collections.abc import Sequence

from ringtmp.bench.analysis import page_drawings, per_step_values, ring_against_server
from ringtmp.bench.analysis.intervals import Interval
from ringtmp.bench.bench_request import Choices
from ringtmp.bench.measuring.measurement_files import Measured
from ringtmp.bench.training_runs import common_runs
from ringtmp.bench.training_runs.strategy_variants import PLAIN_SERVER, RING
from ringtmp.bench.training_runs.train_commands import Cell, cell
from ringtmp.report.page_content import Figure, Section, Skipped, Table, Verdict
from ringtmp.units import bytes_text

AIM = "RingTMP reduces the time workers are idle"


def cells(choices: Choices) -> list[Cell]:
    return [
        *common_runs.task_cells(choices),
        *_by_nodes(choices),
        *_by_batch(choices),
        *common_runs.anchor_cells(choices),
    ]


def section(choices: Choices, measured: Measured) -> Section:
    main = common_runs.task_cells(choices)
    found = _idle(main, measured)
    fair, behind = common_runs.learned(main, measured)
    shares = ring_against_server.figures(found, choices.seed)
    records = {each.way.label: measured.records(each.job) for each in main if measured.records(each.job)}
    figures = [
        page_drawings.causes_figure("idle-causes", f"What workers wait for, {choices.nodes} nodes", records),
        page_drawings.bars(
            "idle-share", f"Idle share of workers, {choices.nodes} nodes", "share of time in steps", shares
        ),
        _lines("idle-by-nodes", "nodes", [*_by_nodes(choices), *main], choices, measured),
        _lines("idle-by-batch", "samples per step", [*_by_batch(choices), *main], choices, measured),
        *(
            page_drawings.gantt(f"gantt-{page_drawings.slug(label)}", f"One step of {label}", each[0])
            for label, each in records.items()
        ),
    ]
    anchors = common_runs.anchor_cells(choices)
    task = page_drawings.cost_table(f"The digits, {choices.nodes} devices", main, measured, choices.seed)
    tables = [task, _workers(main, measured)]
    verdicts = [_verdict(AIM, "idle share of workers", fair, choices, measured)]
    for name, group in common_runs.by_label(anchors).items():
        title = f"{name}, {choices.nodes} devices"
        tables.append(page_drawings.cost_table(title, group, measured, choices.seed))
        # A way that does not learn the task is compared nowhere.
        learned = common_runs.not_behind(group, choices, measured)
        tables.append(
            page_drawings.against_table(f"{title}: the ring against the server", learned, measured, choices.seed)
        )
        verdicts.append(_verdict(f"{AIM} ({name})", f"idle share of workers, {name}", learned, choices, measured))
    return Section(
        "idle",
        "Idle time",
        "Idle is the time inside training steps in which a node had nothing to do. Start-up, evaluation and checkpoints "
        "do not count, and time throttled away from an emulated device counts as busy.",
        tuple(verdicts),
        tuple(each for each in figures if each is not None),
        tuple(tables),
        (
            *common_runs.refused(choices),
            *behind,
            *common_runs.missing(cells(choices), measured),
            *_left_out(choices),
        ),
    )


def _idle(group: Sequence[Cell], measured: Measured) -> list[ring_against_server.Sampled]:
    return page_drawings.sampled(group, measured, per_step_values.idle_times, "ratio")


def _some(choices: Choices) -> list[str]:
    """A small bench looks at the two plain ways alone."""
    labels = [way.label for way in choices.ways]
    plain = [label for label in labels if label in (RING, PLAIN_SERVER)]
    return plain if choices.quick and plain else labels


def _left_out(choices: Choices) -> list[Skipped]:
    """Of the runs with fewer nodes or other batch sizes."""
    small = [way.label for way in choices.ways if way.label not in _some(choices)]
    left = [Skipped(f"{', '.join(small)}: fewer nodes, other batch sizes", "small sizes; ringtmp bench idle has them")]
    left = left * bool(small) + common_runs.whole_data(choices, "other batch sizes, larger models")
    return left + [each for count in _fewer(choices) for each in common_runs.refused(choices, count)]


def _fewer(choices: Choices) -> list[int]:
    return [count for count in choices.node_counts if 1 < count < choices.nodes]


def _by_nodes(choices: Choices) -> list[Cell]:
    return [
        cell(
            choices,
            way,
            common_runs.tuned(choices, way, steps=_steps(choices)),
            choices.place(count),
            f"{count} nodes",
        )
        for way in choices.ways
        if way.label in _some(choices)
        for count in _fewer(choices)
        if way.refusal(count, common_runs.layers(choices.task())) is None
    ]


def _by_batch(choices: Choices) -> list[Cell]:
    devices = choices.place(choices.nodes)
    return [
        cell(
            choices,
            way,
            common_runs.tuned(choices, way, _steps(choices), size),
            devices,
            f"batch {size}",
        )
        for way in choices.ways
        if way.label in _some(choices)
        and way.refusal(len(devices), common_runs.layers(choices.task()), batches=True) is None
        for size in choices.batch_sizes
    ]


def _steps(choices: Choices) -> int:
    return 12 if choices.quick else 40


def _lines(name: str, label: str, group: Sequence[Cell], choices: Choices, measured: Measured) -> Figure | None:
    points: dict[str, list[tuple[float, Interval]]] = {}
    for each in group:
        for way in _idle([each], measured):
            at = each.nodes if label == "nodes" else each.work.batch_size
            points.setdefault(way.way.label, []).append(
                (float(at), ring_against_server.figures([way], choices.seed)[way.way.label])
            )
    several = {key: each for key, each in points.items() if len(each) > 1}
    if not several:
        return None
    return page_drawings.lines(
        name, f"Idle share by {label}", label, "idle share of workers", several, log_x=label != "nodes",
        caption="Bands are 95 % intervals over repeats and steps.",
    )  # fmt: skip


def _workers(main: Sequence[Cell], measured: Measured) -> Table:
    """Every worker of the first repeat, and servers apart."""
    rows = []
    for each in main:
        for record in measured.records(each.job)[:1]:
            for track in record.tracks:
                causes = ", ".join(f"{cause} {seconds:.2f} s" for cause, seconds in sorted(track.causes.items()))
                rows.append(
                    (
                        each.way.label,
                        f"{track.node} {track.role}",
                        page_drawings.share_text(track.idle_share),
                        causes,
                        bytes_text(sum(track.sent_bytes)),
                        bytes_text(track.peak_rss_bytes or 0),
                    )
                )
    columns = ("strategy", "node", "idle", "waited for", "sent", "peak memory")
    return Table("Every node, first repeat", columns, tuple(rows), "Dedicated servers count in no worker's share.")


def _verdict(aim: str, what: str, group: Sequence[Cell], choices: Choices, measured: Measured) -> Verdict:
    pairs = ring_against_server.both(_idle(group, measured), choices.seed)
    return ring_against_server.verdict(aim, what, lambda side: page_drawings.share_text(side.middle), pairs)
