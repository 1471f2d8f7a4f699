"""ringtmp bench NAME…"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ringtmp.errors import RingError, UsageError

if TYPE_CHECKING:
    from ringtmp.bench.measuring.measurement_files import Measurement, Store
    from ringtmp.bench.user_choices import Choices
    from ringtmp.lab.devices_file import Device
    from ringtmp.report.page_content import Page


@click.command("NAME…", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("names", nargs=-1, required=True, metavar="NAME…|quick|all")
@click.option("--devices", "file", type=click.Path(path_type=Path), metavar="FILE.toml",
              help="One [[device]] table each, the master first.  [4 x 0.45 core, 100 Mbit/s]")  # fmt: skip
@click.option("--strategies", metavar="WAY,WAY",
              help="E.g. ring,ring:staleness=1,ps:ssp:3,ps:bsp:servers=workers:wire=int8.  [the usual ones]")  # fmt: skip
@click.option("--repeats", type=click.IntRange(1), help="Of every run, interleaved.  [5; quick: 1]")
@click.option("--seed", type=int, default=0, show_default=True, help="Of weights, batches, order and intervals.")
@click.option("--limit", "limit_s", type=click.FloatRange(1), default=1800.0, show_default=True, metavar="S",
              help="Seconds a measurement may take in all.")  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs/bench"), show_default=True,
              help="Where measurements and the report go.")  # fmt: skip
@click.option("--no-isolation", is_flag=True,
              help="Plain processes, not emulated devices: no root, no CPU shares, no memory caps.")  # fmt: skip
@click.option("--listen", default="", metavar="ADDRESS[:PORT]",
              help="Use devices that joined here (ringtmp node), not emulated ones; with --nodes.")  # fmt: skip
@click.option("--nodes", "joined", type=click.IntRange(2), help="With --listen: how many, this one included.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--quiet", is_flag=True, help="No progress.")
def command(
    names: tuple[str, ...], file: Path | None, strategies: str | None, repeats: int | None, seed: int, limit_s: float,
    out: Path, no_isolation: bool, listen: str, joined: int | None, as_json: bool, quiet: bool,
) -> None:  # fmt: skip
    """The ring against the parameter server: experiments that end in one report with a verdict per aim.

    A measurement is a file in OUT: interrupt it as you like, the same command goes on from there. What fails or cannot
    run is in the report, with its reason.
    """
    from ringtmp.bench import catalogue
    from ringtmp.bench import user_choices as chosen
    from ringtmp.bench.measuring.measurement_files import Store
    from ringtmp.bench.training_runs import strategy_variants
    from ringtmp.launch.device_facts import usable_cores

    _refuse_mixed(listen, joined, file, no_isolation)
    wanted, small = catalogue.named(names)
    choices = chosen.Choices(
        names=wanted,
        ways=strategy_variants.parse_all(strategies) if strategies is not None else chosen.default_ways(small),
        devices=_devices(file),
        isolated=not listen and _isolated(no_isolation, small),
        repeats=repeats or (1 if small else 5),
        seed=seed,
        quick=small,
        cores=usable_cores(),
        listen=listen,
        joined=joined or 0,
    )
    store = Store(out)
    try:
        page = _measure(choices, store, limit_s, quiet, _given())
    finally:
        store.close()
    _print(page, out, as_json)


def _measure(choices: Choices, store: Store, limit_s: float, quiet: bool, given: str) -> Page:
    """Whatever ends it, what was measured becomes a report."""
    import msgspec

    from ringtmp.bench import jobs_and_page
    from ringtmp.bench.measuring import machine, measure_jobs, progress_bar, run_command
    from ringtmp.bench.training_runs import learning_rate_sweep
    from ringtmp.bench.training_runs.train_commands import Measured

    environment = machine.look()
    measured: list[Measurement] = []
    complete = False
    try:
        with run_command.interruptible():
            first = jobs_and_page.sweep_plan(choices)
            with progress_bar.telling(first, quiet) as teller:
                for each in measure_jobs.perform(first, store, environment, limit_s, teller):
                    measured.append(each)
            choices = msgspec.structs.replace(choices, rates=learning_rate_sweep.rates(choices, Measured(measured)))
            plan = jobs_and_page.plan(choices)
            with progress_bar.telling(plan, quiet) as teller:
                for each in measure_jobs.perform(plan, store, environment, limit_s, teller):
                    measured.append(each)
            complete = True
    except KeyboardInterrupt:
        print(
            f"ringtmp bench: what was measured is in {store.folder}; the same command goes on from there",
            file=sys.stderr,
        )
        raise
    finally:
        from datetime import date

        page = jobs_and_page.page(choices, measured, environment, given, date.today().isoformat(), not complete)
        _write(page, choices, store.folder)
    _refuse_nothing(measured[-len(plan) :] if plan else [], store.folder)
    return page


def _refuse_nothing(runs: list[Measurement], folder: Path) -> None:
    """A page of nothing but errors is no answer."""
    if runs and all(each.result is None for each in runs):
        said = [line for line in (runs[0].error or "").splitlines() if line.strip()] or ["nothing was said"]
        raise RingError(f"nothing could be measured, {said[-1].strip()[:300]}; {folder}/measurements has every error")


def _write(page: Page, choices: Choices, out: Path) -> None:
    import msgspec

    from ringtmp.report import page as paper
    from ringtmp.report import page_text
    from ringtmp.system.files import write_atomic

    try:
        results = {"page": page, "learning_rates": choices.rates, "repeats": choices.repeats, "seed": choices.seed}
        write_atomic(out / "results.json", msgspec.json.format(msgspec.json.encode(results)) + b"\n")
        write_atomic(out / "results.md", page_text.markdown(page).encode())
        paper.write(page, out)
    except OSError as error:
        print(f"ringtmp bench: the results cannot be written to {out}: {error.strerror}", file=sys.stderr)
    except RingError as error:  # no matplotlib, a full disk: what was measured is kept, and that is what counts
        print(f"ringtmp bench: {error}", file=sys.stderr)


def _print(page: Page, out: Path, as_json: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    from ringtmp.cli import show

    if as_json:
        show.print_json({"page": page, "out": str(out)})
        return
    console = Console(width=None if sys.stdout.isatty() else 130, emoji=False)
    table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left")
    for name in ("aim", "holds", "in a sentence"):
        table.add_column(name, no_wrap=name == "holds")
    from rich.markup import escape

    for each in page.verdicts:
        table.add_row(escape(each.aim), each.holds, escape(each.sentence))
    console.print(table, highlight=False)
    for section in page.sections:
        for skipped in section.skipped:
            console.print(f"not in it: {section.name}: {escape(skipped.what)}: {escape(skipped.why)}", highlight=False)
    print(f"{out}/report.html, results.md, results.json, measurements/")


def _devices(file: Path | None) -> tuple[Device, ...]:
    from ringtmp.lab import devices_file

    if file is None:
        return ()
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the devices file {file} cannot be read: {error}") from error
    found = devices_file.parse(text, str(file))
    if len(found) < 2:
        raise UsageError(f"{file} has one device; to compare ways to share work there must be two or more")
    return found


def _refuse_mixed(listen: str, joined: int | None, file: Path | None, no_isolation: bool) -> None:
    if bool(listen) != (joined is not None):
        raise UsageError("--listen and --nodes go together: where devices join, and how many there are with this one")
    if listen and (file is not None or no_isolation):
        raise UsageError("with --listen the devices are those that joined: leave out --devices and --no-isolation")


def can_emulate() -> bool:
    return bool(sys.platform == "linux" and os.geteuid() == 0 and shutil.which("ip") and shutil.which("tc"))


def _isolated(no_isolation: bool, small: bool) -> bool:
    if no_isolation:
        return False
    if can_emulate():
        return True
    if small:
        print(
            "ringtmp bench: emulated devices need root on Linux, ip and tc; going on with plain processes (--no-isolation), "
            "without what needs a memory cap",
            file=sys.stderr,
        )
        return False
    raise UsageError(
        "the experiments need emulated devices, which need root on Linux, ip and tc: sudo ringtmp bench …, or "
        "--no-isolation for plain processes, whose speeds say nothing about such devices"
    )


def _given() -> str:
    """The command as it was given, but for --out: a folder of one machine is no part of how to repeat it."""
    import shlex

    context = click.get_current_context()
    words = ["ringtmp", "bench", *context.params["names"]]
    for option in context.command.params:
        name = str(option.name)
        given = context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT
        if given and name not in ("names", "out", "as_json", "quiet"):
            value = context.params[name]
            words += [option.opts[0]] if value is True else [option.opts[0], str(value)]
    return shlex.join(words)
