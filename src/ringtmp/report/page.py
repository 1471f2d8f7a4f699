"""A Page as one file: report.html, self-contained, light and dark, on a phone; figures and numbers as files beside it.

Verdicts first, wins and losses alike; then the sections; at the end what it was made with. No script, nothing fetched.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import escape
from importlib import resources
from pathlib import Path

from ringtmp.errors import RingError, UsageError
from ringtmp.report import figures, theme
from ringtmp.report.figures import Drawn
from ringtmp.report.page_content import Figure, Holds, Page, Section, Skipped, Table, Verdict
from ringtmp.system.files import write_atomic

#: Never by colour alone.
_HOLDS: dict[Holds, str] = {"yes": "✓ holds", "no": "✗ does not hold", "mixed": "± mixed", "open": "? open"}
#: A figure's numbers are in the page too, unless they are more than this.
_MOST_ROWS = 60
_LONG_FACT = 44
#: A longer table is folded.
_MOST_OPEN_ROWS = 16


def write(page: Page, folder: Path) -> Path:
    """report.html, figures/*.svg and *.png, data/*.csv. Returns the page's path."""
    figures.require_matplotlib()
    _check(page)
    pictures, numbers = folder / "figures", folder / "data"
    try:
        for each in (pictures, numbers):
            each.mkdir(parents=True, exist_ok=True)
        drawn = {figure.name: figures.draw(figure) for figure in page.figures}
        for figure in page.figures:
            figures.write(figure, drawn[figure.name], pictures, numbers)
        for section in page.sections:
            for place, table in enumerate(section.tables):
                (numbers / f"table-{section.name}-{place + 1}.csv").write_text(
                    figures.table_csv(table), encoding="utf-8"
                )
        path = folder / "report.html"
        write_atomic(path, html(page, drawn).encode())
    except OSError as error:
        raise RingError(f"the report cannot be written to {folder}: {error.strerror or error}") from error
    return path


def html(page: Page, drawn: Mapping[str, Drawn]) -> str:
    """`drawn`: every figure by its name."""
    style = resources.files("ringtmp.report").joinpath("page.css").read_text(encoding="utf-8")
    night = f"@media (prefers-color-scheme: dark) {{ :root {{ {theme.variables(True)} }} }}"
    parts: list[str] = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">',
        f"<title>{escape(page.title)}</title>",
        f"<style>\n:root {{ {theme.variables(False)} }}\n{night}\n{style}</style>\n</head>\n<body>",
        f'<header>\n<h1>{escape(page.title)}</h1>\n<p class="lead">{escape(page.subtitle)}</p>',
        '<p><span class="badge">emulated devices</span></p>' if page.emulated else "",
        _highlights(page.highlights),
        "</header>",
        _nav(page),
        "<main>",
    ]
    if page.verdicts:
        parts.append(f'<section id="verdicts"><h2>Verdicts</h2>\n{_verdicts(page.verdicts)}</section>')
    parts += [_section(section, drawn) for section in page.sections]
    parts.append(f'<section id="facts"><h2>How it was made</h2>\n{_facts(page.facts)}</section>')
    parts.append("</main>\n<footer>Figures lie beside this file in figures/, their numbers in data/.</footer>")
    parts.append("</body>\n</html>\n")
    return "\n".join(part for part in parts if part)


def _check(page: Page) -> None:
    seen: set[str] = set()
    for figure in page.figures:
        if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", figure.name):
            raise UsageError(f"a figure is called {figure.name!r}: use small letters, digits, dots and hyphens")
        if figure.name in seen:
            raise UsageError(f"two figures are called {figure.name!r}: their files would be one")
        seen.add(figure.name)
        for series in figure.series:
            lengths = {len(series.x), len(series.y)} | {len(each) for each in (series.low, series.high) if each}
            if len(lengths) > 1:
                raise UsageError(f"figure {figure.name}, series {series.name!r}: x, y, low and high differ in length")


def _highlights(numbers: tuple[tuple[str, str], ...]) -> str:
    tiles = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in numbers)
    return f'<dl class="tiles">{tiles}</dl>' if tiles else ""


def _nav(page: Page) -> str:
    places = [("verdicts", "Verdicts")] if page.verdicts else []
    places += [(section.name, section.title) for section in page.sections] + [("facts", "How it was made")]
    items = "".join(f'<li><a href="#{escape(name)}">{escape(title)}</a></li>' for name, title in places)
    return f'<nav aria-label="Sections"><ul>{items}</ul></nav>'


def _verdicts(verdicts: tuple[Verdict, ...]) -> str:
    cards = []
    for each in verdicts:
        number = f'<span class="number">{escape(each.number)}</span>' if each.number else ""
        cards.append(
            f'<li class="verdict {each.holds}"><span class="aim"><span>{escape(each.aim)}</span>'
            f'<span class="holds">{_HOLDS[each.holds]}</span></span>{number}<p>{escape(each.sentence)}</p></li>'
        )
    return f'<ul class="verdicts">{"".join(cards)}</ul>'


def _section(section: Section, drawn: Mapping[str, Drawn]) -> str:
    parts = [f'<section id="{escape(section.name)}">\n<h2>{escape(section.title)}</h2>']
    parts += [f"<p>{escape(each.strip())}</p>" for each in section.text.split("\n\n") if each.strip()]
    if section.figures:
        parts.append(
            '<div class="figures">' + "\n".join(_figure(each, drawn[each.name]) for each in section.figures) + "</div>"
        )
    parts += [_table(each) for each in section.tables]
    if section.skipped:
        parts.append(_skipped(section.skipped))
    return "\n".join([*parts, "</section>"])


def _figure(figure: Figure, drawn: Drawn) -> str:
    plot, wide = drawn.for_page
    if wide is not None:
        plot = f'<div class="roomy">{wide}</div><div class="narrow">{plot}</div>'
    said = escape(f"{figure.title}. {figure.caption}".strip(), quote=True)
    parts = [
        f'<figure id="figure-{figure.name}"{" class=wide" if wide is not None else ""}>',
        f'<h3>{escape(figure.title)}</h3>\n<div class="plot" role="img" aria-label="{said}">{plot}</div>',
        f"<figcaption>{escape(figure.caption)}</figcaption>" if figure.caption else "",
    ]
    header, rows = figures.rows_of(figure)
    if 0 < len(rows) <= _MOST_ROWS:
        readable = [tuple(_readable(cell) for cell in row) for row in rows]
        parts.append(f"<details><summary>Numbers</summary>{_grid(header, readable)}</details>")
    return "\n".join(part for part in [*parts, "</figure>"] if part)


def _readable(cell: str) -> str:
    try:
        return theme.short(float(cell)) if cell not in ("", "nan", "inf") else cell
    except ValueError:
        return cell


def _table(table: Table) -> str:
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    title = f"<h3>{escape(table.title)}</h3>\n"
    if not table.rows:
        return f'{title}<p class="note">Nothing was measured.</p>{note}'
    grid = _grid(table.columns, table.rows)
    if len(table.rows) > _MOST_OPEN_ROWS:
        grid = f"<details><summary>{len(table.rows)} rows</summary>{grid}</details>"
    return f"{title}{grid}{note}"


def _grid(columns: tuple[str, ...], rows: tuple[tuple[str, ...], ...] | list[tuple[str, ...]]) -> str:
    """Columns of numbers to the right, columns of words to the left."""
    words = [any(_is_word(row[place]) for row in rows if place < len(row)) for place in range(len(columns))]
    kinds = [' class="words"' if each else "" for each in words]
    head = "".join(f'<th scope="col"{kind}>{escape(each)}</th>' for kind, each in zip(kinds, columns, strict=True))
    body = "".join(
        "<tr>" + "".join(_cell(kind, cell) for kind, cell in zip(kinds, row, strict=True)) + "</tr>" for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )  # fmt: skip


def _cell(kind: str, cell: str) -> str:
    kind = ' class="long"' if len(cell) > _LONG_FACT else kind
    return f"<td{kind}>{escape(cell)}</td>"


def _is_word(cell: str) -> bool:
    return bool(re.match(r"[^\W\d]|\d+-\d", cell))


def _skipped(skipped: tuple[Skipped, ...]) -> str:
    items = "".join(f"<li><b>{escape(each.what)}</b>: {escape(each.why)}</li>" for each in skipped)
    return f'<div class="skipped">Left out<ul>{items}</ul></div>'


def _facts(facts: tuple[tuple[str, str], ...]) -> str:
    rows = "".join(
        f"<div{' class=long' if len(value) > _LONG_FACT else ''}><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in facts
    )
    return f'<dl class="facts">{rows}</dl>'
