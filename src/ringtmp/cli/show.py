"""What people see: progress on stderr, results on stdout."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from ringtmp.metrics.events import Evaluated, StepDone
from ringtmp.metrics.summary import NodeSummary, Summary
from ringtmp.units import bytes_text, count_text, seconds_text
from ringtmp.untrusted import printable

_EXACTNESS = {
    "bits": "exact to the bits",
    "replay": "the same bits every time, those of one process to rounding",
    "steps": "the same batches as one process, other rounding",
}


class Bar:
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
        elif time.monotonic() - self._last_line > 10:
            self._last_line = time.monotonic()
            self._console.print(f"step {done}{f' of {total}' if total else ''}  {details}")

    def evaluated(self, event: Evaluated) -> None:
        self._console.print(f"epoch {event.epoch + 1}  step {event.step}  {_score(event)}", highlight=False)

    def warn(self, text: str) -> None:
        self._console.print(f"warning: {printable(text)}", style="yellow", highlight=False, markup=False)

    def expect(self, lines: Sequence[str]) -> None:
        for line in lines:
            self._console.print(printable(line), highlight=False, markup=False, soft_wrap=True)

    def tell(self, text: str) -> None:
        self._console.print(printable(text), highlight=False, markup=False, soft_wrap=True)


class Quiet:
    """Warnings alone."""

    def phase(self, text: str) -> None: ...
    def step(self, done: int, total: int | None, event: StepDone, idle: float) -> None: ...
    def evaluated(self, event: Evaluated) -> None: ...

    def warn(self, text: str) -> None:
        print(f"warning: {printable(text)}", file=sys.stderr)

    def expect(self, lines: Sequence[str]) -> None: ...

    def tell(self, text: str) -> None:
        print(printable(text), file=sys.stderr, flush=True)


@contextmanager
def watcher(quiet: bool) -> Iterator[Any]:
    if quiet:
        yield Quiet()
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


def print_json(value: Any) -> None:
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")


def print_summary(summary: Summary, stream: IO[str]) -> None:
    console = Console(file=stream, width=None if stream.isatty() else 110)
    speed = f", {summary.samples_per_s:.0f} samples/s" if summary.samples_per_s else ""
    score = ""
    if summary.accuracy is not None:
        score = f", test accuracy {summary.accuracy:.1%}"
    if summary.bits_per_byte is not None:
        score = f", {summary.bits_per_byte:.3f} bits per byte"
    loss = f"loss {summary.loss.last:.4f}" if summary.loss.last is not None else "no step"
    console.print(
        f"[bold]{summary.outcome}[/bold]: {summary.model} on {summary.data}, {summary.steps} steps in "
        f"{seconds_text(summary.wall_s)}{speed}: {loss}{score}",
        highlight=False,
    )
    if summary.emulated:
        slowed = (
            f", CPUs and links slowed to {summary.lab_scale:.3g} of what was asked" if summary.lab_scale != 1 else ""
        )
        console.print(f"on emulated devices{slowed}", highlight=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title, justify in (
        ("node", "left"), ("layers", "left"), ("parameters", "right"), ("busy", "right"), ("idle", "right"),
        ("waits most for", "left"), ("sent", "right"), ("received", "right"), ("peak memory", "right"),
    ):  # fmt: skip
        table.add_column(title, justify=justify)  # type: ignore[arg-type]
    for node in summary.per_node:
        table.add_row(*_row(node))
    console.print(table)
    console.print(
        f"weights {summary.weights_sha256} ({_EXACTNESS[summary.exactness]})", highlight=False, soft_wrap=True
    )
    console.print(f"run {summary.run_dir}", highlight=False, soft_wrap=True)


def _row(node: NodeSummary) -> list[str]:
    cause = max(node.idle_causes, key=lambda each: node.idle_causes[each]) if node.idle_causes else ""
    return [
        "master" if node.node == 0 else f"node {node.node}",
        "\n".join(node.segments),
        count_text(node.params),
        seconds_text(node.busy_s),
        f"{node.idle_fraction:.0%}",
        escape(cause),
        bytes_text(node.bytes_sent),
        bytes_text(node.bytes_received),
        bytes_text(node.peak_rss_bytes) if node.peak_rss_bytes else "",
    ]


def _score(event: Evaluated) -> str:
    parts = [f"test loss {event.loss:.4f}"]
    if event.bits_per_byte is not None:
        parts.append(f"{event.bits_per_byte:.3f} bits per byte")
    elif event.accuracy is not None:
        parts.append(f"accuracy {event.accuracy:.1%}")
    return "  ".join(parts)
