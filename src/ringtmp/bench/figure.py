"""One picture of a bench: a panel per workload and setting, a bar per case with its interval, the ideal as a line.

Needs matplotlib, which comes with the extra `plots`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ringtmp.bench.cases import ALONE
from ringtmp.bench.experiments.ways import RING
from ringtmp.bench.settings import SETTINGS
from ringtmp.bench.speed import Row

MISSING = "no figure: matplotlib is not installed (pip install 'ringtmp[plots]')"
#: Three hues that stay apart for colour-blind eyes (Okabe and Ito 2008): the ring, our other strategies, peers.
_RING, _OURS, _PEER, _IDEAL = "#0072B2", "#56B4E9", "#B0B0B0", "#D55E00"
_BAR_INCHES, _PANEL_INCHES = 0.3, 4.6


def draw(rows: Sequence[Row], folder: Path, note: str) -> list[Path]:
    """Writes speed.svg and speed.png. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure  # no pyplot: no display, no state left behind

    panels: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.setting != ALONE.name and row.step_s is not None:
            panels.setdefault((row.workload, row.setting), []).append(row)
    if not panels:
        return []
    works = list(dict.fromkeys(work for work, _ in panels))
    settings = list(dict.fromkeys(setting for _, setting in panels))
    tallest = max(map(len, panels.values()))
    height = len(works) * (tallest * _BAR_INCHES + 1.1) + 0.5
    figure = Figure(figsize=(0.6 + _PANEL_INCHES * len(settings), height), layout="constrained")
    grid = figure.subplots(len(works), len(settings), squeeze=False)
    for down, work in enumerate(works):
        for across, setting in enumerate(settings):
            members = panels.get((work, setting))
            if members is None:
                grid[down][across].set_axis_off()
            else:
                _panel(grid[down][across], members)
    _legend(figure, columns=2 if len(settings) == 1 else 4)
    if note:
        figure.supxlabel(note, x=0.01, horizontalalignment="left", fontsize=8, color="#555555")
    paths = [folder / "speed.svg", folder / "speed.png"]
    for path in paths:
        figure.savefig(path, dpi=150)
    return paths


def _panel(axes: Any, rows: Sequence[Row]) -> None:
    for place, row in enumerate(rows):
        assert row.step_s is not None
        middle, low, high = (each * 1e3 for each in (row.step_s.middle, row.step_s.low, row.step_s.high))
        colour = _PEER if row.group == "peer" else _RING if row.case.startswith(RING) else _OURS
        axes.barh(place, middle, color=colour, height=0.72)
        whiskers = [[max(0.0, middle - low)], [max(0.0, high - middle)]]
        axes.errorbar(middle, place, xerr=whiskers, color="#333333", linewidth=1, capsize=2)
        axes.annotate(
            f"{middle:.0f}" if middle >= 100 else f"{middle:.1f}",
            (max(middle, high), place), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8,
        )  # fmt: skip
    if rows[0].ideal_s is not None:
        axes.axvline(rows[0].ideal_s * 1e3, color=_IDEAL, linewidth=1.2, linestyle="--")
    axes.set_yticks(range(len(rows)), [row.case for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_title(f"{rows[0].workload}: {SETTINGS[rows[0].setting].text}", fontsize=9, loc="left")
    axes.set_xlabel("ms per step", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.tick_params(axis="y", length=0)
    axes.margins(x=0.16, y=0.02)
    axes.locator_params(axis="x", nbins=5)  # more run into each other once they have five digits
    axes.set_xlim(left=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _legend(figure: Any, columns: int) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    marks = [
        Patch(color=_RING, label=RING),
        Patch(color=_OURS, label="parameter server, all-reduce (RingTMP)"),
        Patch(color=_PEER, label="torch on Gloo"),
        Line2D([], [], color=_IDEAL, linestyle="--", label="ideal: max(c, T)"),
    ]
    figure.legend(handles=marks, loc="outside upper left", ncols=columns, fontsize=8, frameon=False)
