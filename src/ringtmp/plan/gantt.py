"""A simulated step as a picture: one row per node, one bar per piece of work, as SVG text.

Pure: spans in, text out. Light and dark viewers both show it on its own pale ground; colours are told apart by
colour-blind eyes, and every bar has a title that browsers show on hover.
"""

from __future__ import annotations

from html import escape

from ringtmp.plan.simulation import Simulated
from ringtmp.units import seconds_text

#: Okabe and Ito's palette.
COLOURS = {
    "forward": "#56b4e9",
    "backward": "#e69f00",
    "weights": "#d55e00",
    "update": "#009e73",
    "compute": "#56b4e9",
    "reduce": "#cc79a7",
    "send": "#999999",
    "receive": "#bbbbbb",
}
_ROW, _BAR, _TOP, _LEFT, _RIGHT, _BOTTOM = 34, 24, 64, 120, 90, 46
#: A number needs this much room.
_NUMBER_PX = 15
MOST_ROWS = 64


def svg(result: Simulated, title: str, width: int = 1200, notes: dict[int, str] | None = None) -> str:
    """`notes`: a few words to the right of a node's row."""
    nodes = list(range(min(len(result.nodes), MOST_ROWS)))
    length = max([result.step_s, *(span.end_s for span in result.spans)])
    scale = (width - _LEFT - _RIGHT) / length
    height = _TOP + _ROW * len(nodes) + _BOTTOM
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#222">',
        f'<rect width="{width}" height="{height}" fill="#fcfcfa"/>',
        f'<text x="16" y="26" font-size="16" font-weight="600">{escape(title)}</text>',
        *_legend(result, width),
        *_axis(length, scale, height, len(nodes)),
    ]
    for node in nodes:
        y = _TOP + _ROW * node
        step = result.nodes[node]
        out.append(f'<rect x="{_LEFT}" y="{y}" width="{length * scale:.1f}" height="{_BAR}" fill="#eeeeea"/>')
        out.append(f'<text x="{_LEFT - 10}" y="{y + 16}" text-anchor="end">{escape(_short(step.device))}</text>')
        note = (notes or {}).get(node, f"idle {step.idle_fraction:.0%}")
        out.append(f'<text x="{width - _RIGHT + 10}" y="{y + 16}" fill="#666">{escape(note)}</text>')
    # Two visits of one node share its row: the deeper one is drawn a little lower, so both are seen.
    deepest = {node: max((span.visit for span in result.spans if span.node == node), default=0) for node in nodes}
    first = {node: min((span.visit for span in result.spans if span.node == node), default=0) for node in nodes}
    for span in result.spans:
        if span.node not in deepest:
            continue
        x, wide = _LEFT + span.start_s * scale, (span.end_s - span.start_s) * scale
        y = _TOP + _ROW * span.node
        high = _BAR
        if deepest[span.node] != first[span.node]:
            high = _BAR - 7
            y += 7 if span.visit == deepest[span.node] else 0
        colour = COLOURS.get(span.kind, "#999999")
        label = f"{span.kind} {span.microbatch}" if span.microbatch >= 0 else span.kind
        about = f"{result.nodes[span.node].device}: {label}, {seconds_text(span.end_s - span.start_s)}"
        out.append(
            f'<g><title>{escape(about)}</title><rect x="{x:.2f}" y="{y}" width="{max(wide, 0.4):.2f}" height="{high}" '
            f'fill="{colour}" stroke="#fcfcfa" stroke-width="{0.8 if wide > 4 else 0}"/>'
        )
        if span.microbatch >= 0 and wide >= _NUMBER_PX:
            out.append(
                f'<text x="{x + wide / 2:.1f}" y="{y + high / 2 + 4:.1f}" text-anchor="middle" font-size="11">'
                f"{span.microbatch}</text>"
            )
        out.append("</g>")
    if len(result.nodes) > MOST_ROWS:
        out.append(
            f'<text x="16" y="{height - 8}" fill="#666">{len(result.nodes) - MOST_ROWS} more nodes not drawn</text>'
        )
    out.append("</svg>\n")
    return "\n".join(out)


def _legend(result: Simulated, width: int) -> list[str]:
    kinds = [kind for kind in COLOURS if any(span.kind == kind for span in result.spans)]
    out, x = [], _LEFT
    for kind in [*kinds, "waiting"]:
        colour = COLOURS.get(kind, "#eeeeea")
        out.append(f'<rect x="{x}" y="40" width="12" height="12" fill="{colour}" stroke="#ccc" stroke-width="0.5"/>')
        out.append(f'<text x="{x + 17}" y="50" fill="#444">{kind}</text>')
        x += 30 + 7 * len(kind)
    return out


def _axis(length: float, scale: float, height: int, rows: int) -> list[str]:
    out = []
    for index in range(tick_count(length) + 1):
        at = index * tick_s(length)
        x, low = _LEFT + at * scale, _TOP + _ROW * rows
        out.append(f'<line x1="{x:.1f}" y1="{_TOP - 4}" x2="{x:.1f}" y2="{low}" stroke="#d8d8d2" stroke-width="1"/>')
        out.append(f'<text x="{x:.1f}" y="{low + 16}" text-anchor="middle" fill="#666">{_tick_text(at, length)}</text>')
    return out


def tick_s(length: float) -> float:
    """1, 2 or 5 times a power of ten, so that 4 to 10 of them make the length."""
    power = 1e-9
    while True:
        for factor in (1, 2, 5):
            if length / (factor * power) <= 10:
                return factor * power
        power *= 10


def tick_count(length: float) -> int:
    return int(length / tick_s(length) + 1e-9)


def _tick_text(at: float, length: float) -> str:
    if length < 1e-3:
        return f"{at * 1e6:g} us"
    return f"{at * 1e3:g} ms" if length < 2 else f"{at:g} s"


def _short(name: str) -> str:
    return name if len(name) <= 15 else f"{name[:14]}…"
