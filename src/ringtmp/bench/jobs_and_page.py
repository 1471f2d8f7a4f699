"""All chosen experiments as one: which jobs in which order, and the page their measurements make. Pure."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from ringtmp.bench.catalogue import CATALOG
from ringtmp.bench.measuring.jobs import Job, interleaved
from ringtmp.bench.measuring.machine import Environment
from ringtmp.bench.measuring.measurement_files import Measurement
from ringtmp.bench.training_runs import learning_rate_sweep
from ringtmp.bench.training_runs.train_commands import Measured
from ringtmp.bench.user_choices import Choices
from ringtmp.report.page_content import Page, Section, Skipped

#: What others may use of the machine before its figures need a warning.
QUIET = 0.1
Plan = list[tuple[int, Job]]


def sweep_plan(choices: Choices) -> Plan:
    return interleaved([each.job for each in learning_rate_sweep.cells(choices)], 1, choices.seed)


def plan(choices: Choices) -> Plan:
    """A run that several experiments read is measured once. `choices` has the learning rates by now."""
    often: dict[str, Job] = {}
    once: dict[str, Job] = {}
    for name in [each for each in choices.names if _possible(choices, each)]:
        found = _module(name).jobs(choices)
        for job in found:
            (once if CATALOG[name].once else often).setdefault(job.file_stem, job)
    return interleaved(list(often.values()), choices.repeats, choices.seed) + interleaved(
        list(once.values()), 1, choices.seed
    )


def _module(name: str) -> Any:
    return importlib.import_module(f"ringtmp.bench.experiments.{CATALOG[name].module or name}")


def _possible(choices: Choices, name: str) -> bool:
    return not (choices.listen and CATALOG[name].lab)


def sections(choices: Choices, measured: Measured) -> list[Section]:
    found: list[Section] = []
    for name in choices.names:
        if not _possible(choices, name):
            why = f"it {CATALOG[name].lab}, which devices that joined do not let it"
            found.append(_left_out(name, why))
            continue
        try:
            found.append(_module(name).section(choices, measured))
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
    command: str,
    date: str,
    partial: bool,
) -> Page:
    """`partial`: the bench was ended before its end."""
    measured = Measured(measurements)
    devices = choices.place(choices.nodes)
    first = devices[0]
    described = (
        f"{len(devices)} emulated, {first.cpu:g} core, {first.link_mbps:g} Mbit/s, {first.memory_mb:g} MiB, each with a "
        "network of its own"
        if choices.emulated
        else f"{len(devices)} plain processes behind links of {first.link_mbps:g} Mbit/s; CPU shares and memory caps are not "
        "emulated, but where a cap is asked for"
    )
    if choices.listen:
        described = f"{choices.joined} of their own, that joined over the network"
    facts = [
        ("command", command),
        ("date", date),
        ("machine", f"{environment.cpu}, {environment.cores} cores"),
        ("versions", f"ringtmp {environment.ringtmp}, torch {environment.torch}, Python {environment.python}"),
        ("devices", described + ("; the first of the file, see it for the others" if choices.devices else "")),
        ("strategies", ", ".join(way.label for way in choices.ways)),
        ("repeats", f"{choices.repeats}, interleaved; medians or means with bootstrap intervals of 95 %"
                    + ("; with one repeat they show the spread of steps alone" if choices.repeats == 1 else "")),
    ]  # fmt: skip
    if choices.quick:
        facts.append(
            ("note", "Small sizes (quick): this shows that everything works and which way it points, no more.")
        )
    if partial:
        facts.append(("note", "Ended early: not everything was measured."))
    busy = max((each.busy_before for each in measurements), default=0.0)
    if busy > QUIET:
        facts.append(("warning", f"Not a quiet machine: others used up to {busy:.0%} of it just before a measurement."))
    stolen = max((each.stolen_share for each in measurements), default=0.0)
    if stolen > QUIET / 2:
        facts.append(
            ("warning", f"Up to {stolen:.0%} of the CPU time of a measurement went to other guests of the host.")
        )
    made = [*sections(choices, measured), method(choices, measured)]
    return Page(
        "The ring against the parameter server",
        "An answer per aim, wins and losses alike, then the measurements behind it.",
        tuple(facts),
        choices.emulated,
        tuple(made),
    )


def method(choices: Choices, measured: Measured) -> Section:
    return Section(
        "method",
        "How it was measured",
        "Every strategy has the same model, first weights, batches, optimizer and number of devices, and the "
        "learning rate that was best for it in a small sweep. One device alone is the base line. A case is run in "
        "interleaved repeats, so that a slow quarter of an hour hits all alike; a figure is the median over repeats, its "
        "interval a bootstrap over repeats and steps. A difference counts as found when the interval of the ratio does not "
        "have 1 in it.\n\n"
        "Asynchronous servers take the ways of the clock into their weights; all other runs give the same losses every time.",
        (),
        (),
        (learning_rate_sweep.table(choices, measured),),
        tuple(
            Skipped(each.job.name, why)
            for each in learning_rate_sweep.cells(choices)
            if (why := measured.problem(each.job))
        ),
    )
