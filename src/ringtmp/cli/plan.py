"""ringtmp plan"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ringtmp.cli.options import RunCommand, flags, run_options
from ringtmp.cli.settings import build
from ringtmp.errors import UsageError

if TYPE_CHECKING:
    from ringtmp.config import RunConfig
    from ringtmp.plan.devices import Device
    from ringtmp.plan.planner import Plan, PlanOptions
    from ringtmp.run.choose_strategy import ChosenOnPaper
    from ringtmp.run.measure_model import Work
    from ringtmp.strategies.compare import Way
    from ringtmp.strategies.registry import Choice


@run_options
@click.command("plan", cls=RunCommand)
@click.option(
    "--devices", "file", type=click.Path(path_type=Path), metavar="FILE.toml",
    help="The devices, one [[device]] table each, the master first.  [processes on this machine]",
)  # fmt: skip
@click.option(
    "--compare", metavar="STRATEGY,STRATEGY…",
    help="Other strategies beside it, for instance ps:bsp,ps:ssp:3:servers=2,allreduce:tree.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the plan as one JSON object.")
@click.option("--svg", type=click.Path(path_type=Path), metavar="FILE", help="Draw one step of every node here.")
@click.option("--quiet", is_flag=True, help="Show no progress.")
def command(
    config: Path | None, file: Path | None, compare: str | None, as_json: bool, svg: Path | None,
    quiet: bool, **given: Any,
) -> None:  # fmt: skip
    """Show which node would hold what, how fast the ring would be, how much memory and energy it would take, what limits
    it and what would help. Nothing is started.

    Takes the options of train, with --strategy ring or auto; --compare puts other ways to train beside it. Layers are
    measured on this machine, which takes a few seconds once (kept in ~/.cache/ringtmp/profile). The devices come from a
    file, as for the lab, or are processes on this machine.
    """
    chosen = flags(given)
    settings = build(config, chosen)

    from ringtmp.system.resources import loading, rss_bytes

    with loading(nothing_started=True):
        from ringtmp import api
    from ringtmp.cli import show_plan, show_results
    from ringtmp.launch import planned_devices
    from ringtmp.run import measure_model
    from ringtmp.run.check_settings import resolve
    from ringtmp.run.text_settings import check_text, named_data
    from ringtmp.runtime.compute_device import computing_on
    from ringtmp.strategies import registry

    settings = resolve(settings)
    _refuse_other_strategies(settings)
    threads = settings.training.threads or 1
    devices = _devices(file, chosen.get("nodes"), settings.ring.nodes, threads)
    counted_bytes = rss_bytes() if file is None else 0
    keep_all = settings.ring.all_devices or file is None
    enough = partial(registry.get(settings.ring.strategy).refuse_too_few, settings, len(devices), keep_all)
    choices = [registry.parse(word) for word in (compare or "").split(",") if word.strip()]
    with computing_on(settings.ring.device), show_results.watcher(quiet) as watcher:
        settings, (train, _) = named_data(settings, phase=watcher.phase)
        model = check_text(train, settings.model.name, api.named_model(settings.model, train))
        work = measure_model.work_of(settings, model, train, watcher.phase, known=enough)
        watcher.phase("planning")
        devices = planned_devices.with_master_here(devices, counted_bytes, described=file is not None)
        auto = _chosen(settings, work, devices, file is not None)
        settings, devices = _to_draw(auto, settings, devices)
        made = measure_model.plan(settings, work, devices, keep_all)
        everyone = _with_all(settings, work, devices, made)
        watcher.phase("comparing")
        # At equal numbers, and without those who would slow all: the ring's own devices, if there are two.
        members = made.devices if len(made.devices) > 1 else devices
        others = [*_looked_at(auto), *_others(settings, choices, work, made, members=members)]
        watcher.phase("trying what would help")
        page = show_plan.page(
            replace(made, layers=work.model.costs_at_all_sizes), devices, file is not None, others,
            steps_per_epoch=work.batches.steps_per_epoch, settings=settings, data=train.name, with_all=everyone,
            strategy=auto.choice.best.label if auto else "", why=auto.why if auto else "",
        )  # fmt: skip
    if svg is not None:
        _draw(made, f"{settings.model.name} on {train.name}: {show_plan.headline(made)}", svg)
    if as_json:
        show_results.print_json(page)
    else:
        show_plan.print_page(page, sys.stdout)


def _chosen(settings: RunConfig, work: Work, devices: tuple[Device, ...], described: bool) -> ChosenOnPaper | None:
    """What `--strategy auto` would choose; None: nobody asked. Of described devices the plan leaves some out; processes of
    this machine can be sent home."""
    from ringtmp.run.choose_strategy import on_paper
    from ringtmp.strategies import registry

    if not registry.get(settings.ring.strategy).chooses:
        return None
    every = settings.ring.all_devices
    return on_paper(settings, work, devices, every or not described, None if every or described else _alone(settings))


def _to_draw(
    auto: ChosenOnPaper | None, settings: RunConfig, devices: tuple[Device, ...]
) -> tuple[RunConfig, tuple[Device, ...]]:
    """The best ring, beside which the others are listed."""
    if auto is None:
        return settings, devices
    return auto.ring.config, (_alone(settings),) if auto.ring.alone else devices


def _alone(settings: RunConfig) -> Device:
    """The master where no other process of this machine takes part."""
    from ringtmp.launch import planned_devices
    from ringtmp.system.resources import rss_bytes

    counted_bytes = rss_bytes()
    return planned_devices.with_master_here(_devices(None, 1, 1, settings.training.threads or 1), counted_bytes)[0]


def _looked_at(auto: ChosenOnPaper | None) -> list[Way]:
    """The ways that were compared, but for the one that is drawn."""
    from ringtmp.strategies.compare import Way

    if auto is None:
        return []
    return [
        Way(
            f"{each.label} ({' '.join(each.needs)})" if each.needs else each.label,
            None if each.made is None else each.made.step, () if each.made is None else each.made.memory,
            str(each.problem or ""),
        )
        for each in auto.choice.ways if each is not auto.ring
    ]  # fmt: skip


def _refuse_other_strategies(settings: RunConfig) -> None:
    from ringtmp.strategies import registry

    name = settings.ring.strategy
    if not registry.get(name).splits_layers:
        choice = registry.Choice(name, settings.ring.strategy_settings)
        raise UsageError(
            f"plan lays out a {registry.splitting_layers()}, not --strategy {name}: put that beside it with --compare "
            f"{registry.spelled(choice)}"
        )


def _draw(made: Plan, title: str, file: Path) -> None:
    from ringtmp.report.step_drawing import svg

    try:
        file.write_text(svg(made.simulated.nodes, made.simulated.spans, made.step_s, title))
    except OSError as error:
        raise UsageError(f"the picture {file} cannot be written: {error.strerror}") from error


def _with_all(settings: RunConfig, work: Work, devices: tuple[Device, ...], made: Plan) -> Plan | None:
    """The best plan that uses every device, where the best of all leaves some out."""
    from ringtmp.errors import DoesNotFit
    from ringtmp.run import measure_model

    if not made.left_out:
        return None
    try:
        return measure_model.plan(settings, work, devices, keep_all=True)
    except (DoesNotFit, UsageError):
        return None  # somebody is left out because it can hold nothing


def _others(
    settings: RunConfig, choices: Sequence[Choice], work: Work, made: Plan, *, members: tuple[Device, ...]
) -> list[Way]:
    from ringtmp.strategies import registry
    from ringtmp.strategies.base import Task
    from ringtmp.strategies.compare import compare

    return [
        compare(each, Task(work.model.costs, members, _options(settings, each, work, made)))
        for each in choices
        if registry.spelled(each) != settings.ring.strategy
    ]


def _options(settings: RunConfig, choice: Choice, work: Work, made: Plan) -> PlanOptions:
    """Those of the plan, but for what the strategy's name says of the run."""
    from ringtmp.config import usual_microbatches
    from ringtmp.run.check_settings import resolve
    from ringtmp.strategies.ring.plan import plan_options

    if not choice.run:
        return made.options
    changed = resolve(choice.applied_to(settings))
    count = usual_microbatches(changed.training) if "microbatches" in choice.run else made.options.microbatches
    return plan_options(
        changed, work.batch_size, count, len(work.model.costs), len(made.devices), made.options.keep_all
    )


def _devices(file: Path | None, given_nodes: int | None, nodes: int, threads: int) -> tuple[Device, ...]:
    from ringtmp.lab import devices_file
    from ringtmp.launch import planned_devices
    from ringtmp.launch.device_facts import usable_cores
    from ringtmp.system.container_limits import group_limits
    from ringtmp.system.resources import free_memory_bytes

    if file is None:
        return planned_devices.local_processes(nodes, threads, usable_cores(), free_memory_bytes(), group_limits())
    devices = devices_file.read(file)
    if given_nodes is not None and given_nodes != len(devices):
        raise UsageError(
            f"--nodes {given_nodes} does not match the {len(devices)} devices in {file}: leave out --nodes"
        )
    return planned_devices.from_file(devices, threads)
