"""ringtmp bench plan"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ringtmp.errors import UsageError, unknown


@click.command("plan", short_help="How true plans are, and what they gain.")
@click.option("--beds", "names", default="", metavar="NAME,NAME", help="Some of the rings.  [all, and the contrasts]")
@click.option("--repeats", type=click.IntRange(1), default=2, show_default=True, help="Of every ring, interleaved.")
@click.option("--steps", type=click.IntRange(1), default=10, show_default=True, help="Steps that count, per repeat.")
@click.option("--warm-up", type=click.IntRange(1), default=2, show_default=True, help="Steps before them.")
@click.option("--limit", "limit_s", type=click.FloatRange(1), default=600.0, show_default=True, metavar="S",
              help="Seconds a measurement may take in all.")  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs/bench-plan"), show_default=True,
              help="Where measurements and the table go.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--quiet", is_flag=True, help="No progress.")
def command(
    names: str, repeats: int, steps: int, warm_up: int, limit_s: float, out: Path, as_json: bool, quiet: bool
) -> None:
    """Predicted and measured step time and memory on ten rings of emulated devices, and what a plan gains over equal parts
    and over the best single device. Needs root on Linux. Interrupt it as you like: the same command goes on from there.
    """
    from datetime import date

    import msgspec

    from ringtmp.bench.experiments import plan_accuracy
    from ringtmp.bench.measuring import machine, measure_jobs, progress_bar, run_command
    from ringtmp.bench.measuring.jobs import interleaved
    from ringtmp.bench.measuring.measurement_files import Store
    from ringtmp.cli.experiments import can_emulate
    from ringtmp.cli.show import print_json

    if not can_emulate():
        raise UsageError("bench plan needs the lab, which needs root on Linux, ip and tc: sudo ringtmp bench plan …")
    beds, contrasts = list(plan_accuracy.BEDS), list(plan_accuracy.CONTRASTS)
    if names:
        wanted = [name.strip() for name in names.split(",")]
        known = [bed.name for bed in beds] + [bed.name for bed, _ in contrasts]
        for name in wanted:
            if name not in known:
                raise unknown("ring of devices", name, known)
        beds = [bed for bed in beds if bed.name in wanted]
        contrasts = [each for each in contrasts if each[0].name in wanted]
    plan = interleaved(plan_accuracy.jobs(beds, [bed for bed, _ in contrasts], steps, warm_up), repeats, 0)
    store, measured = Store(out), []
    try:
        with run_command.interruptible(), progress_bar.telling(plan, quiet) as teller:
            for each in measure_jobs.perform(plan, store, machine.look(), limit_s, teller):
                measured.append(each)
    finally:
        store.close()
        rows, contrasted = plan_accuracy.rows(beds, measured), plan_accuracy.contrasts(contrasts, measured)
        words = ["ringtmp bench plan", *([f"--beds {names}"] if names else []), f"--repeats {repeats} --steps {steps}"]
        page = plan_accuracy.markdown(rows, contrasted, " ".join(words), date.today().isoformat())
        (out / "results.md").write_text(page)
        results = {"rows": rows, "contrasts": contrasted, "verdict": plan_accuracy.verdict(rows)}
        (out / "results.json").write_bytes(msgspec.json.format(msgspec.json.encode(results)) + b"\n")
    if as_json:
        print_json(results)
    else:
        sys.stdout.write(page)
