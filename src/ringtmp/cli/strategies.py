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
        _print_table(rows)
        click.echo("\n".join(_overview(chosen)))


def _record(strategy: Strategy) -> dict[str, object]:
    about = {label: getattr(strategy.about, label) for label in About.__struct_fields__}
    settings, package = registry.settings_of(strategy), registry.package_of(strategy.name)
    return {"name": strategy.name, **about, "settings": settings, "short": strategy.short or None, "package": package}


def _system(row: Row) -> dict[str, object]:
    from msgspec import to_builtins

    runs = [{"command": f"ringtmp train --strategy {each.options}", "not_yet": each.lacks or None} for each in row.runs]
    return {**to_builtins(row.system), "runs": runs}


def _print_table(rows: Sequence[Row]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    headings = (*published_systems.COLUMNS[:-1], "--strategy")
    lines = [(*published_systems.cells(row)[:-1], _settings(row)) for row in rows]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column, heading in enumerate(headings):  # no word is cut, however narrow the terminal
        table.add_column(
            heading, min_width=max(len(word) for line in (headings, *lines) for word in line[column].split())
        )
    for line in lines:
        table.add_row(*map(Text, line))
    least = sum(column.min_width or 0 for column in table.columns) + 3 * len(headings)
    width = max(least, shutil.get_terminal_size().columns)
    Console(file=sys.stdout, width=width, emoji=False, highlight=False).print(table)
    for row in rows:
        for each in row.runs:
            if each.lacks:
                click.echo(f" * {row.system.name}, {each.options}: {published_systems.NOT_YET} {each.lacks}")
    click.echo()


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


def _wrapped(text: str, indent: int, width: int, hanging: int | None = None) -> list[str]:
    later = " " * (indent + 4 if hanging is None and not indent else hanging or indent)
    return textwrap.wrap(text, width, initial_indent=" " * indent, subsequent_indent=later)
