"""ringtmp train"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from ringtmp.cli.options import RunCommand, flags, run_options
from ringtmp.cli.settings import build
from ringtmp.errors import UsageError


@click.command("train", cls=RunCommand, short_help="Train a model on a ring.")
@run_options
@click.option("--listen", metavar="ADDRESS[:PORT]", help="Wait for devices here instead of starting processes.")
@click.option(
    "--ring", "ring_name", default="home", show_default=True, help="The ring the devices join (with --listen)."
)
@click.option(
    "--start-with",
    type=int,
    metavar="K",
    help="Start with K nodes if no more come within --wait; all or none if K is --nodes.",
)
@click.option(
    "--wait", "wait_s", type=float, default=60.0, show_default=True, metavar="S", help="Seconds --start-with waits."
)
@click.option("--run-dir", type=click.Path(path_type=Path), help="Where to keep the run.  [runs/TIME]")
@click.option(
    "--resume", type=click.Path(path_type=Path), metavar="DIR", help="Go on with the run in DIR, with the same bits."
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as one JSON object.")
@click.option("--quiet", is_flag=True, help="No progress.")
def command(
    config: Path | None, as_json: bool, quiet: bool, run_dir: Path | None, resume: Path | None, listen: str | None,
    ring_name: str, start_with: int | None, wait_s: float, **given: Any,
) -> None:  # fmt: skip
    """Train a model on a ring of processes on this machine, or of devices that join it (--listen).

    Without any option: the bundled digits on a ring of three, done within seconds. Settings may also come from a TOML
    file (CONFIG, with sections model, training, ring, keep) and from the environment (RINGTMP_TRAIN_NODES=4); flags win.
    """
    chosen = flags(given)
    if resume is not None and (run_dir is not None or config is not None):
        raise UsageError("--resume goes with neither --run-dir nor a settings file: the run has its own")
    settings = build(config, chosen)

    from ringtmp.system.resources import load_torch

    load_torch()
    from ringtmp import api
    from ringtmp.cli import show

    if resume is not None:
        settings = api.settings_of(resume, _changes(chosen))
    with show.watcher(quiet) as watcher:
        pool = None
        if listen is not None:
            nodes, threads = settings.ring.nodes, settings.training.threads
            notice_s = settings.keep.notice_s
            pool = api.device_pool(listen, ring_name, nodes, threads, watcher, start_with, wait_s, notice_s)
        elif start_with is not None:
            raise UsageError("--start-with goes with --listen: processes on this machine all come")
        if resume is not None:
            result = api.resume(resume, _changes(chosen), None, None, watcher, pool)
        else:
            result = api.start(settings, None, None, None, run_dir, watcher, pool)
    if as_json:
        show.print_json(result.summary)
    else:
        show.print_summary(result.summary, sys.stdout)


def _changes(given: dict[str, Any]) -> dict[str, Any]:
    """Flags under their field names, as the saved settings have them."""
    from ringtmp.cli.settings import FIELDS

    renamed = {"opt": "optimizer_settings", "set": "settings", "model": "name"}
    return {renamed.get(flag, FIELDS[flag][1]): value for flag, value in given.items()}
