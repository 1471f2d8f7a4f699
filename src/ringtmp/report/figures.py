"""Figures as files and as parts of a page: SVG, light and dark, PNG, and the numbers as CSV.

Needs matplotlib, which comes with the extra `plots`.
"""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path
from typing import Any

import msgspec

from ringtmp.errors import UsageError
from ringtmp.report import theme
from ringtmp.report.page_content import Figure, Table
from ringtmp.report.svg import is_wide, paint

MISSING = "no figures: matplotlib is not installed (pip install 'ringtmp[plots]')"
_FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'DejaVu Sans', sans-serif"
_PNG_DPI = 200


class Drawn(msgspec.Struct, frozen=True):
    """A figure as SVG text in light colours. `wide` is another drawing of it, where there is room for one."""

    narrow: str
    wide: str | None
    png: bytes  # of the wide one, where there is one

    @property
    def for_page(self) -> tuple[str, str | None]:
        """Narrow and wide, in the colours of the page they are put into."""
        return _for_page(self.narrow), _for_page(self.wide) if self.wide is not None else None


def require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError(MISSING) from None


def draw(figure: Figure) -> Drawn:
    picture = io.BytesIO()
    narrow = _svg(figure, False, None if is_wide(figure) else picture)
    wide = _svg(figure, True, picture) if is_wide(figure) else None
    return Drawn(narrow, wide, picture.getvalue())


def write(figure: Figure, drawn: Drawn, pictures: Path, numbers: Path) -> None:
    """NAME.svg, NAME-dark.svg, NAME.png and NAME.csv."""
    svg = drawn.wide or drawn.narrow
    (pictures / f"{figure.name}.svg").write_text(svg, encoding="utf-8")
    (pictures / f"{figure.name}-dark.svg").write_text(theme.dark(svg), encoding="utf-8")
    (pictures / f"{figure.name}.png").write_bytes(drawn.png)
    (numbers / f"{figure.name}.csv").write_text(figure_csv(figure), encoding="utf-8")


def rows_of(figure: Figure) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """A figure's numbers as a header and rows."""
    if figure.kind == "gantt":
        header: tuple[str, ...] = ("row", "kind", "start_s", "end_s")
        return header, [(each.row, each.kind, repr(each.start_s), repr(each.end_s)) for each in figure.spans]
    interval = any(series.low for series in figure.series)
    header = ("series", figure.x_label or "x", figure.y_label or "y", *(("low", "high") if interval else ()))
    rows = []
    for series in figure.series:
        for index, (x, y) in enumerate(zip(series.x, series.y, strict=True)):
            ends: tuple[str, ...] = ()
            if interval:
                ends = (repr(series.low[index]), repr(series.high[index])) if series.low else ("", "")
            rows.append((series.name, x if isinstance(x, str) else f"{x:.17g}", repr(y), *ends))
    return header, rows


def figure_csv(figure: Figure) -> str:
    header, rows = rows_of(figure)
    return _csv(header, rows)


def table_csv(table: Table) -> str:
    return _csv(table.columns, table.rows)


def _csv(header: Any, rows: Any) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()


def _settings(salt: str) -> Any:
    import matplotlib

    # Letters stay letters: searchable, and in the reader's own font. The salt keeps names apart in one page.
    return matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt, "font.family": ["DejaVu Sans"]})


def _svg(figure: Figure, wide: bool, png: io.BytesIO | None) -> str:
    text = io.StringIO()
    with _settings(f"{figure.name}-{wide}"):
        canvas = paint(figure, wide)
        canvas.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Title": figure.title})
        if png is not None:
            canvas.set_layout_engine("none")  # it stands where it is
            canvas.savefig(png, format="png", dpi=_PNG_DPI)
    # In the reader's font; names that nothing refers to would be there twice in a page of many figures.
    svg = re.sub(r"font-family: [^;\"]*", f"font-family: {_FONTS}", text.getvalue())
    used = set(re.findall(r"(?:url\(#|href=\"#)([\w-]+)", svg))
    return re.sub(r' id="([\w.-]+)"', lambda found: found[0] if found[1] in used else "", svg)


def _for_page(svg: str) -> str:
    """Without what only a file of its own needs, as wide as its place."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r"\n\s*", "\n", svg)
    return theme.variable(svg.replace(theme.LIGHT["ground"], "none", 1))
