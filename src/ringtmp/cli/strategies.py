"""ringtmp strategies"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence

import click

from ringtmp.errors import UsageError
from ringtmp.strategies import published_systems, registry
from ringtmp.strategies.base import About, Strategy
from ringtmp.strategies.published_systems import Row


@click.command("strategies", short_help="List the ways to train and the published systems they stand for.")
@click.argument("name", required=False)
@click.option("--markdown", "as_markdown", is_flag=True, help="Print the table of published systems in Markdown.")
@click.option("--json", "as_json", is_flag=True, help="Print strategies and systems as one JSON object.")
def command(name: str | None, as_markdown: bool, as_json: bool) -> None:
    """List published systems (what is split, who updates, who waits, what travels, who talks to whom) with the setting
    that runs each of them here, and the ways to train; with NAME, one of these with its settings.

    Use one with ringtmp train --strategy NAME[:SHORT][:setting=value]…, for instance ps:ssp:3:servers=2; SHORT stands for
    the most important setting. Packages may bring strategies of their own.
    """
    if as_markdown and as_json:
        raise UsageError("--markdown and --json are two forms of one table: choose one")
    chosen = [registry.get(name)] if name is not None else list(registry.every().values())
    for problem in registry.problems() if name is None else ():
        print(f"ringtmp strategies: {problem}", file=sys.stderr)
    rows = published_systems.all_rows(chosen) if name is None else published_systems.rows_of(chosen[0])
    if as_markdown:
        click.echo(published_systems.markdown(rows), nl=False)
    elif as_json:
        import msgspec

        found = {"strategies": {each.name: _record(each) for each in chosen}, "systems": [_system(row) for row in rows]}
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    elif name is not None:
        click.echo("\n".join(_lines(chosen[0], rows)))
    else:
        _print_systems(rows)
        click.echo("\n".join(_overview(chosen)))


def _record(strategy: Strategy) -> dict[str, object]:
    about = {label: getattr(strategy.about, label) for label in About.__struct_fields__}
    settings, package = registry.settings_of(strategy), registry.package_of(strategy.name)
    return {"name": strategy.name, **about, "settings": settings, "short": strategy.short or None, "package": package}


def _system(row: Row) -> dict[str, object]:
    from msgspec import to_builtins

    runs = [{"command": f"ringtmp train --strategy {each.options}", "not_yet": each.lacks or None} for each in row.runs]
    return {**to_builtins(row.system), "runs": runs}


def _print_systems(rows: Sequence[Row]) -> None:
    """A table; on a terminal that is narrower than its longest words, a list."""
    headings = (*published_systems.COLUMNS[:-1], "--strategy")
    lines = [(*published_systems.cells(row)[:-1], _settings(row)) for row in rows]
    widths = [max(map(len, " ".join(words).split())) for words in list(zip(headings, *lines, strict=True))[:-1]]
    widths.append(
        max(len(each) for line in lines for each in line[-1].splitlines())
    )  # there to be copied: never broken
    room = _terminal_width() - sum(widths) - 3 * len(widths)
    if room < 0:
        click.echo("\n".join(_listed(rows)) + "\n")
    else:
        _print_table(headings, lines, widths, room)
    for row in rows:
        for each in row.runs:
            if each.lacks:
                noted = f" * {row.system.name}, {each.options}: {published_systems.NOT_YET} {each.lacks}"
                click.echo("\n".join(_wrapped(noted, 0, _terminal_width())))
    click.echo()


def _print_table(headings: Sequence[str], lines: Sequence[tuple[str, ...]], widths: Sequence[int], room: int) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column, least in enumerate(widths):  # each set here: rich would narrow the widest first, below its longest word
        wanted = max(len(part) for line in (headings, *lines) for part in line[column].splitlines())
        more = min(room, wanted - least)
        room -= more
        table.add_column(headings[column], width=least + more)
    for line in lines:
        table.add_row(*map(Text, line))
    Console(file=sys.stdout, width=1000, emoji=False, highlight=False).print(table)


def _listed(rows: Sequence[Row]) -> Iterator[str]:
    width = _terminal_width()
    for row in rows:
        name, *what = published_systems.cells(row)[:-1]
        yield from _wrapped(f"{name}: {', '.join(each for each in what if each != '-')}", 0, width)
        for each in _settings(row).splitlines():
            yield "    " + (each if each == published_systems.NOT_YET else f"--strategy {each}")


def _settings(row: Row) -> str:
    return "\n".join(each.options + (" *" if each.lacks else "") for each in row.runs) or published_systems.NOT_YET


def _overview(strategies: Sequence[Strategy]) -> Iterator[str]:
    width = max(len(each.name) for each in strategies)
    for each in strategies:
        yield from _wrapped(f"{each.name:<{width}}  {each.about.title}", 0, _width(), width + 2)
    yield from _wrapped(f"{registry.AUTO.name:<{width}}  {registry.AUTO.about.title}", 0, _width(), width + 2)
    yield "\nringtmp strategies NAME lists the settings of one."


def _lines(strategy: Strategy, rows: Sequence[Row]) -> Iterator[str]:
    width = _width()
    yield from _wrapped(f"{strategy.name}: {strategy.about.title}", 0, width)
    for label in About.__struct_fields__[1:]:
        yield from _wrapped(f"{label:<14}{getattr(strategy.about, label)}", 2, width, 16)
    if strategy.short:
        yield f"  {'short':<14}{strategy.name}:{strategy.short.upper()}"
    if package := registry.package_of(strategy.name):
        yield from _wrapped(f"{'package':<14}{package}", 2, width, 16)
    for each in registry.settings_of(strategy):
        yield f"  --with {each['name']}={each['values']}    [{each['default']}]"
        yield from _wrapped(each["meaning"], 6, width)
        if each["systems"]:
            yield from _wrapped(each["systems"], 6, width)
    for row in rows:
        yield from _wrapped(f"{row.system.name}: {published_systems.cells(row)[-1]}", 2, width, 6)


def _width() -> int:
    return max(60, min(120, shutil.get_terminal_size().columns))


def _terminal_width() -> int:
    """Of what is printed here: a file or a program takes lines of any length."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 1000


def _wrapped(text: str, indent: int, width: int, hanging: int | None = None) -> list[str]:
    later = " " * (indent + 4 if hanging is None and not indent else hanging or indent)
    return textwrap.wrap(text, width, initial_indent=" " * indent, subsequent_indent=later)
