"""ringtmp compare"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ringtmp.errors import UsageError


@click.command("compare")
@click.argument("runs", nargs=-1, required=True, metavar="RUN RUN...", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as one JSON object.")
def command(runs: tuple[Path, ...], as_json: bool) -> None:
    """Say which of several runs was better and why: accuracy, loss, time, bytes, joules and idle time, side by side.

    Also says where the runs did not do the same work. A run that is still going on is compared as far as it has come.
    """
    from ringtmp.cli import show_comparison
    from ringtmp.metrics.compare import compare
    from ringtmp.metrics.events import of_run
    from ringtmp.metrics.fold_events import parts_of
    from ringtmp.metrics.history import history_of
    from ringtmp.metrics.summary import of_parts

    if len(runs) < 2:
        raise UsageError("compare needs two runs or more: ringtmp compare RUN1 RUN2")
    if len({each.resolve() for each in runs}) < len(runs):
        raise UsageError("one run is named twice: name different ones")
    found = []
    for run in runs:
        parts = parts_of(of_run(run))
        if not parts:
            raise UsageError(f"{run} was never started, so there is nothing to compare")
        found.append((str(run), of_parts(parts, str(run)), history_of(parts)))
    made = compare(found)
    if as_json:
        show_comparison.print_json(made)
    else:
        show_comparison.print_table(made, sys.stdout)
