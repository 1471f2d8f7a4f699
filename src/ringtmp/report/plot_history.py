"""A run's history as a matplotlib Figure, for a notebook or a file: loss over steps and, beside it, the scores of tests."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from ringtmp.errors import UsageError
from ringtmp.metrics.history import History
from ringtmp.report.figures import require_matplotlib
from ringtmp.report.theme import LIGHT

_SCORES = (("accuracy", "accuracy"), ("bits_per_byte", "bits per byte"), ("perplexity", "perplexity"))


def plot_history(history: History, title: str, path: str | Path | None = None) -> Any:
    require_matplotlib()
    from matplotlib.figure import Figure

    class Shown(Figure):
        """A notebook draws what has this; of other figures it learns only where pyplot was imported."""

        def _repr_png_(self) -> bytes:
            drawn = io.BytesIO()
            self.savefig(drawn, format="png", dpi=100)
            return drawn.getvalue()

    steps = history.steps
    if not steps:
        raise UsageError("the run has done no step, so there is nothing to plot")
    scored = next((pair for pair in _SCORES if any(getattr(row, pair[0]) is not None for row in steps)), None)
    figure = Shown(figsize=(9 if scored else 5, 3.2), layout="constrained")
    axes = figure.subplots(1, 2 if scored else 1, squeeze=False)[0]
    tested = [row for row in steps if row.test_loss is not None]
    axes[0].plot([row.step for row in steps], [row.loss for row in steps], color=LIGHT["c0"], lw=1, label="training")
    if tested:
        values = [row.test_loss for row in tested]
        axes[0].plot([row.step for row in tested], values, color=LIGHT["c1"], marker="o", ms=3, label="test")
    axes[0].set_ylabel("loss")
    axes[0].legend(frameon=False)
    if scored:
        found = [(row.step, getattr(row, scored[0])) for row in steps if getattr(row, scored[0]) is not None]
        axes[1].plot([at for at, _ in found], [value for _, value in found], color=LIGHT["c1"], marker="o", ms=3)
        axes[1].set_ylabel(f"test {scored[1]}")
    for each in axes:
        each.set_xlabel("step")
        each.spines[["top", "right"]].set_visible(False)
        each.grid(alpha=0.3)
    figure.suptitle(title, fontsize=10, color=LIGHT["ink"])
    if path is not None:
        try:
            figure.savefig(path)
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot write the plot to {path}: {error}") from error
    return figure
