"""Progress in a notebook: one output that is drawn again and again, a bar with what happened below it.

Drawn with plain HTML, so that it needs no widgets and is still there when the notebook is opened again; as text for whoever
shows no HTML.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape
from typing import Any

from ringtmp.metrics.events import Evaluated, RunEnded, StepDone
from ringtmp.run.progress_text import details, score, smoothed
from ringtmp.run.what_to_train import Watcher
from ringtmp.untrusted import printable

#: Seconds between two drawings, and lines that are kept below the bar.
_EVERY_S = 0.25
_MOST_LINES = 100
_TEXT_WIDTH = 30


class Drawing:
    """What is shown now."""

    def __init__(self) -> None:
        self.done = 0
        self.total: int | None = None
        self.text = "starting"
        self.lines: list[str] = []

    def _repr_html_(self) -> str:
        size = f'value="{self.done}" max="{self.total}"' if self.total else ""
        below = "".join(f"<div>{escape(line)}</div>" for line in self.lines)
        return (
            f'<div style="font-family:monospace"><progress {size} style="width:16em" aria-label="training"></progress> '
            f"{escape(self.text)}{below}</div>"
        )

    def __repr__(self) -> str:
        full = int(_TEXT_WIDTH * self.done / self.total) if self.total else 0
        bar = f"[{'#' * full}{'.' * (_TEXT_WIDTH - full)}] " if self.total else ""
        return "\n".join([bar + self.text, *self.lines])


class NotebookBar(Watcher):
    def __init__(self) -> None:
        from IPython.display import display  # type: ignore[import-not-found, unused-ignore]

        self._drawing = Drawing()
        self._handle: Any = display(self._drawing, display_id=True)
        self._drawn = time.monotonic()
        self._speed = 0.0

    def phase(self, text: str) -> None:
        self._drawing.text = text
        self._draw(now=False)

    def step(self, done: int, total: int | None, event: StepDone, idle: float) -> None:
        self._speed = smoothed(self._speed, event)
        self._drawing.done, self._drawing.total = done, total
        count = f"step {done}{f' of {total}' if total else ''}"
        self._drawing.text = f"epoch {event.epoch + 1}  {count}  {details(event, self._speed, idle)}"
        self._draw(now=False)

    def evaluated(self, event: Evaluated) -> None:
        self._say(f"epoch {event.epoch + 1}  step {event.step}  {score(event)}")

    def warn(self, text: str) -> None:
        self._say(f"warning: {printable(text)}")

    def tell(self, text: str) -> None:
        self._say(printable(text))

    def expect(self, lines: Sequence[str]) -> None:
        for line in lines:
            self._say(printable(line))

    def ended(self, event: RunEnded) -> None:
        self._drawing.text = f"{event.outcome} after step {event.step}"
        self._draw()

    def _say(self, line: str) -> None:
        self._drawing.lines = [*self._drawing.lines, line][-_MOST_LINES:]
        self._draw()

    def _draw(self, now: bool = True) -> None:
        if now or time.monotonic() - self._drawn > _EVERY_S:
            self._drawn = time.monotonic()
            self._handle.update(self._drawing)
