"""ringtmp report"""

from __future__ import annotations

from pathlib import Path

import click

from ringtmp.errors import UsageError


@click.command("report", short_help="A page with the pictures of a run.")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="A folder. [RUN/report]")
def command(run: Path, out: Path | None) -> None:
    """Write report.html for RUN: loss over steps, seconds, bytes and joules, idle time by cause, one step as a Gantt,
    bytes, memory and energy by node. One file that needs no network; figures and their numbers lie beside it.

    Also while it is still running, and after it has failed: it shows what is there.
    """
    from ringtmp.metrics.events import read
    from ringtmp.report import figures
    from ringtmp.report import run_page as run_page
    from ringtmp.report.page import write
    from ringtmp.report.run_timeline import gather

    figures.require_matplotlib()
    log = run / "events.jsonl"
    if not log.is_file():
        raise UsageError(f"{run} is not a run directory: it has no events.jsonl")
    found = gather(read(log), str(run))
    if found is None:
        raise UsageError(f"{run}: nothing was started, so there is nothing to show")
    print(write(run_page.page(found), out or run / "report"))
