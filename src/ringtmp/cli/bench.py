"""ringtmp bench"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ringtmp.errors import RingError, UsageError

if TYPE_CHECKING:
    from ringtmp.bench.bench_request import Choices
    from ringtmp.bench.measuring.jobs import Job
    from ringtmp.bench.measuring.measurement_files import Measurement, Store
    from ringtmp.lab.devices_file import Device
    from ringtmp.report.page_content import Page


class _Bench(click.Command):
    """Its help has the catalogue, and says of every option which experiments take it."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from ringtmp.bench.experiment_registry import CATALOG, EVERY

        for title, compares in (
            ("Comparisons of the ring with the parameter server", True),
            ("Other benchmarks", False),
        ):
            rows = [(each.name, each.title) for each in CATALOG.values() if each.compares is compares]
            with formatter.section(title):
                formatter.write_dl(rows + list(EVERY.items()) * compares)
        sections: dict[str, list[tuple[str, str]]] = {}
        for option in self.get_params(ctx)[1:]:  # the first are the names
            if (record := option.get_help_record(ctx)) is not None:
                sections.setdefault(_taken_by(option), []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


def _taken_by(option: click.Parameter) -> str:
    from ringtmp.bench.experiment_registry import CATALOG

    who = [each for each in CATALOG.values() if option.opts[0] in each.options]
    return f"Options of {'comparisons' if any(each.compares for each in who) else _names(who)}" if who else "Options"


def _names(experiments: list[Any]) -> str:
    return " and ".join(each.name for each in experiments)


@click.command(
    "bench", cls=_Bench, no_args_is_help=True, short_help="Run benchmarks: the ring against other strategies."
)
@click.argument("names", nargs=-1, required=True, metavar="NAME… | quick | all")
@click.option(
    "--repeats", type=click.IntRange(1), help="Repeats of every run, interleaved.  [5; quick: 1; plan, choice: 2]"
)
@click.option("--seed", type=int, default=0, show_default=True,
              help="Random seed for weights, batches, the order of runs and intervals.")  # fmt: skip
@click.option("--limit", "limit_s", type=click.FloatRange(1), metavar="S",
              help="Time limit per measurement, in seconds.  [1800; speed: 900; plan, choice: 600]")  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path),
              help="Folder for measurements and the report.  [runs/bench, runs/bench-speed, …]")  # fmt: skip
@click.option("--quick", "small", is_flag=True, help="Small sizes: does everything work? The same as the name quick.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--quiet", is_flag=True, help="No progress.")
@click.option("--devices", "file", type=click.Path(path_type=Path), metavar="FILE.toml",
              help="One [[device]] table each, the master first.  [4 x 0.45 core, 100 Mbit/s]")  # fmt: skip
@click.option("--strategies", metavar="STRATEGY,…",
              help="E.g. ring,ring:staleness=1,ps:ssp:3,ps:bsp:servers=workers:wire=int8.  [the usual ones]")  # fmt: skip
@click.option("--no-isolation", is_flag=True,
              help="Plain processes, not emulated devices: no root, no CPU shares, no memory caps.")  # fmt: skip
@click.option("--listen", default="", metavar="ADDRESS[:PORT]",
              help="Use devices that joined here (ringtmp node), not emulated ones; with --nodes.")  # fmt: skip
@click.option("--nodes", "joined", type=click.IntRange(2), help="With --listen: number of nodes, including this one.")
@click.option("--cases", default="*", show_default=True, metavar="GLOB", help="Cases to run, e.g. 'ring,ps:*'.")
@click.option("--workloads", default="gpt,mlp", show_default=True, help="What is trained.")
@click.option("--settings", default="two,lab-fast,lab-100", show_default=True,
              help="Settings to measure in; lab-… needs root on Linux.")  # fmt: skip
@click.option("--microbatches", metavar="M,M", default="",
              help="Microbatch counts to try for pipelines.  [chosen per workload]")  # fmt: skip
@click.option("--steps", type=click.IntRange(1), default=10, show_default=True, help="Measured steps per repeat.")
@click.option(
    "--warm-up", type=click.IntRange(1), default=2, show_default=True, help="Warm-up steps before the measured ones."
)
@click.option("--beds", default="", metavar="NAME,NAME", help="Rings, or settings, to measure.  [all]")
@click.option("--size", "size_bytes", type=click.IntRange(4, 2**20), default=1024, show_default=True, metavar="BYTES",
              help="Size of a message.")  # fmt: skip
@click.option("--count", type=click.IntRange(1), default=1000, show_default=True, help="Messages of a round.")
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True, help="Rounds of each, in turns.")
def command(
    names: tuple[str, ...], repeats: int | None, seed: int, limit_s: float | None, out: Path | None, small: bool,
    as_json: bool, quiet: bool, file: Path | None, strategies: str | None, no_isolation: bool, listen: str,
    joined: int | None, **others: Any,
) -> None:  # fmt: skip
    """Run benchmarks: any number of experiments, ending in one report with tables, figures and verdicts.

    Every measurement is a file in OUT and is not measured again: interrupt the command at any time, and run it again to
    continue. What fails or cannot run is in the report with its reason, and is tried again the next time.
    """
    from ringtmp.bench import bench_request, experiment_registry, jobs_of_experiments
    from ringtmp.bench.measuring.measurement_files import Store
    from ringtmp.bench.training_runs import strategy_variants
    from ringtmp.launch.device_facts import usable_cores

    wanted, quick = experiment_registry.named((*names, "quick") if small else names)
    _refuse_mixed(listen, joined, file, no_isolation)
    _refuse_foreign(wanted)
    choices = bench_request.Choices(
        names=wanted,
        ways=(strategy_variants.parse_all(strategies) if strategies is not None else bench_request.default_ways(quick)),
        devices=_devices(file),
        isolated=can_emulate() and not listen and not no_isolation,
        repeats=repeats,
        seed=seed,
        quick=quick,
        cores=usable_cores(),
        listen=listen,
        joined=joined or 0,
        **others,
    )
    if choices.comparisons and not (choices.isolated or listen or no_isolation):
        _say_what_isolation_needs(quick)
    jobs_of_experiments.plan(choices)  # whatever cannot be measured is refused before anything is written
    folder = out or Path("runs", "-".join(["bench", *(wanted if not choices.comparisons else ())]))
    store = Store(folder)
    try:
        limit = limit_s or max(experiment_registry.CATALOG[name].limit_s for name in wanted)
        page, results = _measure(choices, store, limit, quiet)
    finally:
        store.close()
    _print(page, results, choices, folder, as_json)


def _measure(choices: Choices, store: Store, limit_s: float, quiet: bool) -> tuple[Page, dict[str, Any]]:
    """Whatever ends it, what was measured becomes a report."""
    from datetime import date

    import msgspec

    from ringtmp.bench import jobs_of_experiments
    from ringtmp.bench.measuring import machine_facts, measure_jobs, progress_bar, run_command
    from ringtmp.bench.measuring.measurement_files import Measured
    from ringtmp.bench.training_runs import learning_rate_sweep

    environment = machine_facts.look()
    measured: list[Measurement] = []
    runs: list[Measurement] = []
    complete = False

    def needless(job: Job, found: Sequence[Measurement]) -> str | None:
        return jobs_of_experiments.needless(choices, job, found)

    def perform(plan: jobs_of_experiments.Plan, found: list[Measurement]) -> None:
        with progress_bar.telling(plan, quiet) as teller:
            for each in measure_jobs.perform(plan, store, environment, limit_s, teller, needless):
                found.append(each)

    try:
        with run_command.interruptible():
            perform(jobs_of_experiments.sweep_plan(choices), measured)
            choices = msgspec.structs.replace(choices, rates=learning_rate_sweep.rates(choices, Measured(measured)))
            perform(jobs_of_experiments.plan(choices), runs)
            complete = True
    except KeyboardInterrupt:
        print(
            f"ringtmp bench: what was measured is in {store.folder}; run the same command again to continue",
            file=sys.stderr,
        )
        raise
    finally:
        measured += runs
        page = jobs_of_experiments.page(
            choices, measured, environment, command=_given(), date=date.today().isoformat(), partial=not complete
        )
        results = jobs_of_experiments.results(choices, Measured(measured))
        _write(page, results, choices, store.folder)
    _refuse_nothing(runs, store.folder)
    return page, results


def _refuse_nothing(runs: list[Measurement], folder: Path) -> None:
    """A page of nothing but errors is no answer."""
    from ringtmp.bench.measuring.run_command import last_line

    if runs and all(each.result is None for each in runs):
        why = last_line(runs[0].error)
        raise RingError(f"nothing could be measured, {why}; {folder}/measurements has every error")


def _write(page: Page, results: dict[str, Any], choices: Choices, out: Path) -> None:
    import msgspec

    from ringtmp.bench import jobs_of_experiments
    from ringtmp.report import page as paper
    from ringtmp.report import page_text
    from ringtmp.system.files import write_atomic

    try:
        repeats = max(jobs_of_experiments.repeats(choices))
        asked = {"page": page, "learning_rates": choices.rates, "repeats": repeats, "seed": choices.seed}
        write_atomic(out / "results.json", msgspec.json.format(msgspec.json.encode(results | asked)) + b"\n")
        write_atomic(out / "results.md", page_text.markdown(page).encode())
        paper.write(page, out)
    except OSError as error:
        print(f"ringtmp bench: the results cannot be written to {out}: {error.strerror}", file=sys.stderr)
    except RingError as error:  # no matplotlib, a full disk: what was measured is kept, and that is what counts
        print(f"ringtmp bench: {error}", file=sys.stderr)


def _print(page: Page, results: dict[str, Any], choices: Choices, out: Path, as_json: bool) -> None:
    from rich.console import Console

    from ringtmp.cli import show_results
    from ringtmp.report import page_text

    if as_json:
        show_results.print_json(results | {"page": page, "out": str(out)})
        return
    # No emoji: rich would make a ring of the end of 'allreduce:ring:'.
    console = Console(width=None if sys.stdout.isatty() else 160, emoji=False)
    # The tables of comparisons are long, and in the report.
    page_text.show(page, console, set(choices.names) - set(choices.comparisons))
    print(f"{out}/report.html, results.md, results.json, measurements/")


def _devices(file: Path | None) -> tuple[Device, ...]:
    from ringtmp.lab import devices_file

    if file is None:
        return ()
    found = devices_file.read(file)
    if len(found) < 2:
        raise UsageError(f"{file} has only one device: a comparison needs at least two")
    return found


def _refuse_mixed(listen: str, joined: int | None, file: Path | None, no_isolation: bool) -> None:
    if bool(listen) != (joined is not None):
        raise UsageError(
            "use --listen and --nodes together: the address devices join, and the number of nodes including this one"
        )
    if listen and (file is not None or no_isolation):
        raise UsageError("with --listen the devices are those that joined: leave out --devices and --no-isolation")


def _refuse_foreign(wanted: tuple[str, ...]) -> None:
    """An option that none of the experiments takes would do nothing."""
    from ringtmp.bench.experiment_registry import CATALOG

    for option in _options_given():
        who = [each for each in CATALOG.values() if option.opts[0] in each.options]
        if who and not any(each.name in wanted for each in who):
            raise UsageError(
                f"{option.opts[0]} is an option of {_names(who)}, and {' and '.join(wanted)} does not take it"
            )


def can_emulate() -> bool:
    return bool(sys.platform == "linux" and os.geteuid() == 0 and shutil.which("ip") and shutil.which("tc"))


def _say_what_isolation_needs(quick: bool) -> None:
    if not quick:
        raise UsageError(
            "the experiments need emulated devices, which need root on Linux, ip and tc: sudo ringtmp bench …, or "
            "use --no-isolation for plain processes; their speeds do not show how such devices would perform"
        )
    print(
        "ringtmp bench: emulated devices need root on Linux, ip and tc; going on with plain processes (--no-isolation), "
        "without what needs a memory cap",
        file=sys.stderr,
    )


def _options_given() -> list[click.Parameter]:
    context = click.get_current_context()
    default = click.core.ParameterSource.DEFAULT
    return [
        each for each in context.command.params
        if each.opts[0].startswith("-") and context.get_parameter_source(str(each.name)) is not default
    ]  # fmt: skip


def _given() -> str:
    """The command as it was given, but for --out: a folder of one machine is no part of how to repeat it."""
    context = click.get_current_context()
    words = ["ringtmp", "bench", *context.params["names"]]
    for option in _options_given():
        if option.name not in ("out", "as_json", "quiet"):
            value = context.params[str(option.name)]
            words += [option.opts[0]] if value is True else [option.opts[0], str(value)]
    return shlex.join(words)
