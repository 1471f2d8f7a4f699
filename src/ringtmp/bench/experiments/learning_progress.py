"""progress: what a strategy learns per iteration, second, byte and joule, and what it takes to a target.

Never speed without accuracy: every row has the accuracy it ended with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from statistics import median
from typing import Any

import msgspec

from ringtmp.bench.analysis import per_step_values, ring_against_server
from ringtmp.bench.analysis.ring_against_server import Sampled
from ringtmp.bench.bench_request import ALONE, Choices
from ringtmp.bench.measuring.measurement_files import Measured
from ringtmp.bench.measuring.run_record import Record
from ringtmp.bench.training_runs import common_runs
from ringtmp.bench.training_runs.strategy_variants import RING, SERVER
from ringtmp.bench.training_runs.train_commands import Cell, cell
from ringtmp.report.page_content import Figure, Holds, Section, Series, Table, Verdict
from ringtmp.units import bytes_text, seconds_text

AIM = "RingTMP makes as much progress"
#: Steps a loss is averaged over: single batches are noisy.
WINDOW = 5
#: The target lies this far down from the first loss to where the best of all ends.
WAY_DOWN = 0.9


class Costs(msgspec.Struct, frozen=True):
    """What had been spent when the target was reached; inf where it never was."""

    steps: float
    seconds: float
    bytes: float
    joules: float


_COSTS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("steps", "iterations to the target", lambda value: f"{value:.0f}"),
    ("seconds", "seconds to the target", seconds_text),
    ("bytes", "bytes to the target", bytes_text),
    ("joules", "modelled joules to the target", lambda value: f"{value:.3g} J"),
)
NEVER = Costs(math.inf, math.inf, math.inf, math.inf)


def cells(choices: Choices) -> list[Cell]:
    return [alone(choices), *common_runs.task_cells(choices)]


def alone(choices: Choices) -> Cell:
    """One device, whole batches: what the others are held against."""
    ring = next((way for way in choices.ways if way.like_one_process), ALONE)
    work = msgspec.structs.replace(choices.task(), lr=choices.rate(ring, choices.task().lr))
    return cell(choices, ALONE, work, choices.place(1), "one device")


class Outcome(msgspec.Struct, frozen=True):
    """A whole run, medians over repeats."""

    label: str
    lr: float | None  # None: it finds its steps itself
    batch_size: int
    accuracy: float | None
    whole: Costs
    to_target: Costs | None  # None: never, or not every time
    step_s: float
    step_bytes: float


def outcomes(choices: Choices, measured: Measured) -> list[Outcome]:
    every, records, target = trained(choices, measured)
    costs, found = costs_of(records, target), []
    for each in every:
        group, known = records[each.way.label], costs[each.way.label]
        found.append(
            Outcome(
                label=each.way.label,
                lr=None if each.way.full_batch else each.work.lr,
                batch_size=each.work.batch_size,
                accuracy=common_runs.accuracy(each, measured),
                whole=_median([_whole(record) for record in group]),
                to_target=_median(known) if all(math.isfinite(cost.steps) for cost in known) else None,
                step_s=median(sum(per_step_values.step_s(record, 0)) / len(record.steps) for record in group),
                step_bytes=median(sum(per_step_values.sent_bytes(record, 0)) / len(record.steps) for record in group),
            )
        )
    return found


def results(choices: Choices, measured: Measured) -> dict[str, Any]:
    return {"outcomes": outcomes(choices, measured), "target_loss": trained(choices, measured)[2]}


def _whole(record: Record) -> Costs:
    joules = sum(per_step_values.step_joules(record, 0)) if per_step_values.modelled(record) else math.nan
    sent = sum(per_step_values.sent_bytes(record, 0))
    return Costs(float(len(record.steps)), sum(per_step_values.step_s(record, 0)), sent, joules)


def _median(costs: Sequence[Costs]) -> Costs:
    return Costs(*(median(getattr(cost, key) for cost in costs) for key in Costs.__struct_fields__))


def section(choices: Choices, measured: Measured) -> Section:
    every, records, target = trained(choices, measured)
    costs = costs_of(records, target)
    return Section(
        "progress",
        "Progress",
        f"The bundled digits, {choices.task().steps} steps of {choices.task().batch_size} samples. The target is a training "
        f"loss of {target:.3f}, averaged over {WINDOW} steps. Strategies that train like one process have the same "
        "losses step by step; what differs is what a step costs.",
        tuple(_verdicts(choices, every, costs)),
        tuple(_figures(records)),
        (_table(every, measured, costs),),
        (*common_runs.refused(choices), *common_runs.missing(cells(choices), measured)),
    )


def trained(choices: Choices, measured: Measured) -> tuple[list[Cell], dict[str, list[Record]], float]:
    """What there is: the cells, their records by label, and the loss all are to come to."""
    every = [each for each in cells(choices) if measured.records(each.job)]
    records = {each.way.label: measured.records(each.job) for each in every}
    return every, records, target_loss([record for group in records.values() for record in group])


def costs_of(records: dict[str, list[Record]], target: float) -> dict[str, list[Costs]]:
    return {label: [to_target(record, target) for record in group] for label, group in records.items()}


def target_loss(records: Sequence[Record]) -> float:
    """WAY_DOWN of the way from where all begin to the lowest that any reaches."""
    if not records:
        return math.nan
    first = max(record.loss[0] for record in records)
    lowest = min(min(smooth(record.loss)) for record in records)
    return first - WAY_DOWN * (first - lowest)


def to_target(record: Record, target: float) -> Costs:
    at = per_step_values.reached(record.loss, target, min(WINDOW, len(record.loss)))
    if at is None:
        return NEVER
    moved = sum(per_step_values.sent_bytes(record, 0)[: at + 1])
    spent = sum(per_step_values.step_joules(record, 0)[: at + 1]) if per_step_values.modelled(record) else math.nan
    return Costs(at + 1.0, sum(per_step_values.step_s(record, 0)[: at + 1]), moved, spent)


def smooth(loss: Sequence[float]) -> list[float]:
    window = min(WINDOW, len(loss))
    return [sum(loss[end - window : end]) / window for end in range(window, len(loss) + 1)]


def _verdicts(choices: Choices, every: Sequence[Cell], costs: dict[str, list[Costs]]) -> list[Verdict]:
    found = []
    shared = [each.way for each in every if each.way is not ALONE]
    there = {way.strategy for way in shared if all(math.isfinite(cost.steps) for cost in costs[way.label])}
    for key, what, text in _COSTS:
        aim = f"{AIM} per {key.removesuffix('s')}"
        one_sided = _one_sided(aim, {way.strategy for way in shared}, there)
        found.append(one_sided or _verdict(aim, what, text, spent(every, costs, key), choices.seed))
    return found


def _verdict(aim: str, what: str, text: Callable[[float], str], known: list[Sampled], seed: int) -> Verdict:
    pairs = ring_against_server.both(known, seed)
    return ring_against_server.verdict(aim, what, lambda side: text(side.middle), pairs, as_good=True)


def spent(every: Sequence[Cell], costs: dict[str, list[Costs]], key: str) -> list[Sampled]:
    """One of the costs, of those that come to the target every time."""
    return [
        Sampled(each.way, tuple((getattr(cost, key),) for cost in costs[each.way.label]), "median")
        for each in every
        if each.way is not ALONE and all(math.isfinite(getattr(cost, key)) for cost in costs[each.way.label])
    ]


def _one_sided(aim: str, measured: set[str], reached: set[str]) -> Verdict | None:
    """Where both were measured and not both come to the target every time, that is the answer."""
    both = {RING, SERVER}
    if not both <= measured or both <= reached:
        return None
    names = {RING: RING, SERVER: "parameter server"}
    lost = [names[each] for each in names if each not in reached]
    won = [names[each] for each in names if each in reached]
    told = f"no {' and no '.join(lost)} comes to the target every time" + (f", a {won[0]} does" if won else "")
    holds: Holds = "open" if not won else "yes" if won == [names[RING]] else "no"
    return Verdict(aim, f"{told[0].upper()}{told[1:]}.", holds)


def _figures(records: dict[str, list[Record]]) -> list[Figure]:
    known = all(per_step_values.modelled(group[0]) for group in records.values())
    axes = [("iteration", "iterations"), ("second", "seconds"), ("byte", "bytes")] + [
        ("joule", "modelled joules")
    ] * known
    found = []
    for name, label in axes:
        series = []
        for way, group in records.items():
            x = _axis(name, group[0])[WINDOW - 1 :]
            if name != "byte" or any(x):
                series.append(Series(way, tuple(x), tuple(smooth(group[0].loss))))
        found.append(
            Figure(f"loss-per-{name}", f"Loss against {label}", "lines", label, "training loss", tuple(series),
                   log_x=name in ("byte",), caption=f"First repeat, averaged over {WINDOW} steps.")
        )  # fmt: skip
    return found


def _axis(name: str, record: Record) -> list[float]:
    if name == "iteration":
        return [float(step + 1) for step in record.steps]
    values = {
        "second": lambda: per_step_values.step_s(record, 0),
        "byte": lambda: per_step_values.sent_bytes(record, 0),
        "joule": lambda: per_step_values.step_joules(record, 0),
    }[name]()
    return list(accumulate(values))


def _table(every: Sequence[Cell], measured: Measured, costs: dict[str, list[Costs]]) -> Table:
    rows = []
    for each in every:
        known = costs[each.way.label]
        score, middle = common_runs.accuracy(each, measured), _median(known)
        reached = math.isfinite(middle.steps)
        rows.append(
            (
                each.way.label,
                "" if each.way.full_batch else f"{each.work.lr:g}",
                f"{score:.1%}" if score is not None else "",
                f"{middle.steps:.0f}" if reached else "never",
                seconds_text(middle.seconds) if reached else "never",
                bytes_text(middle.bytes) if reached else "never",
                f"{middle.joules:.3g}" if reached and math.isfinite(middle.joules) else "",
            )
        )
    columns = ("strategy", "learning rate", "test accuracy at the end", "steps", "time", "bytes", "modelled joules")
    return Table("To the target", columns, tuple(rows), "Medians over repeats; time is that of training steps alone.")
