"""ringtmp strategies"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator

import click

from ringtmp.strategies.registry import ENTRIES, Entry


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
    click.echo("\n\n".join("\n".join(_lines(entry)) for entry in chosen))


def _lines(entry: Entry) -> Iterator[str]:
    width = max(60, min(120, shutil.get_terminal_size().columns))
    yield from _wrapped(f"{entry.name}: {entry.title}", 0, width)
    for label in ("parallelism", "optimisation", "scheduling", "exchange", "topology", "source"):
        yield from _wrapped(f"{label:<14}{getattr(entry, label)}", 2, width, 16)
    for each in entry.settings:
        yield f"  --with {each.name}={each.values}    [{each.default}]"
        yield from _wrapped(each.meaning, 6, width)
        if each.systems:
            yield from _wrapped(each.systems, 6, width)


def _wrapped(text: str, indent: int, width: int, hanging: int | None = None) -> list[str]:
    later = " " * (indent + 4 if hanging is None and not indent else hanging or indent)
    return textwrap.wrap(text, width, initial_indent=" " * indent, subsequent_indent=later)
