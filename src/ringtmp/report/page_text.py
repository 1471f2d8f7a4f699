"""A page as text: as Markdown, for documentation, and on a terminal. Figures are files beside it."""

from __future__ import annotations

from collections.abc import Container, Sequence

import rich.table
from rich.console import Console
from rich.markup import escape

from ringtmp.report.page_content import Page, Table

#: Longer tables are in data/*.csv alone.
MOST_ROWS = 24
VERDICT_COLUMNS = ("aim", "holds", "in a sentence")


def markdown(page: Page) -> str:
    lines = [f"# {page.title}", "", page.subtitle, "", *(f"- {name}: {text}" for name, text in page.facts), ""]
    if page.verdicts:
        rows = [(each.aim, each.holds, each.sentence) for each in page.verdicts]
        lines += ["## Verdicts", "", _row(VERDICT_COLUMNS), _row(["---"] * 3), *map(_row, rows)]
    for section in page.sections:
        lines += ["", f"## {section.title}", "", section.text]
        for table in section.tables:
            lines += _table(table)
        if section.skipped:
            lines += ["", "Left out:", "", *(f"- {each.what}: {each.why}" for each in section.skipped)]
    return "\n".join(lines).rstrip() + "\n"


def show(page: Page, console: Console, tables_of: Container[str]) -> None:
    """Verdicts, the tables of the named sections, and what was left out."""
    if page.verdicts:
        _print(console, VERDICT_COLUMNS, [(each.aim, each.holds, each.sentence) for each in page.verdicts])
    for table in [table for section in page.sections if section.name in tables_of for table in section.tables]:
        console.print(f"\n[italic]{escape(table.title)}[/italic]", highlight=False)
        _print(console, table.columns, table.rows, numbers=True)
        if table.note:
            console.print(escape(table.note), style="dim", highlight=False)
    for section in page.sections:
        for left in section.skipped:
            console.print(f"left out: {section.name}: {escape(left.what)}: {escape(left.why)}", highlight=False)


def _print(console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]], numbers: bool = False) -> None:
    made = rich.table.Table(box=None, pad_edge=False, header_style="bold")
    for place, name in enumerate(columns):
        made.add_column(name, justify="right" if numbers and place else "left", no_wrap=name == "holds")
    for row in rows:
        made.add_row(*map(escape, row))
    console.print(made, highlight=False)


def _table(table: Table) -> list[str]:
    if not table.rows:
        return []
    if len(table.rows) > MOST_ROWS:
        return ["", f"**{table.title}**: {len(table.rows)} rows, see data/."]
    found = [
        "",
        f"**{table.title}**",
        "",
        _row(table.columns),
        _row(["---"] * len(table.columns)),
        *map(_row, table.rows),
    ]
    return [*found, "", table.note] if table.note else found


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
