"""ringtmp bench messages"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import click

from ringtmp.errors import RingError

LIMIT_S = 120.0


@click.command("messages", short_help="Microseconds of a small message, node to node.")
@click.option("--size", "size_bytes", type=click.IntRange(4, 2**20), default=1024, show_default=True, metavar="BYTES")
@click.option("--count", type=click.IntRange(1), default=1000, show_default=True, help="Pings of a round.")
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True, help="Of each, in turns.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(size_bytes: int, count: int, rounds: int, as_json: bool) -> None:
    """One way of a small tensor between two processes: node to node over encrypted TCP, and by Gloo in the clear, in turns.
    Half of a ping and its answer; the median of a round; over rounds the median, the least and the most."""
    from statistics import median

    import msgspec

    from ringtmp.bench.measuring import run_command
    from ringtmp.bench.measuring.measurement_files import Result
    from ringtmp.cli.show import print_json

    exchange = {"size_bytes": size_bytes, "count": count, "rounds": rounds}
    words = [
        sys.executable,
        "-P",
        "-m",
        "ringtmp.bench.programs.message_round_trip",
        msgspec.json.encode(exchange).decode(),
    ]
    with run_command.interruptible(), tempfile.TemporaryDirectory(prefix="rtbench-") as folder:
        finished = run_command.run(words, Path(folder), (), LIMIT_S)
    if finished.code or finished.timed_out:
        raise RingError(f"the two processes came to no end: {finished.err.strip()[-300:] or 'nothing was said'}")
    result = msgspec.json.decode(finished.out, type=Result)
    rows = {"node to node, encrypted": result.step_s, "Gloo, in the clear": tuple(result.facts["gloo_s"])}
    if as_json:
        print_json({"size_bytes": size_bytes, "count": count, "one_way_s": rows})
        return
    print(f"{size_bytes} bytes, one way, {rounds} rounds of {count}")
    for name, seconds in rows.items():
        middle, least, most = (each * 1e6 for each in (median(seconds), min(seconds), max(seconds)))
        print(f"  {name:24} {middle:6.0f} us  ({least:.0f} to {most:.0f})")
