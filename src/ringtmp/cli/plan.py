"""ringtmp plan"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ringtmp.cli.options import RunCommand, flags, run_options
from ringtmp.cli.settings import build
from ringtmp.errors import UsageError

if TYPE_CHECKING:
    from ringtmp.config import RunConfig
    from ringtmp.plan.devices import Device
    from ringtmp.plan.planner import Plan
    from ringtmp.run.measure_model import Work


@click.command("plan", cls=RunCommand, short_help="What a run would do, before it does it.")
@run_options
@click.option(
    "--devices", "file", type=click.Path(path_type=Path), metavar="FILE.toml",
    help="One [[device]] table each, the master first.  [processes on this machine]",
)  # fmt: skip
@click.option(
    "--compare", metavar="WAY,WAY…",
    help="Other ways beside it: ps:bsp, ps:async, ps:ssp:3 (each with :K servers or :workers), allreduce:ring, allreduce:tree.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the plan as one JSON object.")
@click.option("--svg", type=click.Path(path_type=Path), metavar="FILE", help="Draw one step of every node.")
@click.option("--quiet", is_flag=True, help="No progress.")
def command(
    config: Path | None, file: Path | None, compare: str | None, as_json: bool, svg: Path | None,
    quiet: bool, **given: Any,
) -> None:  # fmt: skip
    """Who would hold what, how fast, with how much memory and energy; what limits it and what would help.

    Takes the options of train, with --strategy ring; --compare puts other ways to train beside it. Layers are measured on
    this machine (a few seconds, kept in ~/.cache/ringtmp/profile); the devices are those of a file as for the lab, or
    processes on this machine. Nothing is started.
    """
    chosen = flags(given)
    settings = build(config, chosen)

    from ringtmp.system.resources import load_torch

    load_torch()
    from ringtmp import api
    from ringtmp.cli import plan_show, show
    from ringtmp.config import resolve
    from ringtmp.data import by_name
    from ringtmp.launch import planned_devices
    from ringtmp.plan.gantt import svg as draw
    from ringtmp.run import measure_model
    from ringtmp.strategies import compare as ways
    from ringtmp.system.resources import rss_bytes

    settings = resolve(settings)
    if settings.ring.strategy != "ring":
        raise UsageError(
            f"plan lays out a ring, not --strategy {settings.ring.strategy}: leave it out, and put other ways to train "
            "beside the ring with --compare ring,ps:bsp"
        )
    threads = settings.training.threads or 1
    devices = _devices(file, chosen.get("nodes"), settings.ring.nodes, threads)
    counted_bytes = rss_bytes() if file is None else 0
    names = [name.strip() for name in compare.split(",")] if compare else []
    for name in names:
        ways.check_name(name)
    with show.watcher(quiet) as watcher:
        train, _ = by_name.load(settings.training.data, settings.training.seed, settings.model.settings)
        model = api.named_model(settings.model, train)
        work = measure_model.work_of(settings, model, train, watcher.phase)
        watcher.phase("planning")
        devices = planned_devices.with_master_here(devices, counted_bytes)
        made = measure_model.plan(settings, work, devices, settings.ring.all_devices or file is None)
        everyone = _with_all(settings, work, devices, made)
        watcher.phase("comparing")
        # At equal numbers, and without those who would slow all: the ring's own devices, if there are two.
        members = made.devices if len(made.devices) > 1 else devices
        others = [ways.compare(name, work.model.costs, members, made.options) for name in names if name != "ring"]
        watcher.phase("trying what would help")
        page = plan_show.page(
            replace(made, layers=work.model.costs_at_all_sizes), devices, file is not None, others,
            steps_per_epoch=work.batches.steps_per_epoch, model=settings.model.name, data=train.name, with_all=everyone,
        )  # fmt: skip
    if svg is not None:
        title = f"{settings.model.name} on {train.name}: {plan_show.headline(made)}"
        try:
            svg.write_text(draw(made.simulated, title))
        except OSError as error:
            raise UsageError(f"the picture {svg} cannot be written: {error.strerror}") from error
    if as_json:
        show.print_json(page)
    else:
        plan_show.print_page(page, sys.stdout)


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


def _devices(file: Path | None, given_nodes: int | None, nodes: int, threads: int) -> tuple[Device, ...]:
    from ringtmp.lab import devices_file as devices_file
    from ringtmp.launch import planned_devices
    from ringtmp.launch.device_facts import usable_cores
    from ringtmp.system.container_limits import group_limits
    from ringtmp.system.resources import free_memory_bytes

    if file is None:
        return planned_devices.local_processes(nodes, threads, usable_cores(), free_memory_bytes(), group_limits())
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the devices file {file} cannot be read: {error}") from error
    devices = devices_file.parse(text, str(file))
    if given_nodes is not None and given_nodes != len(devices):
        raise UsageError(f"--nodes {given_nodes} and the {len(devices)} devices of {file} differ: leave --nodes out")
    return planned_devices.from_file(devices, threads)
