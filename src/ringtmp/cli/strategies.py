"""ringtmp strategies"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator

import click

from ringtmp.strategies import registry
from ringtmp.strategies.base import About, Strategy


@click.command("strategies", short_help="List the ways to train, with their settings.")
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print the list as one JSON object.")
def command(name: str | None, as_json: bool) -> None:
    """List the ways to train: what is split, who updates, who waits, what travels, and which systems do it this way.

    Use one with ringtmp train --strategy NAME[:SHORT][:setting=value]…, for instance ps:ssp:3:servers=2; SHORT stands for
    the most important setting. Packages may bring strategies of their own.
    """
    chosen = [registry.get(name)] if name is not None else list(registry.every().values())
    for problem in registry.problems() if name is None else ():
        print(f"ringtmp strategies: {problem}", file=sys.stderr)
    if as_json:
        import msgspec

        found = {each.name: _record(each) for each in chosen}
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
        return
    click.echo("\n\n".join("\n".join(_lines(each)) for each in chosen))


def _record(strategy: Strategy) -> dict[str, object]:
    about = {label: getattr(strategy.about, label) for label in About.__struct_fields__}
    settings, package = registry.settings_of(strategy), registry.package_of(strategy.name)
    return {"name": strategy.name, **about, "settings": settings, "short": strategy.short or None, "package": package}


def _lines(strategy: Strategy) -> Iterator[str]:
    width = max(60, min(120, shutil.get_terminal_size().columns))
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


def _wrapped(text: str, indent: int, width: int, hanging: int | None = None) -> list[str]:
    later = " " * (indent + 4 if hanging is None and not indent else hanging or indent)
    return textwrap.wrap(text, width, initial_indent=" " * indent, subsequent_indent=later)
