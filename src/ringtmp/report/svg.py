"""One figure on matplotlib axes, by its kind. Small and tall rather than wide: it must be legible on a phone.

Every colour is one of theme.py; strength is opacity, so that it fades towards the ground it stands on, light or dark.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from ringtmp.report.page_content import Figure, Series
from ringtmp.report.theme import LIGHT, cut, in_order, longest, series_colours, short

#: Points: 300 wide is a phone's screen with letters of about 10 pixels.
WIDTH_IN, WIDE_IN, INCH = 300 / 72, 660 / 72, 72.0
_FONT, _SMALL = 8.8, 8.1
_BAR_IN, _ROW_IN = 0.2, 0.3
#: More points on a line are not seen, only carried.
MOST_POINTS = 400
#: So many marks have their text in the figure.
_MARK_TEXTS = 4
_DASHES = ["-", (0, (5, 2)), (0, (1.5, 1.5))]


def paint(figure: Figure, wide: bool) -> Any:
    """A matplotlib Figure. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(WIDE_IN if wide else WIDTH_IN, height_in(figure)), layout="constrained")
    canvas.set_facecolor(LIGHT["ground"])
    canvas.get_layout_engine().set(w_pad=0.03, h_pad=0.04)  # type: ignore[union-attr, call-arg]
    axes = canvas.subplots()
    _ground(axes)
    if figure.kind in ("heat", "map"):
        _cells(axes, figure, wide)
    else:
        {"lines": _lines, "bars": _bars, "stacked": _bars, "gantt": _gantt}[figure.kind](axes, figure)
    _legend(canvas, axes, figure, wide)
    return canvas


def height_in(figure: Figure) -> float:
    names = _legend_names(figure)
    legend = 0.2 * math.ceil(len(names) / _columns(names, False)) if names else 0.0
    if figure.kind == "lines":
        return 2.75 + legend + 0.15 * min(len(figure.marks), _MARK_TEXTS)
    if figure.kind in ("heat", "map"):
        return 0.75 + _ROW_IN * max(1, len(figure.series))
    if figure.kind == "gantt":
        return 0.6 + _ROW_IN * len(_gantt_rows(figure)) + legend
    rows = len(_categories(figure))
    bars = 1 if figure.kind == "stacked" else len(figure.series)
    return 0.7 + legend + rows * max(0.3, _BAR_IN * bars + 0.12)


def is_wide(figure: Figure) -> bool:
    """Better over the whole page where there is room."""
    return figure.kind == "gantt" or (figure.kind in ("heat", "map") and len(_columns_of(figure)) > 7)


# -- kinds --------------------------------------------------------------------------------------------------------------


def _lines(axes: Any, figure: Figure) -> None:
    for place, (series, colour) in enumerate(zip(figure.series, _colours(figure), strict=True)):
        ideal = series.name.lower().startswith("ideal")
        points = thinned(series)
        x = [each[0] for each in points]
        style = (0, (4, 3)) if ideal else _DASHES[min(place // 9, 2)]
        marker = "o" if len(points) <= 16 and not ideal else None
        axes.plot(
            x, [each[1] for each in points], color=LIGHT["muted"] if ideal else colour, linewidth=1.2 if ideal else 1.7,
            linestyle=style, marker=marker, markersize=3.4, zorder=2 if ideal else 3, solid_capstyle="round",
        )  # fmt: skip
        if series.low and series.high:
            axes.fill_between(
                [float(each) for each in series.x],
                series.low,
                series.high,
                color=colour,
                alpha=0.18,
                linewidth=0,
                zorder=2,
            )
    if figure.log_x:
        axes.set_xscale("log")
    if figure.log_y:
        axes.set_yscale("log")
    _numbers(axes.xaxis, figure.log_x, 5)
    _numbers(axes.yaxis, figure.log_y, 5)
    for place, mark in enumerate(figure.marks):
        axes.axvline(mark.x, color=LIGHT["limit"], linewidth=1.1, linestyle=(0, (1.5, 1.5)), zorder=1)
        if place < _MARK_TEXTS:  # above one another, the first on top
            low, high = axes.get_xlim()
            right = mark.x > (low + high) / 2
            up = 3 + 10.5 * (min(len(figure.marks), _MARK_TEXTS) - 1 - place)
            axes.annotate(
                f"{mark.text} ▾" if right else f"▾ {mark.text}", (mark.x, 1), xycoords=("data", "axes fraction"),
                xytext=(3.5 if right else -3.5, up), textcoords="offset points", va="bottom", ha="right" if right else "left",
                fontsize=_SMALL, color=LIGHT["limit"], annotation_clip=False,
            )  # fmt: skip
    if figure.line is not None:
        axes.axhline(figure.line, color=LIGHT["limit"], linewidth=1.1, linestyle=(0, (4, 3)), zorder=2)
        axes.annotate(
            figure.line_label, (1, figure.line), xycoords=("axes fraction", "data"), xytext=(-2, 3),
            textcoords="offset points", ha="right", fontsize=_SMALL, color=LIGHT["limit"],
        )  # fmt: skip
    axes.set_xlabel(figure.x_label, fontsize=_FONT, color=LIGHT["muted"])
    axes.set_ylabel(figure.y_label, fontsize=_FONT, color=LIGHT["muted"])
    axes.margins(x=0.03, y=0.08)
    if figure.from_zero and not figure.log_y:
        axes.set_ylim(bottom=0)


def _bars(axes: Any, figure: Figure) -> None:
    """Lying, so that names can be read; with the value at the end of each."""
    names = _categories(figure)
    stacked = figure.kind == "stacked"
    thick = 0.72 if stacked else 0.8 / max(1, len(figure.series))
    ends = [0.0] * len(names)
    most = max([0.0, *(each for series in figure.series for each in (*series.y, *series.high) if math.isfinite(each))])
    for place, (series, colour) in enumerate(zip(figure.series, _colours(figure), strict=True)):
        for index, (name, value) in enumerate(zip(series.x, series.y, strict=True)):
            if not math.isfinite(value):
                continue
            row = names.index(str(name))
            at = row if stacked else row - 0.4 + thick * (place + 0.5)
            left = ends[row] if stacked else None
            axes.barh(at, value, height=thick * (1 if stacked else 0.9), left=left, color=colour, zorder=3, linewidth=0)
            if stacked:
                ends[row] += value
                continue
            high = value
            if series.low and series.high:
                low, high = series.low[index], max(value, series.high[index])
                axes.errorbar(
                    value, at, xerr=[[max(0.0, value - low)], [max(0.0, high - value)]], color=LIGHT["ink"], linewidth=0.9,
                    capsize=1.8, zorder=4,
                )  # fmt: skip
            _at_end(axes, short(value), high, at)
    if stacked:
        for row, end in enumerate(ends):
            _at_end(axes, short(end), end, row)
        most = max(ends, default=0.0)
    if figure.line is not None:
        axes.axvline(figure.line, color=LIGHT["limit"], linewidth=1.1, linestyle=(0, (4, 3)), zorder=5)
        axes.annotate(
            figure.line_label, (figure.line, 1), xycoords=("data", "axes fraction"), xytext=(0, 2),
            textcoords="offset points", ha="center", va="bottom", fontsize=_SMALL, color=LIGHT["limit"], annotation_clip=False,
        )  # fmt: skip
        most = max(most, figure.line)
    if figure.log_y:
        axes.set_xscale("log")
    elif most > 0:
        axes.set_xlim(0, most * 1.18)
    _numbers(axes.xaxis, figure.log_y, 4)
    axes.set_yticks(range(len(names)), [two_lines(name, 22) for name in names], fontsize=_FONT, color=LIGHT["ink"])
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(figure.y_label, fontsize=_FONT, color=LIGHT["muted"])


def _cells(axes: Any, figure: Figure, wide: bool) -> None:
    from matplotlib.patches import Rectangle

    columns = _columns_of(figure)
    names = [cut(each.name, 34 if wide else 20) for each in figure.series]
    room = ((WIDE_IN if wide else WIDTH_IN) * INCH - 20 - 4.6 * longest(names)) / max(1, len(columns))
    values = [value for series in figure.series for value in series.y if math.isfinite(value)]
    most = max(values, default=0.0)
    widest = max((abs(math.log(value)) for value in values if value > 0), default=0.0)
    for row, series in enumerate(figure.series):
        for column, value in enumerate(series.y):
            colour, strength = "track", 1.0
            if math.isfinite(value) and figure.kind == "map" and value > 0:
                colour = "c4" if value > 1 else "c0"
                strength = 0.06 + 0.86 * abs(math.log(value)) / widest if widest else 0.0
            elif math.isfinite(value) and value > 0:
                colour, strength = "c0", 0.06 + 0.86 * value / most
            axes.add_patch(
                Rectangle((column - 0.48, row - 0.46), 0.96, 0.92, facecolor=LIGHT[colour], alpha=strength, linewidth=0)
            )
            text = _fitting(value, room / 4.9)
            strong = colour != "track" and strength > 0.55
            axes.text(
                column, row, text, ha="center", va="center", fontsize=_SMALL, color=LIGHT["on" if strong else "ink"],
            )  # fmt: skip
    axes.set_xlim(-0.52, len(columns) - 0.48)
    axes.set_ylim(len(figure.series) - 0.5, -0.5)
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    crowded = (longest(columns) + 1.5) * 4.6 > room
    axes.set_xticks(
        range(len(columns)), [cut(each, 14) for each in columns], fontsize=_SMALL, color=LIGHT["ink"],
        rotation=35 if crowded else 0, ha="left" if crowded else "center",
    )  # fmt: skip
    axes.set_yticks(range(len(names)), names, fontsize=_SMALL, color=LIGHT["ink"])
    axes.tick_params(length=0)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.set_xlabel(figure.x_label, fontsize=_SMALL, color=LIGHT["muted"])
    axes.set_ylabel(figure.y_label, fontsize=_SMALL, color=LIGHT["muted"])


def _gantt(axes: Any, figure: Figure) -> None:
    rows = _gantt_rows(figure)
    kinds = _legend_names(figure)
    colours = dict(zip(kinds, [LIGHT[each] for each in series_colours(kinds)], strict=True))
    start = min((span.start_s for span in figure.spans), default=0.0)
    end = max((span.end_s for span in figure.spans), default=1.0)
    factor, unit = (1e3, "ms") if end - start < 2 else (1.0, "s")
    for row, name in enumerate(rows):
        axes.barh(row, (end - start) * factor, height=0.72, color=LIGHT["track"], zorder=1, linewidth=0)
        for kind in kinds:
            spans = [span for span in figure.spans if span.row == name and span.kind == kind]
            axes.broken_barh(
                [((span.start_s - start) * factor, (span.end_s - span.start_s) * factor) for span in spans],
                (row - 0.36, 0.72), facecolors=colours[kind], edgecolor=LIGHT["ground"], linewidth=0.25, zorder=3,
            )  # fmt: skip
    axes.set_yticks(range(len(rows)), [cut(row, 18) for row in rows], fontsize=_FONT, color=LIGHT["ink"])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, max((end - start) * factor, 1e-9))
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    _numbers(axes.xaxis, False, 6)
    axes.set_xlabel(unit, fontsize=_FONT, color=LIGHT["muted"])


# -- parts --------------------------------------------------------------------------------------------------------------


def _ground(axes: Any) -> None:
    axes.set_facecolor("none")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(LIGHT["grid"])
    axes.tick_params(labelsize=_SMALL, color=LIGHT["grid"], labelcolor=LIGHT["muted"], length=3)
    axes.grid(visible=True, color=LIGHT["grid"], linewidth=0.7, zorder=0)
    axes.set_axisbelow(True)


def _numbers(axis: Any, log: bool, most: int) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    axis.set_major_locator(LogLocator(numticks=most + 1) if log else MaxNLocator(most, steps=[1, 2, 2.5, 5, 10]))
    if log:
        axis.set_minor_locator(NullLocator())
        low, high = sorted(axis.get_view_interval())
        if low > 0 and high / low < 20:  # less than two powers of ten have too few ticks
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=most + 1))
    axis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))


def _at_end(axes: Any, text: str, x: float, y: float) -> None:
    axes.annotate(
        text, (x, y), xytext=(3, 0), textcoords="offset points", va="center", fontsize=_SMALL, color=LIGHT["muted"]
    )


def _legend(canvas: Any, axes: Any, figure: Figure, wide: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    names = _legend_names(figure)
    if not names:
        return
    colours = [LIGHT[each] for each in series_colours(names)]
    marks: list[Any] = []
    for name, colour in zip(names, colours, strict=True):
        ideal = name.lower().startswith("ideal")
        if figure.kind == "lines":
            style: Any = (0, (4, 3)) if ideal else "-"
            marks.append(
                Line2D([], [], color=LIGHT["muted"] if ideal else colour, linewidth=2, linestyle=style, label=name)
            )
        else:
            marks.append(Patch(color=colour, label=name, linewidth=0))
    canvas.legend(
        handles=marks, loc="outside upper left", ncols=_columns(names, wide), fontsize=_SMALL, frameon=False,
        labelcolor=LIGHT["ink"], handlelength=1.1, handleheight=0.8, columnspacing=1.1, handletextpad=0.45, borderpad=0,
        labelspacing=0.35,
    )  # fmt: skip


def _legend_names(figure: Figure) -> list[str]:
    if figure.kind in ("heat", "map"):
        return []
    if figure.kind == "gantt":
        return in_order(span.kind for span in figure.spans)
    names = [series.name for series in figure.series]
    return names if len(names) > 1 or (figure.kind == "stacked" and names) else []


def _columns(names: Sequence[str], wide: bool) -> int:
    """As many as fit beside each other; about 4.7 points a letter."""
    room = (WIDE_IN if wide else WIDTH_IN) * INCH
    return max(1, min(len(names), int(room / (26 + 4.7 * longest(names)))))


def _colours(figure: Figure) -> list[str]:
    return [LIGHT[each] for each in series_colours([series.name for series in figure.series])]


def _categories(figure: Figure) -> list[str]:
    return list(dict.fromkeys(_name(each) for series in figure.series for each in series.x))


def _columns_of(figure: Figure) -> list[str]:
    return [_name(each) for each in figure.series[0].x] if figure.series else []


def _fitting(value: float, letters: float) -> str:
    """As exact as there is room for; nothing where there is none."""
    if not math.isfinite(value):
        return ""
    whole = f"{value:.0f}" if value >= 1 else f"{value:.1g}".lstrip("0")
    texts = [text for text in (short(value), f"{value:.2g}", whole) if "e" not in text]
    tiny = f"{value:.0e}".replace("e-0", "e-")
    return next((text for text in (*texts, tiny) if len(text) <= letters), "")


def _gantt_rows(figure: Figure) -> list[str]:
    """The master or the servers first, then by number; names without one stay in their order."""

    def place(row: str) -> tuple[bool, int]:
        numbers = re.findall(r"\d+", row)
        return not row.startswith(("master", "server")), int(numbers[-1]) if numbers else 0

    return sorted(dict.fromkeys(span.row for span in figure.spans), key=place)


def _name(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def two_lines(text: str, most: int) -> str:
    """A long name goes on below, where a part of it begins; what is too long even so is cut."""
    at = max(text.rfind(mark, 0, most + 1) for mark in ":, ") + 1
    if len(text) <= most or not at:
        return cut(text, most)
    return f"{text[:at].rstrip()}\n{cut(text[at:], most)}"


def thinned(series: Series) -> list[tuple[float, float]]:
    """The points to draw: of a long line the lowest and the highest of every stretch, so that no peak is lost."""
    points = [(float(x), y) for x, y in zip(series.x, series.y, strict=True) if math.isfinite(y)]
    if len(points) <= MOST_POINTS:
        return points
    stretch = math.ceil(2 * len(points) / MOST_POINTS)
    kept = [points[0]]
    for start in range(0, len(points), stretch):
        part = points[start : start + stretch]
        low, high = min(part, key=lambda each: each[1]), max(part, key=lambda each: each[1])
        kept += sorted({low, high})
    return [*kept, points[-1]]
