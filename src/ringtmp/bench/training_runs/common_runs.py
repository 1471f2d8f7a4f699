"""The runs that several experiments read: every way on the task with all devices, and the larger models. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import msgspec

from ringtmp.bench.bench_request import DIGITS_SAMPLES, Choices
from ringtmp.bench.measuring.measurement_files import Measured
from ringtmp.bench.training_runs.strategy_variants import Way
from ringtmp.bench.training_runs.train_commands import Cell, cell
from ringtmp.bench.training_runs.workloads import Workload
from ringtmp.report.page_content import Skipped

ANCHOR_STEPS = 8
#: A step of the whole data is longer, and finds its own length.
FULL_BATCH_STEPS = {True: 8, False: 40}
#: Points of accuracy below the best from which a way has not learned the task.
BEHIND = 0.1


def layers(work: Workload) -> int:
    """What can be cut: the zoo's models have one layer per unit of depth, a head, and a gpt an embedding."""
    return int(work.settings["depth"]) + (2 if work.model == "gpt" else 1)


def tuned(choices: Choices, way: Way, steps: int | None = None, batch_size: int | None = None) -> Workload:
    """The task at the way's own learning rate; in steps of the whole data where a way knows no other."""
    work = choices.task()
    if way.full_batch:
        work = msgspec.structs.replace(work, steps=FULL_BATCH_STEPS[choices.quick], batch_size=DIGITS_SAMPLES)
    return msgspec.structs.replace(
        work,
        lr=choices.rate(way, work.lr),
        steps=steps or work.steps,
        batch_size=batch_size or work.batch_size,
    )


def task_cells(choices: Choices) -> list[Cell]:
    """Every way that can, to the end of the task."""
    devices = choices.place(choices.nodes)
    return [
        cell(choices, way, tuned(choices, way), devices)
        for way in choices.ways
        if way.refusal(len(devices), layers(choices.task())) is None
    ]


def anchor_cells(choices: Choices) -> list[Cell]:
    """The larger models, for time, bytes and joules alone: nothing is said of their accuracy, so no rate is tuned."""
    found = []
    for anchor in choices.anchors:
        work = msgspec.structs.replace(anchor, seed=choices.seed, steps=ANCHOR_STEPS)
        found += [
            cell(choices, way, work, choices.place(choices.nodes), work.name)
            for way in choices.ways
            if way.refusal(choices.nodes, layers(work), batches=True) is None
        ]
    return found


def whole_data(choices: Choices, what: str) -> list[Skipped]:
    """Ways that are left out of `what`, where steps are of a part of the data."""
    reasons = {way.label: way.refusal(choices.nodes, layers(choices.task()), batches=True) for way in choices.ways}
    return [Skipped(f"{way.label}: {what}", reasons[way.label] or "") for way in choices.ways if way.full_batch]


def by_label(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    found: dict[str, list[Cell]] = {}
    for each in cells:
        found.setdefault(each.label, []).append(each)
    return found


def learned(cells: Sequence[Cell], measured: Measured) -> tuple[list[Cell], list[Skipped]]:
    """Those that learned about as much as the best, and why the others are not compared: a way that does not learn may
    well be quick."""
    scores = {each.way.label: score for each in cells if (score := accuracy(each, measured)) is not None}
    best = max(scores.values(), default=0.0)
    behind = {label: score for label, score in scores.items() if score < best - BEHIND}
    left = [
        Skipped(f"{label}: verdicts", f"not compared: test accuracy {score:.1%} where the best has {best:.1%}")
        for label, score in behind.items()
    ]
    return [each for each in cells if each.way.label not in behind], left


def not_behind(cells: Sequence[Cell], choices: Choices, measured: Measured) -> list[Cell]:
    """Of other runs, those of ways that did not fail to learn the task."""
    task = task_cells(choices)
    behind = {each.way.label for each in task} - {each.way.label for each in learned(task, measured)[0]}
    return [each for each in cells if each.way.label not in behind]


def accuracy(each: Cell, measured: Measured) -> float | None:
    """At the end, the median over repeats."""
    known = [facts.get("accuracy") for facts in measured.facts(each.job)]
    scores = [score for score in known if isinstance(score, float)]
    return median(scores) if scores else None


def refused(choices: Choices, nodes: int | None = None) -> list[Skipped]:
    """Ways that cannot run on so many nodes at all, with the strategy's own reason."""
    count = nodes or choices.nodes
    reasons = {way.label: way.refusal(count, layers(choices.task())) for way in choices.ways}
    return [Skipped(f"{label}, {count} nodes", why) for label, why in reasons.items() if why]


def not_chosen(choices: Choices, chosen: Sequence[Way]) -> list[Skipped]:
    """Ways that could run and are left out for the time they would take."""
    left = [
        way for way in choices.ways if way not in chosen and way.refusal(choices.nodes, layers(choices.task())) is None
    ]
    return [Skipped(way.label, "left out unless named by --strategies: each strategy takes many runs") for way in left]


def missing(cells: list[Cell], measured: Measured) -> list[Skipped]:
    """What was to be measured and was not."""
    named = {
        f"{each.way.label}, {each.nodes} nodes{f', {each.label}' if each.label else ''}": measured.problem(each.job)
        for each in cells
    }
    return [Skipped(what, why) for what, why in named.items() if why]
