"""Who looks on while a run lasts: a progress bar, lines in a notebook, a function of the user's, several at once."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from ringtmp.errors import UsageError
from ringtmp.metrics.events import Evaluated, StepDone
from ringtmp.run.what_to_train import Watcher
from ringtmp.units import count_text
from ringtmp.untrusted import printable

OnStep = Callable[[int, float], Any]
#: Seconds between two lines in a file, and between two states of the line in a notebook.
_LINE_S = 10.0
_NOTEBOOK_S = 0.25
_METHODS = ("phase", "step", "evaluated", "warn", "expect", "tell")


@contextmanager
def watching(progress: bool | None, watcher: Watcher | None, on_step: OnStep | None) -> Iterator[Watcher]:
    """Everyone a run from Python is shown to. `progress` None: on a terminal and in a notebook, unless there is a watcher.
    Where neither is, stderr has what a person must know."""
    several: list[Watcher] = [] if watcher is None else [_checked(watcher)]
    if on_step is not None:
        several.append(Calling(on_step))
    if progress or (progress is None and watcher is None and (in_notebook() or sys.stderr.isatty())):
        with shown() as bar:
            yield Several([*several, bar])
        return
    yield Several(several if watcher is not None else [*several, Telling()])


@contextmanager
def shown() -> Iterator[Bar]:
    """Progress on stderr, as it can show it."""
    if in_notebook():
        bar = Bar(Console(stderr=True, force_jupyter=False, soft_wrap=True), None, overwrites=True)
        try:
            yield bar
        finally:
            bar.clear()
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


class Calling(Watcher):
    """A function of the number of steps done and the loss of the last one."""

    def __init__(self, function: OnStep) -> None:
        if not callable(function):
            raise UsageError(f"on_step is a {type(function).__name__}: give a function of step and loss")
        try:
            inspect.signature(function).bind(1, 0.0)
        except TypeError as error:
            raise UsageError(
                f"on_step must accept the step number and its loss, like lambda step, loss: ...; yours does not ({error})"
            ) from None
        except ValueError:  # a built-in does not say what it takes
            pass
        self._function = function

    def step(self, done: int, total: int | None, event: StepDone, idle: float) -> None:
        self._function(done, event.loss)


class Several(Watcher):
    """Tells everyone, in order."""

    def __init__(self, watchers: Sequence[Watcher]) -> None:
        self.watchers = watchers
        for name in _METHODS:
            setattr(self, name, partial(self._each, name))

    def _each(self, name: str, *said: Any) -> None:
        for watcher in self.watchers:
            getattr(watcher, name)(*said)


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
    """A progress bar with loss, speed, idle share and time left; plain lines where stderr is no terminal, of which a
    notebook shows the last one only."""

    def __init__(self, console: Console, progress: Progress | None, overwrites: bool = False) -> None:
        self._console = console
        self._overwrites = overwrites
        self._width = 0  # of the line that is shown and will be overwritten
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
        speed = event.samples / max(event.wall_s, 1e-9)
        self._speed = speed if not self._speed else 0.9 * self._speed + 0.1 * speed
        details = f"loss {event.loss:.4f}  {count_text(self._speed)} samples/s  idle {idle:.0%}"
        if event.unprotected:
            details += "  unprotected"
        if self._progress is not None and self._task is not None:
            self._progress.update(
                self._task, description=f"epoch {event.epoch + 1}", completed=done, total=total, details=details
            )
        else:
            self._now_and_then(f"step {done}{f' of {total}' if total else ''}  {details}")

    def _now_and_then(self, text: str) -> None:
        """Where stderr is no terminal: not every step or phase a line."""
        if time.monotonic() - self._last_line > (_NOTEBOOK_S if self._overwrites else _LINE_S):
            self._last_line = time.monotonic()
            self._line(text)

    def _line(self, text: str) -> None:
        if not self._overwrites:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)
            return
        self._console.file.write("\r" + text.ljust(self._width))
        self._console.file.flush()
        self._width = len(text)

    def clear(self) -> None:
        """What comes next has the line for itself."""
        if self._width:
            self._console.file.write("\r" + " " * self._width + "\r")
            self._width = 0

    def evaluated(self, event: Evaluated) -> None:
        self.clear()
        self._console.print(f"epoch {event.epoch + 1}  step {event.step}  {_score(event)}", highlight=False)

    def warn(self, text: str) -> None:
        self.clear()
        self._console.print(f"warning: {printable(text)}", style="yellow", highlight=False, markup=False)

    def expect(self, lines: Sequence[str]) -> None:
        self.clear()
        for line in lines:
            self._console.print(printable(line), highlight=False, markup=False, soft_wrap=True)

    def tell(self, text: str) -> None:
        self.clear()
        self._console.print(printable(text), highlight=False, markup=False, soft_wrap=True)


def _score(event: Evaluated) -> str:
    parts = [f"test loss {event.loss:.4f}"]
    if event.bits_per_byte is not None:
        parts.append(f"{event.bits_per_byte:.3f} bits per byte")
    if event.perplexity is not None:
        parts.append(f"perplexity {event.perplexity:.4g}")
    if event.bits_per_byte is None and event.accuracy is not None:
        parts.append(f"accuracy {event.accuracy:.1%}")
    return "  ".join(parts)
