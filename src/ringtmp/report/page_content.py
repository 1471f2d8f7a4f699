"""What a report shows, as pure data: whoever measured fills a Page, `page.py` and `figures.py` draw it.

The values of a Series by kind of Figure:

    lines     x numbers, y numbers; low and high, where given, are drawn as a band around the line
    bars      x names, y numbers; series stand side by side; low and high are drawn as whiskers
    stacked   as bars, but series stand on top of each other
    heat      one series per row of cells, x the names of the columns (the same in every row), y the values
    map       as heat; values are ratios, coloured by their logarithm around 1
    gantt     no series: `spans`, one row per node; the x axis says its own unit
"""

from __future__ import annotations

from typing import Literal

import msgspec

Kind = Literal["lines", "bars", "stacked", "heat", "gantt", "map"]
Holds = Literal["yes", "no", "mixed", "open"]


class Series(msgspec.Struct, frozen=True):
    """One line, one colour of bars, or one row of cells. A value that is not there is nan."""

    name: str
    x: tuple[float | str, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()


class Span(msgspec.Struct, frozen=True):
    row: str
    kind: str
    start_s: float
    end_s: float


class Mark(msgspec.Struct, frozen=True):
    """Something that happened at a place of the x axis of lines."""

    x: float
    text: str


class Figure(msgspec.Struct, frozen=True):
    """`name` is a slug, unique in its page: it becomes the name of files."""

    name: str
    title: str
    kind: Kind
    x_label: str = ""
    y_label: str = ""
    series: tuple[Series, ...] = ()
    spans: tuple[Span, ...] = ()
    marks: tuple[Mark, ...] = ()
    log_x: bool = False
    log_y: bool = False
    #: Lines whose values begin at nothing: speeds, shares. Bars always do.
    from_zero: bool = False
    #: What it shows in a sentence; a reader who cannot see the figure gets the title and this.
    caption: str = ""
    #: A limit, a target, an ideal: across the values.
    line: float | None = None
    line_label: str = ""


class Table(msgspec.Struct, frozen=True):
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


class Verdict(msgspec.Struct, frozen=True):
    """One aim, whether it holds, in one sentence with its number and interval."""

    aim: str
    sentence: str
    holds: Holds
    number: str = ""


class Skipped(msgspec.Struct, frozen=True):
    what: str
    why: str


class Section(msgspec.Struct, frozen=True):
    """`text`: paragraphs, an empty line between them."""

    name: str
    title: str
    text: str = ""
    verdicts: tuple[Verdict, ...] = ()
    figures: tuple[Figure, ...] = ()
    tables: tuple[Table, ...] = ()
    skipped: tuple[Skipped, ...] = ()


class Page(msgspec.Struct, frozen=True):
    title: str
    subtitle: str
    facts: tuple[tuple[str, str], ...]
    emulated: bool
    sections: tuple[Section, ...]
    #: A few numbers to see first: what, how much.
    highlights: tuple[tuple[str, str], ...] = ()

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        return tuple(verdict for section in self.sections for verdict in section.verdicts)

    @property
    def figures(self) -> tuple[Figure, ...]:
        return tuple(figure for section in self.sections for figure in section.figures)
