"""A page as Markdown, for documentation: verdicts, tables, what was left out. Figures are files beside it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ringtmp.report.page_content import Page, Table

#: Longer tables are in data/*.csv alone.
MOST_ROWS = 24


def markdown(page: Page) -> str:
    lines = [f"# {page.title}", "", page.subtitle, "", *(f"- {name}: {text}" for name, text in page.facts), ""]
    lines += ["## Verdicts", "", _row(("aim", "holds", "in a sentence")), _row(["---"] * 3)]
    lines += [_row((each.aim, each.holds, each.sentence)) for each in page.verdicts]
    for section in page.sections:
        lines += ["", f"## {section.title}", "", section.text]
        for table in section.tables:
            lines += _table(table)
        if section.skipped:
            lines += ["", "Left out:", "", *(f"- {each.what}: {each.why}" for each in section.skipped)]
    return "\n".join(lines).rstrip() + "\n"


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
