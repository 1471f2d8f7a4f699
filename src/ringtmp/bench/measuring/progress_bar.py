"""How far a bench is, on stderr: a bar with the time left, or a line per measurement where there is no terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from ringtmp.bench.measuring.jobs import Job, time_left_s
from ringtmp.bench.measuring.measurement_files import Measurement
from ringtmp.bench.measuring.run_command import last_line
from ringtmp.units import seconds_text


class Teller:
    """One line for everything that was measured; what was known from before is only counted."""

    def __init__(self, plan: Sequence[tuple[int, Job]], console: Console, progress: Progress | None) -> None:
        self._waiting = [job.name for _, job in plan]
        self._total = len(plan)
        self._reused = 0
        self._took_s: dict[str, list[float]] = {}
        self._console = console
        self._progress = progress
        self._task = progress.add_task("", total=self._total, left="") if progress else None

    def begin(self, repeat: int, job: Job) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, description=f"{job.name}, repeat {repeat + 1}", left=self._left())

    def done(self, measurement: Measurement, reused: bool) -> None:
        name = self._waiting.pop(0)
        # Known ones count for the time left, too: their repeats to come take as long.
        self._took_s.setdefault(name, []).append(measurement.wall_s)
        if reused:
            self._reused += 1
        else:
            self._line(measurement)
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, advance=1, left=self._left())

    def left_out(self, job: Job, why: str) -> None:
        self._waiting.pop(0)
        self._console.print(f"{job.name}: left out, {escape(why)}", highlight=False, soft_wrap=True)
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, advance=1, left=self._left())

    def end(self) -> None:
        if self._reused:
            self._console.print(f"{self._reused} of {self._total} were already measured", highlight=False)

    def _line(self, measurement: Measurement) -> None:
        count = self._total - len(self._waiting)
        if measurement.result is not None:
            steps = sorted(measurement.result.step_s)
            # What a program of ours found may be a size, or a message's way, and no step.
            step = measurement.job.output != "told"
            said = (
                f"{seconds_text(steps[len(steps) // 2])} a step" if step else f"took {seconds_text(measurement.wall_s)}"
            )
        else:
            said = f"[red]{measurement.outcome}[/red]: {escape(last_line(measurement.error, 200))}"
        place = f"{count}/{self._total}  {measurement.job.name}, repeat {measurement.repeat + 1}"
        left = f"  ({self._left()})" if self._progress is None and self._waiting else ""
        self._console.print(f"{place}: {said}{left}", highlight=False, soft_wrap=True)

    def _left(self) -> str:
        seconds = time_left_s(self._took_s, self._waiting)
        return f"about {seconds_text(seconds)} left" if seconds is not None else ""


@contextmanager
def telling(plan: Sequence[tuple[int, Job]], quiet: bool) -> Iterator[Teller]:
    console = Console(stderr=True, quiet=quiet, emoji=False)
    if quiet or not console.is_terminal:
        yield (teller := Teller(plan, console, None))
    else:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
        )
        with Progress(*columns, console=console, transient=True) as progress:
            yield (teller := Teller(plan, console, progress))
    teller.end()
