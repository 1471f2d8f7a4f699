"""ringtmp trace"""

from __future__ import annotations

from pathlib import Path

import click


@click.command("trace")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="File to write it to.  [RUN/trace.json]")
def command(run: Path, out: Path | None) -> None:
    """Write the timeline of RUN, with lanes for compute, send and receive of each node. Open it in https://ui.perfetto.dev.

    Every span is recorded in the first 32 steps and in every hundredth step after them.
    """
    import msgspec

    from ringtmp.metrics.events import of_run
    from ringtmp.metrics.trace import chrome_trace

    made = chrome_trace(of_run(run))
    path = out or run / "trace.json"
    path.write_bytes(msgspec.json.encode(made))
    print(f"{len(made['traceEvents'])} events in {path}")
