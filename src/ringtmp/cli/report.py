"""ringtmp report"""

from __future__ import annotations

from pathlib import Path

import click

from ringtmp.errors import UsageError


@click.command("report")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="Folder to write it to.  [RUN/report]")
def command(run: Path, out: Path | None) -> None:
    """Write report.html for RUN: loss by steps, seconds, bytes and joules, idle time by cause, one step as a Gantt chart,
    and bytes, memory and energy by node. It is one file that needs no network; figures and their numbers lie beside it.

    Also works while a run is going on and after it has failed: it shows what has been recorded.
    """
    from ringtmp.metrics.events import of_run
    from ringtmp.report import figures, run_page
    from ringtmp.report.page import write
    from ringtmp.report.run_timeline import gather

    figures.require_matplotlib()
    found = gather(of_run(run), str(run))
    if found is None:
        raise UsageError(f"{run} was never started, so there is nothing to report")
    print(write(run_page.page(found), out or run / "report"))
