"""energy: joules per epoch and per sample, by node and strategy, and how much of the answer is the model.

A device with a meter says what it used. Where there is none, joules are modelled from time, busy time and bytes, and say
nothing that time and bytes did not say: so the comparison is repeated with every number of the model varied by half.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ringtmp.bench.analysis import page_drawings, per_step_values, ring_against_server
from ringtmp.bench.analysis.ring_against_server import Contrast, Sampled
from ringtmp.bench.bench_request import ALONE, DIGITS_SAMPLES, Choices
from ringtmp.bench.experiments import learning_progress
from ringtmp.bench.measuring.jobs import Job
from ringtmp.bench.measuring.measurement_files import Measured
from ringtmp.bench.measuring.run_record import Record
from ringtmp.bench.training_runs import common_runs
from ringtmp.bench.training_runs.train_commands import Cell
from ringtmp.metrics.energy import Sensitivity, sensitivity
from ringtmp.report.page_content import Figure, Section, Series, Table, Verdict

AIM = "RingTMP takes less overall power"
VARIED = 0.5


def cells(choices: Choices) -> list[Cell]:
    return [learning_progress.alone(choices), *common_runs.task_cells(choices)]


def section(choices: Choices, measured: Measured) -> Section:
    every = [each for each in cells(choices) if measured.records(each.job)]
    found = [each for each in (per_sample(each, measured) for each in every) if each is not None]
    per_way = ring_against_server.figures(found, choices.seed)
    fair, behind = common_runs.learned([each for each in every if each.way.label != ALONE.label], measured)
    labels = [each.way.label for each in fair]
    shared = [each for each in found if each.way.label in labels]
    pairs = ring_against_server.both(shared, choices.seed)
    source = _source(every, measured)
    verdicts = [ring_against_server.verdict(AIM, f"{source} joules per sample", _millijoules, pairs)]
    tables = [_nodes(every, measured)]
    if source == "modelled" and all(
        per_step_values.modelled(record) for each in every for record in measured.records(each.job)
    ):
        varied = [
            Conclusion("joules per sample", name, pair, vary(fair, measured, pair, counted)) for name, pair in pairs
        ]
        others = [*_to_target(choices, measured), *_larger(choices, measured)]
        verdicts += [_varied_verdict(each) for each in varied]
        tables += [_conclusions_table([*varied, *others]), *(_varied_table(each) for each in varied)]
    return Section(
        "energy",
        "Energy",
        "Modelled joules restate time and bytes in other units: idle watts for as long as a step takes, more while a node is "
        "busy, and nanojoules per byte at each end. No device here has a meter of its own unless the table says measured.",
        tuple(verdicts),
        (
            page_drawings.bars(
                "joules-per-sample",
                "Joules per sample",
                f"joules ({source})",
                per_way,
                "All devices, with 95 % intervals.",
            ),
            *_by_node(every, measured),
        ),
        tuple(tables),
        (
            *common_runs.refused(choices),
            *behind,
            *common_runs.missing(cells(choices), measured),
        ),
    )


def _millijoules(side: Sampled) -> str:
    return f"{1e3 * side.middle:.3g} mJ a sample"


def per_sample(each: Cell, measured: Measured) -> Sampled | None:
    """What meters said, a value per repeat; else the model, a value per step. None where neither is known."""
    metered = [_metered(facts) for facts in measured.facts(each.job)]
    if metered and all(value is not None for value in metered):
        return Sampled(each.way, tuple((float(value or 0.0),) for value in metered))
    repeats = []
    for record in measured.records(each.job):
        spent = per_step_values.step_joules(record, each.job.warm_up)
        # By the mean number of samples, not each step's own: their mean is then all joules over all samples.
        samples = record.samples[each.job.warm_up :]
        usual = sum(samples) / max(1, len(samples))
        repeats.append(tuple(joules / max(1.0, usual) for joules in spent))
    return Sampled(each.way, tuple(repeats)) if repeats and all(repeats) else None


def _source(every: Sequence[Cell], measured: Measured) -> str:
    """measured, estimated or modelled; the weakest of what there is."""
    known = {
        node.get("energy_source") for each in every for facts in measured.facts(each.job) for node in _per_node(facts)
    }
    return next((word for word in ("modelled", "estimated", "measured") if word in known), "modelled")


def _per_node(facts: Any) -> Sequence[dict[str, Any]]:
    found: Sequence[dict[str, Any]] = facts.get("per_node", ())
    return found


class Conclusion(msgspec.Struct, frozen=True):
    """Something said of joules, and what becomes of it as the model's numbers vary."""

    what: str
    name: str  # of the comparison
    pair: Contrast
    made: Sensitivity


def vary(
    group: Sequence[Cell], measured: Measured, pair: Contrast, steps: Callable[[Job, Record], tuple[int, int | None]]
) -> Sensitivity:
    """The ring over the server as the model's numbers vary, over as many repeats as both have; `steps` says from which step
    of each to before which."""
    jobs = {each.way.label: each.job for each in group}
    sides = [jobs[each.way.label] for each in (pair.ring, pair.server)]
    repeats = min(len(measured.records(job)) for job in sides)
    ring, server = (
        [
            load
            for record in measured.records(job)[:repeats]
            for load in per_step_values.run_loads(record, *steps(job, record))
        ]
        for job in sides
    )
    return sensitivity(ring, server, VARIED)


def counted(job: Job, _: Record) -> tuple[int, int | None]:
    """Those after the steps to warm up."""
    return job.warm_up, None


def _to_target(choices: Choices, measured: Measured) -> list[Conclusion]:
    """What `progress` says of joules."""
    every, records, target = learning_progress.trained(choices, measured)
    pairs = ring_against_server.both(
        learning_progress.spent(every, learning_progress.costs_of(records, target), "joules"), choices.seed
    )

    def until(_: Job, record: Record) -> tuple[int, int]:
        return 0, int(learning_progress.to_target(record, target).steps)

    return [Conclusion("joules to the target", name, pair, vary(every, measured, pair, until)) for name, pair in pairs]


def _larger(choices: Choices, measured: Measured) -> list[Conclusion]:
    """What `idle` says of joules in its tables of the larger models, where they were measured."""
    found = []
    anchors = common_runs.not_behind(common_runs.anchor_cells(choices), choices, measured)
    for label, group in common_runs.by_label(anchors).items():
        pairs = ring_against_server.both(
            page_drawings.sampled(group, measured, per_step_values.step_joules), choices.seed
        )
        found += [
            Conclusion(f"joules per step, {label}", name, pair, vary(group, measured, pair, counted))
            for name, pair in pairs
        ]
    return found


def _metered(facts: Any) -> float | None:
    """Joules per sample by meters alone."""
    nodes = _per_node(facts)
    if not nodes or any(node.get("energy_source") not in ("measured", "estimated") for node in nodes):
        return None
    samples: int = sum(facts["record"]["samples"])
    joules: float = sum(node["energy_j"] for node in nodes)
    return joules / max(1, samples)


def _varied_verdict(each: Conclusion) -> Verdict:
    pair, made = each.pair, each.made
    return Verdict(
        f"{AIM} ({each.name}, whatever the model's numbers)",
        f"{pair.ring.way.label} takes {made.sentence}.",
        "open" if pair.holds == "open" else "mixed" if made.changes else "yes" if made.ratio < 1 else "no",
        f"{made.low:.2f}–{made.high:.2f}",
    )


def _conclusions_table(every: Sequence[Conclusion]) -> Table:
    rows = tuple(
        (
            each.what,
            each.name,
            each.pair.ring.way.label,
            each.pair.server.way.label,
            f"{each.made.ratio:.2f}",
            f"{each.made.low:.2f}–{each.made.high:.2f}",
            "open" if each.pair.holds == "open" else "changes" if each.made.changes else "stays",
        )
        for each in every
    )
    columns = ("conclusion", "compared", "ring", "parameter server", "ring over server", "varied", "who needs less")
    title = f"Every conclusion about joules as the model's numbers vary by {VARIED:.0%}"
    return Table(title, columns, rows, "Idle watts, busy watts and nanojoules per byte, each less, same and more.")


def _varied_table(each: Conclusion) -> Table:
    rows = tuple(
        (f"x {case.idle:g}", f"x {case.busy:g}", f"x {case.byte:g}", f"{case.ratio:.3f}") for case in each.made.cases
    )
    title = f"{each.pair.ring.way.label} over {each.pair.server.way.label} ({each.name}) as the model's numbers vary"
    return Table(title, ("idle watts", "busy watts", "nanojoules per byte", "joules, ring over server"), rows)


def _by_node(every: Sequence[Cell], measured: Measured) -> list[Figure]:
    shares: dict[int, dict[str, float]] = {}
    for each in every:
        for record in filter(per_step_values.modelled, measured.records(each.job)[:1]):
            samples = max(1, sum(record.samples))
            for track in record.tracks:
                joules = per_step_values.node_load(record, track, 0).joules
                shares.setdefault(track.node, {})[each.way.label] = joules / samples
    labels = tuple(dict.fromkeys(label for each in shares.values() for label in each))
    series = tuple(
        Series(f"node {node}" if node else "master", labels, tuple(each.get(label, 0.0) for label in labels))
        for node, each in sorted(shares.items())
    )
    return [
        Figure(
            "joules-by-node",
            "Joules per sample, by node",
            "stacked",
            "",
            "joules (modelled)",
            series,
            caption="First repeat.",
        )
    ]


def _nodes(every: Sequence[Cell], measured: Measured) -> Table:
    rows = []
    for each in every:
        for record, facts in zip(measured.records(each.job)[:1], measured.facts(each.job)[:1], strict=True):
            sources = {node["node"]: node for node in _per_node(facts)}
            samples = max(1, sum(record.samples))
            for track in record.tracks:
                source = sources.get(track.node, {}).get("energy_source") or "modelled"
                joules = sources.get(track.node, {}).get("energy_j") if source != "modelled" else None
                if joules is None and track.power is not None:
                    joules = per_step_values.node_load(record, track, 0).joules
                if joules is None:
                    continue
                per_sample_j = joules / samples
                rows.append(
                    (
                        each.way.label,
                        f"{track.node} {track.role}",
                        f"{per_sample_j * 1e3:.3g}",
                        f"{per_sample_j * DIGITS_SAMPLES:.3g}",
                        source,
                    )
                )
    columns = ("strategy", "node", "millijoules per sample", "joules per epoch", "source")
    return Table("Joules by node, first repeat", columns, tuple(rows))
