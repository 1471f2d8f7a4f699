"""speed: milliseconds per step of every way to train, against the ideal max(c, T) and against torch's own.

The same model, weights, batches and plain SGD in the ring, the parameter server, all-reduce, torch's
DistributedDataParallel and pipelining, and in one process alone, which is the base of all ratios.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import msgspec

from ringtmp.bench.analysis import intervals
from ringtmp.bench.analysis.intervals import Interval
from ringtmp.bench.analysis.page_drawings import bars, slug
from ringtmp.bench.analysis.per_step_values import idle_times
from ringtmp.bench.analysis.step_time_bounds import Sizes, ceiling_s, ideal_s, limit_s
from ringtmp.bench.bench_request import Choices
from ringtmp.bench.measuring.jobs import Job
from ringtmp.bench.measuring.machine_facts import QUIET
from ringtmp.bench.measuring.measurement_files import Measured, Measurement
from ringtmp.bench.measuring.run_record import from_facts
from ringtmp.bench.training_runs.device_setups import SETTINGS, Setting
from ringtmp.bench.training_runs.speed_cases import ALONE, ONE, SIDE_BY_SIDE, Case, chosen_cases, job, pipelined
from ringtmp.bench.training_runs.workloads import QUICK, WORKLOADS, Workload
from ringtmp.errors import UsageError, unknown
from ringtmp.report.page_content import Figure, Section, Table

COLUMNS = (
    "case", "microbatches", "ms per step", "95 % interval", "x ideal", "x ceiling", "x one device", "own limit", "x limit",
    "stage", "simulated", "idle", "x best peer", "stolen",
)  # fmt: skip
LEGEND = (
    "Ideal: max(c, T), with T one process, one thread, whole batch, divided by all cores, and c one cut's activations over "
    "the link. Ceiling: the same with what the devices reach side by side in the place of T: each does its share of the "
    "layers at the same time as the others, with the same quotas, and nobody talks. One device: the step of one such device "
    "alone over this one; above 1 is faster. Own limit: max(c, T) for "
    "what this case computes on and sends through its busiest device. Stage, simulated: the ring's own forecast before its "
    "first step, for the slowest stage alone and for the whole step with fill and drain. Idle: share of the time of all "
    "nodes that compute, without warm-up. Best peer: the fastest of torch's own in the same setting; below 1 is faster. "
    "Stolen: CPU time the machine's host gave to others, in the worst repeat."
)


class Trial(msgspec.Struct, frozen=True):
    """One case in one setting, and the job that times it."""

    case: Case
    work: Workload
    setting: Setting
    job: Job


class Row(msgspec.Struct, frozen=True):
    """What was measured of a trial. Times in seconds; None where there is nothing to compare with."""

    workload: str
    setting: str
    case: str
    group: str
    microbatches: int
    repeats: int
    failed: int
    error: str | None  # of the first that failed
    step_s: Interval | None
    ideal_s: float | None
    ceiling_s: float | None
    limit_s: float | None
    one_device_s: float | None  # the whole model on one such device
    stage_s: float | None  # of the ring, as its plan forecast it: the slowest stage alone
    simulated_s: float | None  # and the whole step, with fill and drain
    idle_share: float | None  # of all its nodes' time but dedicated servers', after the steps to warm up
    over_best_peer: Interval | None  # below 1: faster than every peer in this setting
    best_peer: str | None
    stolen_share: float  # the largest of its repeats
    busy_before: float  # likewise: of all processors, used by others

    @property
    def over_ideal(self) -> float | None:
        return self.step_s.middle / self.ideal_s if self.step_s and self.ideal_s else None

    @property
    def over_ceiling(self) -> float | None:
        return self.step_s.middle / self.ceiling_s if self.step_s and self.ceiling_s else None

    @property
    def speed_up(self) -> float | None:
        return self.one_device_s / self.step_s.middle if self.step_s and self.one_device_s else None

    @property
    def over_limit(self) -> float | None:
        return self.step_s.middle / self.limit_s if self.step_s and self.limit_s else None


# -- what is measured ---------------------------------------------------------------------------------------------------


def jobs(choices: Choices) -> list[Job]:
    return [each.job for each in trials(choices)]


def trials(choices: Choices) -> list[Trial]:
    """One process alone, and all devices side by side, are always among them: nothing can be said of a step without."""
    settings = [SETTINGS[name] for name in _chosen("setting", choices.settings, SETTINGS)]
    _require_room(settings, choices)
    cases = chosen_cases(choices.cases)
    found = []
    for name in _chosen("workload", choices.workloads, WORKLOADS):
        work = msgspec.structs.replace(
            (QUICK if choices.quick else WORKLOADS)[name], seed=choices.seed, steps=choices.warm_up + choices.steps
        )
        found.append(Trial(ONE, work, ALONE, job(ONE, work, ALONE, choices.warm_up)))
        for setting in settings:
            for case in (SIDE_BY_SIDE, *cases):
                found += [
                    Trial(case, work, setting, job(case, work, setting, choices.warm_up, count))
                    for count in (_counts(choices.microbatches) if pipelined(case) else [None])
                    if case.family != "one"
                ]
    # Numbers below what a schedule wants become the same number.
    return list({each.job.file_stem: each for each in found}.values())


def _chosen(kind: str, text: str, known: Mapping[str, Any]) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise unknown(kind, name, known)
    return list(dict.fromkeys(names)) or list(known)


def _counts(text: str) -> Sequence[int | None]:
    """None: what suits the work."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isdigit() and int(word) for word in words):
        raise UsageError(f"--microbatches {text!r}: give positive numbers separated by commas")
    return [int(word) for word in words] or [None]


def _require_room(settings: Sequence[Setting], choices: Choices) -> None:
    """Refuse at once what every measurement would be refused for."""
    emulated = [setting.name for setting in settings if setting.emulated]
    if emulated and not choices.isolated:
        raise UsageError(
            f"{' and '.join(emulated)} need the lab, which needs root on Linux, ip and tc: "
            "sudo ringtmp bench speed …, or --settings two"
        )
    for setting in settings:
        if setting.cores > choices.cores:
            raise UsageError(f"{setting.name} needs {setting.cores:g} cores, and this machine has {choices.cores}")


# -- what came of it ----------------------------------------------------------------------------------------------------


def results(choices: Choices, measured: Measured) -> dict[str, Any]:
    return {"rows": rows(choices, measured)}


def rows(choices: Choices, measured: Measured) -> list[Row]:
    """By workload, setting and case, in the order they were asked for."""
    known = [(each, measured.every(each.job)) for each in trials(choices) if measured.every(each.job)]
    sizes = {each.work.name: _sizes(group) for each, group in known if each.setting is ALONE}
    found = []
    for each, group in known:
        here = [other for trial, other in known if (trial.work, trial.setting) == (each.work, each.setting)]
        known_s = next((_samples(other) for other in here if other[0].job.case == SIDE_BY_SIDE.name), [])
        apart_s = intervals.middle(known_s, "median") if known_s else None
        found.append(_row(each, group, sizes.get(each.work.name), _best_peer(here), choices.seed, apart_s=apart_s))
    return found


def section(choices: Choices, measured: Measured) -> Section:
    made = rows(choices, measured)
    alone = {row.workload: row.step_s for row in made if row.setting == ALONE.name}
    tables, figures = [], []
    for (workload, setting), found in groupby(made, key=lambda row: (row.workload, row.setting)):
        group = [row for row in found if row.step_s is not None]
        if setting == ALONE.name or not group:
            continue
        title = f"{workload}, {SETTINGS[setting].text}"
        tables.append(Table(title, COLUMNS, tuple(map(_cells, group)), _note(group, alone.get(workload))))
        figures.append(_figure(title, group))
    missing = measured.missing(jobs(choices))
    return Section("speed", "Speed", LEGEND, (), tuple(figures), tuple(tables), missing)


def _row(
    trial: Trial, group: Sequence[Measurement], sizes: Sizes | None, peer: Sequence[Measurement], seed: int,
    *, apart_s: float | None,
) -> Row:  # fmt: skip
    taken, bad = _samples(group), [each for each in group if each.result is None]
    centre = trial.job.centre
    known = sizes if trial.setting is not ALONE else None
    against = peer if taken and peer and trial.case.group == "ours" else ()
    return Row(
        workload=trial.work.name,
        setting=trial.setting.name,
        case=trial.job.case,
        group=trial.case.group,
        microbatches=_microbatches(group),
        repeats=len(taken),
        failed=len(bad),
        error=bad[0].error if bad else None,
        step_s=intervals.interval(taken, centre, seed) if taken else None,
        ideal_s=ideal_s(known, trial.setting) if known else None,
        ceiling_s=ceiling_s(known, trial.setting, apart_s) if known and apart_s else None,
        limit_s=limit_s(trial.case, known, trial.setting) if known else None,
        one_device_s=known.one_s / trial.setting.share if known else None,
        stage_s=_forecast(group, lambda said: max(node["busy_s"] for node in said["per_node"])),
        simulated_s=_forecast(group, lambda said: said["step_s"]),
        idle_share=_idle_share(group),
        over_best_peer=(
            intervals.ratio(taken, centre, _samples(against), against[0].job.centre, seed) if against else None
        ),
        best_peer=peer[0].job.case if peer else None,
        stolen_share=max(each.stolen_share for each in group),
        busy_before=max(each.busy_before for each in group),
    )


def _samples(group: Sequence[Measurement]) -> list[tuple[float, ...]]:
    return [each.result.step_s for each in group if each.result is not None]


def _facts(group: Sequence[Measurement]) -> list[dict[str, Any]]:
    return [each.result.facts for each in group if each.result is not None]


def _microbatches(group: Sequence[Measurement]) -> int:
    """As asked for; where the plan chose, its choice (0: nothing was measured)."""
    asked = group[0].job.options["microbatches"]
    return int(asked) if asked != "auto" else next((int(facts["microbatches"]) for facts in _facts(group)), 0)


def _idle_share(group: Sequence[Measurement]) -> float | None:
    """Idle time over all time of its workers, the middle over repeats; torch's own do not say."""
    records = [from_facts(facts) for facts in _facts(group) if "record" in facts]
    times = [found for record in records if (found := idle_times(record, group[0].job.warm_up))]
    return intervals.middle(times, "ratio") if times else None


def _forecast(group: Sequence[Measurement], value: Callable[[dict[str, Any]], float]) -> float | None:
    """The middle of what runs said before they began."""
    found = sorted(value(said) for facts in _facts(group) if (said := facts.get("forecast")))
    return found[len(found) // 2] if found else None


def _sizes(alone: Sequence[Measurement]) -> Sizes | None:
    taken = _samples(alone)
    if not taken:
        return None
    facts = _facts(alone)[0]
    return Sizes(
        intervals.middle(taken, "median"), facts["parameters"], facts["cut_values"], alone[0].job.batch_size
    )  # fmt: skip


def _best_peer(here: Sequence[Sequence[Measurement]]) -> Sequence[Measurement]:
    """The measurements of the peer with the shortest step; empty where none was measured."""
    peers = [group for group in here if group[0].job.group == "peer" and _samples(group)]
    return min(peers, key=lambda group: intervals.middle(_samples(group), group[0].job.centre), default=())


# -- how it is shown ----------------------------------------------------------------------------------------------------


def _note(group: Sequence[Row], alone: Interval | None) -> str:
    parts = [f"one process {_ms(alone.middle)} ms" if alone else "one process: not measured"]
    if group[0].ideal_s is not None:
        parts.append(f"ideal {_ms(group[0].ideal_s)} ms")
    if group[0].ceiling_s is not None:
        parts.append(f"ceiling {_ms(group[0].ceiling_s)} ms")
    if group[0].best_peer is not None:
        parts.append(f"best peer {group[0].best_peer}")
    busy = max(row.busy_before for row in group)
    if busy > QUIET:
        parts.append(f"NOT A QUIET MACHINE: others used up to {busy:.0%} of it just before a measurement")
    return "; ".join(parts)


def _figure(title: str, group: Sequence[Row]) -> Figure:
    times = {row.case: row.step_s for row in group if row.step_s is not None}
    milliseconds = {
        case: Interval(*(1e3 * value for value in (step_s.middle, step_s.low, step_s.high)))
        for case, step_s in times.items()
    }
    made = bars(slug(f"speed-{group[0].workload}-{group[0].setting}"), title, "ms per step", milliseconds)
    ideal = group[0].ideal_s
    return made if ideal is None else msgspec.structs.replace(made, line=1e3 * ideal, line_label="ideal: max(c, T)")


def _cells(row: Row) -> tuple[str, ...]:
    assert row.step_s is not None
    best = row.over_best_peer
    return (
        row.case + (f" ({row.failed} failed)" if row.failed else ""),
        str(row.microbatches),
        _ms(row.step_s.middle),
        f"{_ms(row.step_s.low)}–{_ms(row.step_s.high)}",
        _ratio(row.over_ideal),
        _ratio(row.over_ceiling),
        _ratio(row.speed_up),
        _ms(row.limit_s),
        _ratio(row.over_limit),
        _ms(row.stage_s),
        _ms(row.simulated_s),
        f"{row.idle_share:.1%}" if row.idle_share is not None else "",
        f"{best.middle:.2f} ({best.low:.2f}–{best.high:.2f})" if best else "",
        f"{row.stolen_share:.1%}",
    )


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds * 1e3:.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.1f}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
