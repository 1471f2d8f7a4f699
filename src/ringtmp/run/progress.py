"""Who looks on while a run lasts: a progress bar, a notebook, functions of the user's, several at once."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from ringtmp.errors import UsageError
from ringtmp.metrics.events import Evaluated, StepDone
from ringtmp.run.notebook_bar import NotebookBar
from ringtmp.run.progress_text import details, score, smoothed
from ringtmp.run.what_to_train import Watcher
from ringtmp.untrusted import printable
from ringtmp.watchers.functions import Calling, Functions

#: Seconds between two lines in a file.
_LINE_S = 10.0
#: A watcher of the user's has the first; the others came later, and one that lacks them is not told.
_METHODS = ("phase", "step", "evaluated", "warn", "expect", "tell")
_LATER = ("started", "recovered", "ended")


@contextmanager
def watching(
    progress: bool | None, watcher: Watcher | Sequence[Watcher] | None, functions: Functions
) -> Iterator[Watcher]:
    """Everyone a run from Python is shown to. `progress` None: on a terminal and in a notebook, unless there is a watcher that
    does more than keep a log. Where neither is, stderr has what a person must know."""
    given = () if watcher is None else watcher if isinstance(watcher, list | tuple) else (watcher,)
    several = [_checked(each) for each in given]
    shows = any(not getattr(each, "only_logs", False) for each in several)
    if functions.checked().any:
        several.append(Calling(functions))
    if progress or (progress is None and not shows and (in_notebook() or sys.stderr.isatty())):
        with shown() as bar:
            yield Several([*several, bar])
        return
    yield Several(several if shows else [*several, Telling()])


@contextmanager
def shown() -> Iterator[Watcher]:
    """Progress on stderr, as it can show it, or in the notebook."""
    if in_notebook():
        yield NotebookBar()
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        yield Bar(console, None)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[details]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield Bar(console, progress)


def in_notebook() -> bool:
    """Jupyter and what is like it: an IPython with a kernel, which shows what is written although it is no terminal."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    return getattr(shell, "kernel", None) is not None


class Telling(Watcher):
    """Says on stderr what a person must know: the line to run on each device, who came, warnings."""

    def tell(self, text: str) -> None:
        print(printable(text), file=sys.stderr, flush=True)

    def warn(self, text: str) -> None:
        print(f"warning: {printable(text)}", file=sys.stderr, flush=True)


class Several(Watcher):
    """Tells everyone, in order."""

    def __init__(self, watchers: Sequence[Watcher]) -> None:
        self.watchers = watchers
        for name in (*_METHODS, *_LATER):
            setattr(self, name, partial(self._each, name))

    def _each(self, name: str, *said: Any) -> None:
        for watcher in self.watchers:
            if (method := getattr(watcher, name, None)) is not None:
                method(*said)


def _checked(watcher: Any) -> Watcher:
    """Something with all the methods does as well as a subclass."""
    if isinstance(watcher, type):
        raise UsageError(f"watcher is the class {watcher.__name__}: pass an instance, {watcher.__name__}()")
    missing = [name for name in _METHODS if not callable(getattr(watcher, name, None))]
    if missing:
        raise UsageError(
            f"a {type(watcher).__name__} is not a watcher: it lacks {', '.join(missing)}. Subclass "
            "ringtmp.Watcher, whose methods do nothing, or pass a function of step and loss as on_step"
        )
    found: Watcher = watcher
    return found


class Bar(Watcher):
    """A progress bar with loss, speed, idle share and time left; plain lines where stderr is no terminal."""

    def __init__(self, console: Console, progress: Progress | None) -> None:
        self._console = console
        self._progress = progress
        self._task = progress.add_task("starting", total=None, details="") if progress else None
        self._speed = 0.0
        self._last_line = time.monotonic()

    def phase(self, text: str) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, description=text)
        else:
            self._now_and_then(text)

    def step(self, done: int, total: int | None, event: StepDone, idle: float) -> None:
        self._speed = smoothed(self._speed, event)
        text = details(event, self._speed, idle)
        if self._progress is not None and self._task is not None:
            self._progress.update(
                self._task, description=f"epoch {event.epoch + 1}", completed=done, total=total, details=text
            )
        else:
            self._now_and_then(f"step {done}{f' of {total}' if total else ''}  {text}")

    def _now_and_then(self, text: str) -> None:
        """Where stderr is no terminal: not every step or phase a line."""
        if time.monotonic() - self._last_line > _LINE_S:
            self._last_line = time.monotonic()
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def evaluated(self, event: Evaluated) -> None:
        self._console.print(f"epoch {event.epoch + 1}  step {event.step}  {score(event)}", highlight=False)

    def warn(self, text: str) -> None:
        self._console.print(f"warning: {printable(text)}", style="yellow", highlight=False, markup=False)

    def expect(self, lines: Sequence[str]) -> None:
        for line in lines:
            self._console.print(printable(line), highlight=False, markup=False, soft_wrap=True)

    def tell(self, text: str) -> None:
        self._console.print(printable(text), highlight=False, markup=False, soft_wrap=True)
