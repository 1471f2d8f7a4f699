"""ringtmp strategies"""

from __future__ import annotations

import sys

import click

from ringtmp.strategies.catalog import ENTRIES, Entry


@click.command("strategies", short_help="List the ways to train, with their settings.")
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print the list as one JSON object.")
def command(name: str | None, as_json: bool) -> None:
    """List the ways to train: what is split, who updates, who waits, what travels, and which systems did it so.

    Use one with ringtmp train --strategy NAME --with setting=value; short names such as ps:ssp:3 or allreduce:tree
    stand for the most important setting.
    """
    from ringtmp.errors import unknown

    if name is not None and name not in ENTRIES:
        raise unknown("strategy", name, ENTRIES)
    chosen = [ENTRIES[name]] if name is not None else list(ENTRIES.values())
    if as_json:
        import msgspec

        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode({each.name: each for each in chosen})) + b"\n")
        return
    from rich.console import Console

    console = Console(soft_wrap=False, highlight=False)
    for entry in chosen:
        _show(console, entry)


def _show(console: object, entry: Entry) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    assert isinstance(console, Console)
    console.print(f"[bold]{entry.name}[/bold]  {escape(entry.title)}")
    facts = Table.grid(padding=(0, 2))
    for label in ("parallelism", "optimisation", "scheduling", "exchange", "topology", "source"):
        facts.add_row(f"  {label}", escape(getattr(entry, label)))
    console.print(facts)
    if entry.settings:
        table = Table(box=None, padding=(0, 2), pad_edge=True)
        for column in ("  setting", "values", "default", "meaning", "systems"):
            table.add_column(column)
        for each in entry.settings:
            table.add_row(
                f"  {each.name}", escape(each.values), each.default, escape(each.meaning), escape(each.systems)
            )
        console.print(table)
    console.print()
