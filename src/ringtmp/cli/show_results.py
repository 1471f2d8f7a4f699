"""What people see: progress on stderr, results on stdout."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ringtmp.metrics.summary import USUAL_MODE, NodeSummary, Summary
from ringtmp.metrics.test_then_train_error import Predicted
from ringtmp.run.progress import Several, Telling, shown
from ringtmp.run.what_to_train import Watcher
from ringtmp.units import bytes_text, count_text, rate_text, seconds_text

_EXACTNESS = {
    "bits": "exact to the bits",
    "replay": "the same bits every time, equal to one process up to rounding",
    "steps": "the same batches as one process, rounded differently",
    "stream": "the order of batches cannot be reproduced",
}
#: The same, where more than rounding differs.
_DRIFTING = {
    "replay": "the same bits every time, trained in another way than by one process",
    "steps": "the same batches as one process, trained in another way",
}


_CHECKED = {
    "model": "each kind of layer and the whole model",
    "layers": "each kind of layer",
    "evaluation": "the whole model in evaluation; its gradients do not fit into the master's memory",
}


@contextmanager
def watcher(quiet: bool, others: Sequence[Watcher] = ()) -> Iterator[Watcher]:
    """`others` are told too."""
    if quiet:
        yield Several([*others, Telling()])
        return
    with shown() as bar:
        yield Several([*others, bar])


def print_json(value: Any) -> None:
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")


def print_summary(summary: Summary, stream: IO[str]) -> None:
    console = Console(file=stream, width=None if stream.isatty() else 110)
    speed = f", {rate_text(summary.samples_per_s)} samples/s within steps" if summary.samples_per_s else ""
    score = f", test loss {summary.test_loss:.4f}" if summary.test_loss is not None else ""
    if summary.accuracy is not None:
        score = f", test accuracy {summary.accuracy:.1%}"
    if summary.bits_per_byte is not None:
        score = f", {summary.bits_per_byte:.3f} bits per byte"
    if summary.perplexity is not None:
        score += f", perplexity {summary.perplexity:.4g}"
    loss = f"loss {summary.loss.last:.4f}" if summary.loss.last is not None else "no step"
    console.print(
        f"[bold]{summary.outcome}[/bold]: {summary.model} on {summary.data}, {summary.steps} steps in "
        f"{seconds_text(summary.wall_s)}{speed}: {loss}{score}",
        highlight=False,
        soft_wrap=True,
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
    if summary.forecast is not None and summary.forecast.left_out_text:
        console.print(summary.forecast.left_out_text, highlight=False, markup=False, soft_wrap=True)
    if summary.strategy_chosen:
        console.print(summary.strategy_chosen, highlight=False, markup=False, soft_wrap=True)
    mode = "" if summary.numeric_mode == USUAL_MODE else f"; numeric mode {summary.numeric_mode}"
    said = (_EXACTNESS | _DRIFTING if summary.drifts else _EXACTNESS)[summary.exactness]
    console.print(f"weights {summary.weights_sha256} ({said}{mode})", highlight=False, soft_wrap=True)
    if summary.predicted is not None:
        console.print(_predicted(summary.predicted), highlight=False)
    if summary.bad_lines:
        lines = "1 line of the stream was no sample and was" if summary.bad_lines == 1 else ""
        lines = lines or f"{summary.bad_lines} lines of the stream were no samples and were"
        console.print(f"{lines} left out", highlight=False)
    if summary.skipped_samples:
        console.print(f"{summary.skipped_samples} samples of the stream were skipped after a loss", highlight=False)
    if summary.checked in _CHECKED:
        console.print(f"checked against eager PyTorch before the start: {_CHECKED[summary.checked]}", highlight=False)
    console.print(f"run {summary.run_dir}", highlight=False, soft_wrap=True)


def _predicted(found: Predicted) -> str:
    last = found.over_time[-1]
    text = f"predicted before learned: {found.samples} samples, loss {found.loss:.4f}"
    text += f", in the last {last.samples} {last.loss:.4f}"
    if found.accuracy is None or last.accuracy is None:
        return text
    return f"{text}; {1 - found.accuracy:.1%} wrong, in the last {last.samples} {1 - last.accuracy:.1%}"


def _row(node: NodeSummary) -> list[str]:
    cause = max(node.idle_causes, key=lambda each: node.idle_causes[each]) if node.idle_causes else ""
    return [
        node.name,
        "\n".join(node.segments),
        count_text(node.params),
        seconds_text(node.busy_s),
        f"{node.idle_fraction:.0%}",
        escape(cause),
        bytes_text(node.bytes_sent),
        bytes_text(node.bytes_received),
        bytes_text(node.peak_rss_bytes) if node.peak_rss_bytes else "",
    ]
