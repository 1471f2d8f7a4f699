"""ringtmp train"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ringtmp.cli.options import RunCommand, flags, run_options
from ringtmp.cli.ranks import as_rank, goes_on_in
from ringtmp.cli.settings import build
from ringtmp.cli.supervised import is_supervised, restarts_allowed, supervise
from ringtmp.dashboard.beside_training import page_beside
from ringtmp.errors import UsageError
from ringtmp.system.files import default_run_dir

if TYPE_CHECKING:
    from ringtmp.launch.node_pool import NodePool
    from ringtmp.metrics.summary import Summary


@run_options
@click.command("train", cls=RunCommand)
@click.option("--listen", metavar="ADDRESS[:PORT]", help="Wait for devices here instead of starting processes.")
@click.option(
    "--ring", "ring_name", default="home", show_default=True, help="Name of the ring that devices join (with --listen)."
)
@click.option(
    "--start-with", type=int, metavar="K", help="Start with K nodes if the others do not come within --wait seconds."
)
@click.option(
    "--wait", "wait_s", type=float, default=60.0, show_default=True, metavar="S", help="How long --start-with waits."
)
@click.option(
    "--discovery/--no-discovery", default=None,
    help="Let devices find the ring on the network and join with a code (with --listen).  [yes, where it is installed]",
)  # fmt: skip
@click.option(
    "--home-listen", metavar="ADDRESS[:PORT]", help="Train with another home, whose ring joins this one's master here."
)
@click.option(
    "--home-join", metavar="TOKEN|-|@FILE", help="Train with another home: join its master with the token it printed."
)
@click.option(
    "--homes", default="homes", show_default=True, metavar="NAME", help="Whose tokens the other home joins with."
)
@click.option("--qr", is_flag=True, help="Show the line for devices as a QR code, too (with --listen).")
@click.option("--run-dir", type=click.Path(path_type=Path), help="Where to keep the run.  [runs/TIME]")
@click.option(
    "--resume", type=click.Path(path_type=Path), metavar="DIR", help="Resume the run in DIR, with the same bits."
)
@click.option(
    "--supervised", is_flag=True,
    help="Start the master again when it is killed: the run goes on from its newest checkpoint, with the same bits.",
)  # fmt: skip
@click.option("--restarts", type=click.IntRange(1), metavar="N", help="How often, at most (with --supervised).  [10]")
@click.option(
    "--silent-after", type=click.FloatRange(10), metavar="S",
    help="Take a master that writes no event for so long for hung, and start it again (with --supervised).  [never]",
)  # fmt: skip
@click.option(
    "--log", "logs", multiple=True, metavar="KIND:WHERE",
    help="Keep the numbers of every step for another tool: csv:FILE, jsonl:FILE, tensorboard:DIR or mlflow:EXPERIMENT.  "
    "Repeatable.",
)  # fmt: skip
@click.option("--dashboard", is_flag=True, help="Serve a live page of the run, on this machine (extra `web`).")
@click.option("--dashboard-port", type=int, metavar="PORT", help="Its port.  [8650, or the next that is free]")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as one JSON object.")
@click.option("--quiet", is_flag=True, help="Show no progress.")
def command(
    config: Path | None, as_json: bool, quiet: bool, run_dir: Path | None, resume: Path | None, listen: str | None,
    ring_name: str, start_with: int | None, wait_s: float, discovery: bool | None, qr: bool, logs: tuple[str, ...],
    dashboard: bool, dashboard_port: int | None, supervised: bool, restarts: int | None,
    silent_after: float | None, home_listen: str | None, home_join: str | None, homes: str, **given: Any,
) -> None:  # fmt: skip
    """Train a model on a ring of processes on this machine, or of devices that join it (--listen).

    Without options it trains on the bundled digits with three nodes and is done within seconds. Settings may also come
    from a TOML file (CONFIG, with the sections model, training, ring and keep) and from the environment, such as
    RINGTMP_TRAIN_NODES=4. Options win over the environment, and the environment wins over the file.
    """
    chosen = flags(given)
    rank = as_rank(chosen, listen)
    if resume is not None and (run_dir is not None or config is not None):
        raise UsageError("--resume takes neither --run-dir nor a settings file: the run has its own")
    _refuse_without_listen(listen, qr, discovery, start_with)
    page, at_most = _page_options(dashboard, dashboard_port), restarts_allowed(supervised, restarts, silent_after, rank)
    settings = build(config, chosen)
    if supervised:
        supervise(settings, chosen, at_most, page)

    from ringtmp.system.resources import loading

    with loading(nothing_started=True):
        from ringtmp import api
        from ringtmp.run import evaluate_predict_generate
        from ringtmp.run.open_line_to_home import line_to_home
        from ringtmp.watchers.watcher_registry import watcher_named
    from ringtmp.cli import show_results

    line = line_to_home(home_listen, home_join, homes)
    pool: NodePool | None = None
    if rank is not None:
        from ringtmp.launch.torchrun_ranks import leads, ranks_for

        meeting = leads(rank)
        run_dir, resume = goes_on_in(meeting, run_dir, resume)

    if resume is not None:
        settings = api.settings_of(resume, chosen)
    with show_results.watcher(quiet, [watcher_named(each) for each in logs]) as watcher, ExitStack() as beside:
        if page is not None:
            folder = resume or run_dir or default_run_dir()
            run_dir = None if resume else folder
            beside.enter_context(page_beside(folder, page, watcher.tell))
        if rank is not None:
            pool = ranks_for(meeting, settings, watcher.tell)
        if listen is not None:
            pool = evaluate_predict_generate.device_pool(
                listen, ring_name, settings, watcher, start_with=start_with, wait_s=wait_s,
                discovery=discovery is not False, qr=qr, supervised=is_supervised(), resumed=resume,
            )  # fmt: skip
        begin = partial(api.resume, resume, chosen) if resume else partial(api.start, settings, run_dir=run_dir)
        result = begin(watcher=watcher, pool=pool, line=line)
    _show(result.summary, as_json)


def _show(summary: Summary, as_json: bool) -> None:
    from ringtmp.cli import show_results

    if as_json:
        show_results.print_json(summary)
    else:
        show_results.print_summary(summary, sys.stdout)


def _refuse_without_listen(listen: str | None, qr: bool, discovery: bool | None, start_with: int | None) -> None:
    if start_with is not None and listen is None:
        raise UsageError("--start-with goes with --listen: processes on this machine all start")
    source = click.get_current_context().get_parameter_source
    if listen is None and (qr or (discovery and source("discovery") is ParameterSource.COMMANDLINE)):
        raise UsageError(f"{'--qr' if qr else '--discovery'} goes with --listen: only devices need to find the ring")


def _page_options(dashboard: bool, port: int | None) -> list[str] | None:
    """Of the process that serves the page; None: nobody wants one."""
    if not dashboard:
        if port is not None:
            raise UsageError("--dashboard-port goes with --dashboard")
        return None
    from ringtmp.dashboard.listen_until_stopped import require_web

    require_web()
    return [] if port is None else ["--port", str(port)]
