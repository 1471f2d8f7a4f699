"""One step as SVG text, without matplotlib: a row per node, a bar per piece of work, in the report's colours.

For `ringtmp plan --svg`, which needs no extra. Every bar has a title that browsers show on hover.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Protocol

from ringtmp.report.theme import LIGHT, cut, in_order, series_colours
from ringtmp.units import seconds_text

_WIDTH, _ROW, _BAR, _TOP, _LEFT, _RIGHT, _BOTTOM = 1200, 34, 24, 64, 120, 90, 46
#: A number needs this much room.
_NUMBER_PX = 15
MOST_ROWS = 64


class Row(Protocol):
    @property
    def device(self) -> str: ...
    @property
    def idle_fraction(self) -> float: ...


class Bar(Protocol):
    """`microbatch` below 0: it is of none."""

    @property
    def node(self) -> int: ...
    @property
    def kind(self) -> str: ...
    @property
    def visit(self) -> int: ...
    @property
    def microbatch(self) -> int: ...
    @property
    def start_s(self) -> float: ...
    @property
    def end_s(self) -> float: ...


def svg(rows: Sequence[Row], bars: Sequence[Bar], step_s: float, title: str) -> str:
    """The first `MOST_ROWS` rows; `bars[i].node` is the number of its row."""
    shown = rows[:MOST_ROWS]
    length = max([step_s, *(bar.end_s for bar in bars)])
    scale = (_WIDTH - _LEFT - _RIGHT) / length
    height = _TOP + _ROW * len(shown) + _BOTTOM
    kinds = in_order(bar.kind for bar in bars)
    colours = dict(zip(kinds, (LIGHT[name] for name in series_colours(kinds)), strict=True))
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="{LIGHT["ink"]}">',
        f'<rect width="{_WIDTH}" height="{height}" fill="{LIGHT["ground"]}"/>',
        _text(16, 26, title, 'font-size="16" font-weight="600"'),
        *_legend({**colours, "waiting": LIGHT["track"]}),
        *_axis(length, scale, len(shown)),
    ]
    for index, row in enumerate(shown):
        y = _TOP + _ROW * index
        out.append(f'<rect x="{_LEFT}" y="{y}" width="{length * scale:.1f}" height="{_BAR}" fill="{LIGHT["track"]}"/>')
        out.append(_text(_LEFT - 10, y + 16, cut(row.device, 15), 'text-anchor="end"'))
        out.append(_text(_WIDTH - _RIGHT + 10, y + 16, f"idle {row.idle_fraction:.0%}", _MUTED))
    # Two visits of one node share its row: the deeper one is drawn a little lower, so both are seen.
    visits = {node: {bar.visit for bar in bars if bar.node == node} for node in range(len(shown))}
    for bar in bars:
        if bar.node in visits:
            several = len(visits[bar.node]) > 1
            lower = 7 if several and bar.visit == max(visits[bar.node]) else 0
            about = f"{rows[bar.node].device}: {_label(bar)}, {seconds_text(bar.end_s - bar.start_s)}"
            y, high = _TOP + _ROW * bar.node + lower, _BAR - 7 if several else _BAR
            out += _bar(bar, about, colours[bar.kind], scale=scale, y=y, high=high)
    if len(rows) > MOST_ROWS:
        out.append(_text(16, height - 8, f"{len(rows) - MOST_ROWS} more nodes not drawn", _MUTED))
    return "\n".join([*out, "</svg>\n"])


def _label(bar: Bar) -> str:
    return f"{bar.kind} {bar.microbatch}" if bar.microbatch >= 0 else bar.kind


def _bar(bar: Bar, about: str, colour: str, *, scale: float, y: int, high: int) -> list[str]:
    x, wide = _LEFT + bar.start_s * scale, (bar.end_s - bar.start_s) * scale
    number = bar.microbatch >= 0 and wide >= _NUMBER_PX
    return [
        f'<g><title>{escape(about)}</title><rect x="{x:.2f}" y="{y}" width="{max(wide, 0.4):.2f}" height="{high}" '
        f'fill="{colour}" stroke="{LIGHT["ground"]}" stroke-width="{0.8 if wide > 4 else 0}"/>',
        *([_text(x + wide / 2, y + high / 2 + 4, str(bar.microbatch), f'{_MIDDLE} font-size="11"')] if number else []),
        "</g>",
    ]


_MUTED, _MIDDLE = f'fill="{LIGHT["muted"]}"', 'text-anchor="middle"'


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text x="{x:.1f}" y="{y:g}" {style}>{escape(text)}</text>'


def _legend(colours: dict[str, str]) -> list[str]:
    out, x = [], _LEFT
    for kind, colour in colours.items():
        out.append(f'<rect x="{x}" y="40" width="12" height="12" fill="{colour}"/>')
        out.append(_text(x + 17, 50, kind, _MUTED))
        x += 30 + 7 * len(kind)
    return out


def _axis(length: float, scale: float, rows: int) -> list[str]:
    out, low = [], _TOP + _ROW * rows
    for index in range(tick_count(length) + 1):
        at = index * tick_s(length)
        x = _LEFT + at * scale
        out.append(f'<line x1="{x:.1f}" y1="{_TOP - 4}" x2="{x:.1f}" y2="{low}" stroke="{LIGHT["grid"]}"/>')
        text = f"{at * 1e6:g} us" if length < 1e-3 else f"{at * 1e3:g} ms" if length < 2 else f"{at:g} s"
        out.append(_text(x, low + 16, text, f"{_MUTED} {_MIDDLE}"))
    return out


def tick_s(length: float) -> float:
    """1, 2 or 5 times a power of ten, so that 4 to 10 of them make the length."""
    steps = (factor * 10.0**power for power in range(-9, 300) for factor in (1, 2, 5))
    return next(each for each in steps if length / each <= 10)


def tick_count(length: float) -> int:
    return int(length / tick_s(length) + 1e-9)
