"""All chosen experiments as one: which jobs in which order, and the page their measurements make. Pure."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from ringtmp.bench.bench_request import Choices
from ringtmp.bench.experiment_registry import CATALOG
from ringtmp.bench.measuring.jobs import Job, interleaved
from ringtmp.bench.measuring.machine_facts import QUIET, Environment
from ringtmp.bench.measuring.measurement_files import Measured, Measurement
from ringtmp.bench.training_runs import learning_rate_sweep
from ringtmp.report.page_content import Page, Section, Skipped

Plan = list[tuple[int, Job]]


def sweep_plan(choices: Choices) -> Plan:
    """Before anything is compared."""
    cells = learning_rate_sweep.cells(choices) if choices.comparisons else []
    return interleaved([each.job for each in cells], 1, choices.seed)


def plan(choices: Choices) -> Plan:
    """A run that several experiments read is measured once, as often as the one that wants it most. `choices` has the
    learning rates by now."""
    jobs: dict[str, Job] = {}
    times: dict[str, int] = {}
    for name in [each for each in choices.names if _possible(choices, each)]:
        for job in jobs_of(name, choices):
            jobs.setdefault(job.file_stem, job)
            often = CATALOG[name].times(choices.quick, choices.repeats)
            times[job.file_stem] = max(often, times.get(job.file_stem, 0))
    found: Plan = []
    for count in sorted(set(times.values()), reverse=True):
        found += interleaved([job for stem, job in jobs.items() if times[stem] == count], count, choices.seed)
    for module in [module_of(name) for name in choices.names if hasattr(module_of(name), "arranged")]:
        found = module.arranged(found)
    return found


def needless(choices: Choices, job: Job, found: Sequence[Measurement]) -> str | None:
    """Why a job need not be measured after what was; None: it must be."""
    asked = [module_of(name).needless for name in choices.names if hasattr(module_of(name), "needless")]
    return next((why for each in asked if (why := each(choices, job, Measured(found)))), None)


def module_of(name: str) -> Any:
    return importlib.import_module(f"ringtmp.bench.experiments.{CATALOG[name].module or name}")


def jobs_of(name: str, choices: Choices) -> list[Job]:
    module = module_of(name)
    found: list[Job] = module.jobs(choices) if hasattr(module, "jobs") else [each.job for each in module.cells(choices)]
    return found


def _possible(choices: Choices, name: str) -> bool:
    return not (choices.listen and CATALOG[name].lab)


def results(choices: Choices, measured: Measured) -> dict[str, Any]:
    """The figures of experiments that have more to say than their page: of one alone, or by its name."""
    found = {
        name: module.results(choices, measured)
        for name in choices.names
        if hasattr(module := module_of(name), "results")
    }
    return dict(found[choices.names[0]]) if len(choices.names) == 1 and found else found


def sections(choices: Choices, measured: Measured) -> list[Section]:
    found: list[Section] = []
    for name in choices.names:
        if not _possible(choices, name):
            why = f"it {CATALOG[name].lab}, which devices that joined do not let it"
            found.append(_left_out(name, why))
            continue
        try:
            found.append(module_of(name).section(choices, measured))
        except Exception as error:  # hours of measurements: one section less, and why, instead of no page
            why = f"its measurements could not be made into a section: {type(error).__name__}: {error}"
            found.append(_left_out(name, why))
    return found


def _left_out(name: str, why: str) -> Section:
    return Section(name, name.capitalize(), "", skipped=(Skipped("all of it", why),))


def page(
    choices: Choices,
    measurements: Sequence[Measurement],
    environment: Environment,
    *,
    command: str,
    date: str,
    partial: bool,
) -> Page:
    """`partial`: the bench was ended before its end."""
    measured = Measured(measurements)
    facts = (*_facts(choices, environment, command, date), *_notes(choices, measurements, partial))
    if choices.comparisons:
        return Page(
            "The ring against the parameter server",
            "An answer per aim, wins and losses alike, then the measurements behind it.",
            facts,
            choices.emulated,
            (*sections(choices, measured), method(choices, measured)),
        )
    title, subtitle = (
        " and ".join(words) for words in (choices.names, [CATALOG[name].title for name in choices.names])
    )
    emulated = any("lab" in each.job.command and "--no-isolation" not in each.job.command for each in measurements)
    return Page(
        title[0].upper() + title[1:],
        subtitle[0].upper() + subtitle[1:] + ".",
        facts,
        emulated,
        tuple(sections(choices, measured)),
    )


def _facts(choices: Choices, environment: Environment, command: str, date: str) -> list[tuple[str, str]]:
    facts = [
        ("command", command),
        ("date", date),
        ("machine", f"{environment.cpu}, {environment.cores} cores"),
        ("versions", f"ringtmp {environment.ringtmp}, torch {environment.torch}, Python {environment.python}"),
    ]
    if choices.comparisons:
        facts += [("devices", _devices_text(choices)), ("strategies", ", ".join(way.label for way in choices.ways))]
    times = repeats(choices)
    text = f"{' or '.join(map(str, times))}, interleaved; medians or means with bootstrap intervals of 95 %"
    return [*facts, ("repeats", text + "; with one repeat they show the spread of steps alone" * (times == [1]))]


def repeats(choices: Choices) -> list[int]:
    """How often jobs are measured, except those that are measured once."""
    named = [CATALOG[name] for name in choices.names]
    return sorted({each.times(choices.quick, choices.repeats) for each in named if not each.once} or {1})


def _devices_text(choices: Choices) -> str:
    if choices.listen:
        return f"{choices.joined} real devices that joined over the network"
    devices = choices.place(choices.nodes)
    first = devices[0]
    described = (
        f"{len(devices)} emulated, {first.cpu:g} core, {first.link_mbps:g} Mbit/s, {first.memory_mb:g} MiB, each with a "
        "network of its own"
        if choices.emulated
        else f"{len(devices)} plain processes behind links of {first.link_mbps:g} Mbit/s; CPU shares and memory caps are not "
        "emulated, except where a cap is asked for"
    )
    return described + (" (the first of the devices file; see it for the others)" if choices.devices else "")


def _notes(choices: Choices, measurements: Sequence[Measurement], partial: bool) -> list[tuple[str, str]]:
    found = []
    if choices.quick:
        found.append(
            ("note", "Small sizes (quick): this shows that everything works and which way it points, no more.")
        )
    if partial:
        found.append(("note", "Ended early: not everything was measured."))
    busy = max((each.busy_before for each in measurements), default=0.0)
    if busy > QUIET:
        found.append(("warning", f"Not a quiet machine: others used up to {busy:.0%} of it just before a measurement."))
    stolen = max((each.stolen_share for each in measurements), default=0.0)
    if stolen > QUIET / 2:
        found.append(
            ("warning", f"Up to {stolen:.0%} of the CPU time of a measurement went to other guests of the host.")
        )
    return found


def method(choices: Choices, measured: Measured) -> Section:
    return Section(
        "method",
        "How it was measured",
        "Every strategy has the same model, first weights, batches, optimizer and number of devices, and the "
        "learning rate that was best for it in a small sweep. One device alone is the base line. A case is run in "
        "interleaved repeats, so that a slow quarter of an hour affects all of them; a figure is the median over repeats, its "
        "interval a bootstrap over repeats and steps. A difference counts as found when the interval of the ratio does not "
        "contain 1.\n\n"
        "The weights of asynchronous servers depend on timing; all other runs give the same losses every time.",
        (),
        (),
        (learning_rate_sweep.table(choices, measured),),
        tuple(
            Skipped(each.job.name, why)
            for each in learning_rate_sweep.cells(choices)
            if (why := measured.problem(each.job))
        ),
    )
