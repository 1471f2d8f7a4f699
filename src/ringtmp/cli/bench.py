"""ringtmp bench"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ringtmp.cli import bench_messages, bench_plan
from ringtmp.errors import UsageError

if TYPE_CHECKING:
    from ringtmp.bench.experiments.speed import Row
    from ringtmp.bench.measuring.machine import Environment

QUICK_NOTE = "Tiny models (--quick): these figures show that the cases work, not how fast they are."
PARTIAL_NOTE = "Interrupted: not every repeat was measured."


class _Names(click.Group):
    """`speed`, `messages` and `plan` are commands of their own; any other name is an experiment, and several go together."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args[0] in self.commands:
            return super().resolve_command(ctx, args)
        from ringtmp.cli.experiments import command as experiments

        return "", experiments, args

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from ringtmp.bench.catalogue import CATALOG, EVERY

        with formatter.section("Experiments, any number of them (ringtmp bench idle --help for their options)"):
            formatter.write_dl([(each.name, each.title) for each in CATALOG.values()] + list(EVERY.items()))
        with formatter.section("Against others"):
            formatter.write_dl(
                [
                    ("speed", "milliseconds per step of every way to train, torch's own included"),
                    ("messages", "microseconds of a small message, node to node, beside Gloo"),
                    ("plan", "what plans predict against what is measured, on ten rings of emulated devices"),
                ]
            )


@click.group(
    "bench",
    cls=_Names,
    subcommand_metavar="NAME… | quick | all | speed | messages | plan",
    short_help="Measure in one run.",
)
def command() -> None:
    """Experiments that measure. A measurement is a file: what is there is not measured again."""


command.add_command(bench_plan.command)
command.add_command(bench_messages.command)


@command.command("speed", short_help="Milliseconds per step of every way to train.")
@click.option("--cases", default="*", show_default=True, metavar="GLOB", help="Of the cases, e.g. 'ring,ps:*'.")
@click.option("--workloads", default="gpt,mlp", show_default=True, help="What is trained.")
@click.option("--settings", default="two,lab-fast,lab-100", show_default=True, help="Where; lab-… need root on Linux.")
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True, help="Of every case, interleaved.")
@click.option("--steps", type=click.IntRange(1), default=10, show_default=True, help="Steps that count, per repeat.")
@click.option("--warm-up", type=click.IntRange(1), default=2, show_default=True, help="Steps before them.")
@click.option("--microbatches", metavar="M,M", default="", help="For pipelines, each of these.  [what suits the work]")
@click.option("--seed", type=int, default=0, show_default=True, help="Of weights, batches, order and intervals.")
@click.option("--limit", "limit_s", type=click.FloatRange(1), default=900.0, show_default=True, metavar="S",
              help="Seconds a measurement may take in all.")  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs/bench-speed"), show_default=True,
              help="Where measurements, table and figure go.")  # fmt: skip
@click.option("--quick", is_flag=True, help="Tiny models: does every case work?")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--quiet", is_flag=True, help="No progress.")
def speed(
    cases: str, workloads: str, settings: str, repeats: int, steps: int, warm_up: int, microbatches: str, seed: int,
    limit_s: float, out: Path, quick: bool, as_json: bool, quiet: bool,
) -> None:  # fmt: skip
    """Seconds per step of the ring, the parameter server, all-reduce, torch's DistributedDataParallel and pipelining, and
    one process alone, on the same work: against the ideal max(c, T) and against the best peer.

    Cases are interleaved, so that noise hits all alike. Interrupt it as you like: the same command goes on from there. A
    case that fails is recorded with its error, and tried again the next time.
    """
    import msgspec

    from ringtmp.bench.experiments import speed as experiment
    from ringtmp.bench.measuring import machine, measure_jobs, progress_bar, run_command
    from ringtmp.bench.measuring.jobs import interleaved
    from ringtmp.bench.measuring.measurement_files import Store
    from ringtmp.bench.training_runs.device_setups import SETTINGS
    from ringtmp.bench.training_runs.workloads import QUICK, WORKLOADS
    from ringtmp.cli.experiments import can_emulate
    from ringtmp.launch.device_facts import usable_cores

    works = [
        msgspec.structs.replace((QUICK if quick else WORKLOADS)[name], seed=seed, steps=warm_up + steps)
        for name in experiment.chosen("workload", workloads, WORKLOADS)
    ]
    places = [SETTINGS[name] for name in experiment.chosen("setting", settings, SETTINGS)]
    planned = experiment.jobs(works, places, cases, warm_up, _counts(microbatches))
    experiment.require_room(places, usable_cores(), can_emulate())
    plan = interleaved(planned, repeats, seed)
    environment = machine.look()
    store = Store(out)
    measured = []
    try:
        with run_command.interruptible(), progress_bar.telling(plan, quiet) as teller:
            for each in measure_jobs.perform(plan, store, environment, limit_s, teller):
                measured.append(each)
    except KeyboardInterrupt:
        print(
            f"ringtmp bench: {len(measured)} of {len(plan)} measurements are in {out}; the same command goes on from there",
            file=sys.stderr,
        )
        raise
    finally:
        store.close()
        if measured:
            rows = experiment.analyse(measured, seed)
            note = " ".join([QUICK_NOTE] * quick + [PARTIAL_NOTE] * (len(measured) < len(plan)))
            _write(rows, out, environment, repeats, note)
    _print(rows, as_json, out)
    if all(row.step_s is None for row in rows):
        sys.exit(1)


def _counts(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if not word.isdigit() or int(word) < 1:
            raise UsageError(f"--microbatches {text!r}: give numbers from 1, with commas between them")
    return [int(word) for word in words]


def _write(rows: list[Row], out: Path, environment: Environment, repeats: int, note: str) -> None:
    """results.md, results.json and the figure; whatever stands in the way of the figure is said and no more."""
    from datetime import date

    import msgspec

    from ringtmp.bench import figure, table

    try:
        page = table.markdown(rows, environment, _given(), date.today().isoformat(), repeats, note)
        (out / "results.md").write_text(page)
        (out / "results.json").write_bytes(msgspec.json.format(msgspec.json.encode(rows)) + b"\n")
        figure.draw(rows, out, note)
    except ImportError:
        print(f"ringtmp bench: {figure.MISSING}", file=sys.stderr)
    except OSError as error:
        print(f"ringtmp bench: the results cannot be written to {out}: {error.strerror}", file=sys.stderr)


def _print(rows: list[Row], as_json: bool, out: Path) -> None:
    from rich.console import Console

    from ringtmp.bench import table
    from ringtmp.cli import show

    if as_json:
        show.print_json({"rows": rows, "out": str(out)})
        return
    # No emoji: rich would make a ring of the end of 'allreduce:ring:'.
    table.show(rows, Console(width=None if sys.stdout.isatty() else 130, emoji=False))
    print(f"{out}/results.md, results.json, measurements/")


def _given() -> str:
    """The command as it was given, but for --out: a folder of one machine is no part of how to repeat it."""
    context = click.get_current_context()
    words = ["ringtmp", "bench", str(context.info_name)]
    for option in context.command.params:
        name = str(option.name)
        given = context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT
        if given and name not in ("out", "as_json", "quiet"):
            value = context.params[name]
            words += [option.opts[0]] if value is True else [option.opts[0], str(value)]
    import shlex

    return shlex.join(words)
