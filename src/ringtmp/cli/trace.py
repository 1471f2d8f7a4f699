"""ringtmp trace"""

from __future__ import annotations

from pathlib import Path

import click

from ringtmp.errors import UsageError


@click.command("trace")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="File to write it to.  [RUN/trace.json]")
def command(run: Path, out: Path | None) -> None:
    """Write the timeline of RUN, with lanes for compute, send and receive of each node. Open it in https://ui.perfetto.dev.

    Every span is recorded in the first 32 steps and in every hundredth step after them.
    """
    import msgspec

    from ringtmp.metrics.events import read
    from ringtmp.metrics.trace import chrome_trace

    log = run / "events.jsonl"
    if not log.is_file():
        raise UsageError(f"{run} is not a run directory: it has no events.jsonl")
    made = chrome_trace(read(log))
    path = out or run / "trace.json"
    path.write_bytes(msgspec.json.encode(made))
    print(f"{len(made['traceEvents'])} events in {path}")
