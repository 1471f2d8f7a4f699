"""`ringtmp bench speed`: which jobs there are, and what their measurements say. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ringtmp.bench import statistics
from ringtmp.bench.cases import ALONE, CASES, Case, case_named, chosen_cases, job, pipelined
from ringtmp.bench.experiments.quantities import idle_times
from ringtmp.bench.ideal import Sizes, ideal_s, limit_s
from ringtmp.bench.jobs import Job
from ringtmp.bench.measurements import Measurement
from ringtmp.bench.record import from_facts
from ringtmp.bench.settings import SETTINGS, Setting
from ringtmp.bench.statistics import Interval
from ringtmp.bench.workloads import Workload
from ringtmp.errors import UsageError, unknown


class Row(msgspec.Struct, frozen=True):
    """One case in one setting. Times in seconds; None where there is nothing to compare with."""

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
    def speed_up(self) -> float | None:
        return self.one_device_s / self.step_s.middle if self.step_s and self.one_device_s else None

    @property
    def over_limit(self) -> float | None:
        return self.step_s.middle / self.limit_s if self.step_s and self.limit_s else None


def chosen(kind: str, text: str, known: dict[str, Setting] | dict[str, Workload]) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise unknown(kind, name, known)
    return list(dict.fromkeys(names)) or list(known)


def jobs(
    works: Sequence[Workload], settings: Sequence[Setting], pattern: str, warm_up: int, microbatches: Sequence[int]
) -> list[Job]:
    """One process alone is always among them: nothing can be said of a step without it."""
    cases = chosen_cases(pattern)
    found = []
    for work in works:
        found.append(job(CASES[0], work, ALONE, warm_up))
        for setting in settings:
            for case in cases:
                if case.family == "one":
                    continue
                counts = microbatches if microbatches and pipelined(case) else [None]
                found += [job(case, work, setting, warm_up, count) for count in counts]
    # Numbers below what a schedule wants become the same number.
    return list({each.file_stem: each for each in found}.values())


def require_room(settings: Sequence[Setting], processors: int, can_emulate: bool) -> None:
    """Refuse at once what every measurement would be refused for."""
    emulated = [setting.name for setting in settings if setting.emulated]
    if emulated and not can_emulate:
        raise UsageError(
            f"{' and '.join(emulated)} need the lab, which needs root on Linux, ip and tc: "
            "sudo ringtmp bench speed …, or --settings two"
        )
    for setting in settings:
        if setting.cores > processors:
            raise UsageError(f"{setting.name} needs {setting.cores:g} cores, and this machine has {processors}")


def analyse(measurements: Sequence[Measurement], seed: int) -> list[Row]:
    """Rows in the order of workloads, settings and cases, whatever order they were measured in."""
    groups: dict[tuple[str, str, str], list[Measurement]] = {}
    for each in measurements:
        groups.setdefault((each.job.workload, each.job.setting, each.job.case), []).append(each)
    sizes = {workload: _sizes(group) for (workload, setting, _), group in groups.items() if setting == ALONE.name}
    peers = _best_peers(groups)
    rows = []
    for (workload, setting, _), group in groups.items():
        rows.append(_row(group, sizes.get(workload), peers.get((workload, setting)), seed))
    order = {name: rank for rank, name in enumerate([ALONE.name, *SETTINGS])}
    cases = {case.name: rank for rank, case in enumerate(CASES)}
    works = list(dict.fromkeys(sorted(row.workload for row in rows)))
    return sorted(
        rows,
        key=lambda row: (
            works.index(row.workload),
            order[row.setting],
            cases.get(_plain(row.case), len(cases)),
            row.microbatches,
        ),
    )


def samples(group: Sequence[Measurement]) -> list[tuple[float, ...]]:
    return [each.result.step_s for each in group if each.result is not None]


def _row(group: Sequence[Measurement], sizes: Sizes | None, peer: Sequence[Measurement] | None, seed: int) -> Row:
    first, taken = group[0].job, samples(group)
    setting = SETTINGS.get(first.setting, ALONE)
    own = first.group == "ours"
    bad = [each for each in group if each.outcome != "measured"]
    return Row(
        workload=first.workload,
        setting=first.setting,
        case=first.case,
        group=first.group,
        microbatches=_microbatches(group),
        repeats=len(taken),
        failed=len(bad),
        error=bad[0].error if bad else None,
        step_s=statistics.interval(taken, first.centre, seed) if taken else None,
        ideal_s=ideal_s(sizes, setting) if sizes and setting is not ALONE else None,
        limit_s=limit_s(_case(first.case), sizes, setting) if sizes and setting is not ALONE else None,
        one_device_s=sizes.one_s / setting.share if sizes and setting is not ALONE else None,
        stage_s=_forecast(group, lambda said: max(node["busy_s"] for node in said["per_node"])),
        simulated_s=_forecast(group, lambda said: said["step_s"]),
        idle_share=_idle_share(group),
        over_best_peer=(
            statistics.ratio(taken, first.centre, samples(peer), peer[0].job.centre, seed)
            if taken and peer and own
            else None
        ),
        best_peer=peer[0].job.case if peer else None,
        stolen_share=max(each.stolen_share for each in group),
        busy_before=max(each.busy_before for each in group),
    )


def _microbatches(group: Sequence[Measurement]) -> int:
    """As asked for; where the plan chose, its choice (0: nothing was measured)."""
    asked = group[0].job.options["microbatches"]
    if asked != "auto":
        return int(asked)
    return next((int(each.result.facts["microbatches"]) for each in group if each.result is not None), 0)


def _idle_share(group: Sequence[Measurement]) -> float | None:
    """Idle time over all time of its workers, the middle over repeats; torch's own do not say."""
    known = [each.result.facts for each in group if each.result is not None and "record" in each.result.facts]
    times = [found for facts in known if (found := idle_times(from_facts(facts), group[0].job.warm_up))]
    return statistics.middle(times, "ratio") if times else None


def _forecast(group: Sequence[Measurement], value: Callable[[dict[str, Any]], float]) -> float | None:
    """Of what runs said of themselves before they began, the middle."""
    said = [each.result.facts.get("forecast") for each in group if each.result is not None]
    found = sorted(value(each) for each in said if each)
    return found[len(found) // 2] if found else None


def _sizes(alone: Sequence[Measurement]) -> Sizes | None:
    taken = samples(alone)
    if not taken:
        return None
    facts = next(each.result.facts for each in alone if each.result is not None)
    one_s = statistics.interval(taken, "median", 0).middle
    return Sizes(one_s, facts["parameters"], facts["cut_values"], alone[0].job.batch_size)


def _best_peers(groups: dict[tuple[str, str, str], list[Measurement]]) -> dict[tuple[str, str], list[Measurement]]:
    """Per workload and setting, the measurements of the peer with the shortest step."""
    best: dict[tuple[str, str], tuple[float, list[Measurement]]] = {}
    for (workload, setting, _), group in groups.items():
        if group[0].job.group == "peer" and samples(group):
            step_s = statistics.interval(samples(group), group[0].job.centre, 0).middle
            if (workload, setting) not in best or step_s < best[workload, setting][0]:
                best[workload, setting] = (step_s, group)
    return {key: group for key, (_, group) in best.items()}


def _case(name: str) -> Case:
    return case_named(_plain(name))


def _plain(name: str) -> str:
    """Without the number of microbatches that --microbatches adds."""
    stem, _, end = name.rpartition(":m")
    return stem if stem and end.isdigit() else name
