"""Rows become tables: on a terminal, and as a page in Markdown with the command and the date. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table

from ringtmp.bench.experiments.speed import Row
from ringtmp.bench.measuring.machine import Environment
from ringtmp.bench.training_runs.device_setups import SETTINGS
from ringtmp.bench.training_runs.speed_cases import ALONE

HEADER = (
    "case",
    "microbatches",
    "ms per step",
    "95 % interval",
    "x ideal",
    "x one device",
    "own limit",
    "x limit",
    "stage",
    "simulated",
    "idle",
    "x best peer",
    "stolen",
)
#: What others may use of the machine before its figures need a warning.
QUIET = 0.1
LEGEND = (
    "ideal: max(c, T), with T one process, one thread, whole batch, divided by all cores, and c one cut's activations over "
    "the link. One device: the step of one such device alone over this one; above 1 is faster. Own limit: max(c, T) for "
    "what this case computes on and sends through its busiest device. Stage, simulated: the ring's own forecast before its "
    "first step, of the slowest stage alone and of the whole step with fill and drain. Idle: of the time of all that "
    "compute, without warm-up. Best peer: the fastest of torch's own in the same setting; below 1 is faster. Stolen: CPU "
    "time the machine's host gave to others, the worst repeat."
)


@dataclass(frozen=True)
class Section:
    """One workload in one setting."""

    title: str
    base: str
    lines: tuple[tuple[str, ...], ...]
    failures: tuple[str, ...]


def sections(rows: Sequence[Row]) -> list[Section]:
    alone = {row.workload: row for row in rows if row.setting == ALONE.name}
    found = []
    for (workload, setting), group in groupby(rows, key=lambda row: (row.workload, row.setting)):
        if setting == ALONE.name:
            continue
        members = list(group)
        one = alone.get(workload)
        parts = [f"one process {_ms(one.step_s.middle)} ms" if one and one.step_s else "one process: not measured"]
        if members[0].ideal_s is not None:
            parts.append(f"ideal {_ms(members[0].ideal_s)} ms")
        if members[0].best_peer is not None:
            parts.append(f"best peer {members[0].best_peer}")
        busy = max(row.busy_before for row in members)
        if busy > QUIET:
            parts.append(f"NOT A QUIET MACHINE: others used up to {busy:.0%} of it just before a measurement")
        found.append(
            Section(
                f"{workload}, {SETTINGS[setting].text}",
                "; ".join(parts),
                tuple(_line(row) for row in members if row.step_s),
                tuple(f"{row.case}: {_reason(row.error)}" for row in members if row.error),
            )
        )
    # A failed base leaves every ratio empty: say why once.
    found += [
        Section(f"{row.workload}, one process", "not measured", (), (f"{row.case}: {_reason(row.error)}",))
        for row in alone.values()
        if row.error
    ]
    return found


def render(rows: Sequence[Row]) -> RenderableType:
    parts: list[RenderableType] = []
    for section in sections(rows):
        table = Table(box=None, pad_edge=False, header_style="bold", title=section.title, title_justify="left")
        table.caption, table.caption_justify = section.base, "left"
        for index, name in enumerate(HEADER):
            table.add_column(name, justify="left" if index == 0 else "right", no_wrap=index == 0)
        for line in section.lines:
            table.add_row(*map(escape, line))
        parts += [table, *(f"[red]failed[/red] {escape(each)}" for each in section.failures), ""]
    return Group(*parts)


def show(rows: Sequence[Row], console: Console) -> None:
    console.print(render(rows), highlight=False)


def markdown(rows: Sequence[Row], environment: Environment, command: str, date: str, repeats: int, note: str) -> str:
    lines = [
        "# Speed", "", f"`{command}`, {date}. {environment.cpu}, {environment.cores} cores; torch {environment.torch}, "
        f"Python {environment.python}, ringtmp {environment.ringtmp}. {repeats} interleaved repeats; medians, with bootstrap "
        "intervals of 95 %.", "",
    ]  # fmt: skip
    if note:
        lines += [f"**{note}**", ""]
    lines += [LEGEND, ""]
    for section in sections(rows):
        lines += [f"## {section.title}", "", f"{section.base}.", ""]
        if section.lines:
            lines += [_row(HEADER), _row(["---", *["---:"] * (len(HEADER) - 1)]), *map(_row, section.lines), ""]
        lines += [f"- failed: {each}" for each in section.failures]
        lines += [""] if section.failures else []
    return "\n".join(lines).rstrip() + "\n"


def _line(row: Row) -> tuple[str, ...]:
    assert row.step_s is not None
    best = row.over_best_peer
    return (
        row.case + (f" ({row.failed} failed)" if row.failed else ""),
        str(row.microbatches),
        _ms(row.step_s.middle),
        f"{_ms(row.step_s.low)}–{_ms(row.step_s.high)}",
        _ratio(row.over_ideal),
        _ratio(row.speed_up),
        _ms(row.limit_s) if row.limit_s is not None else "",
        _ratio(row.over_limit),
        _ms(row.stage_s) if row.stage_s is not None else "",
        _ms(row.simulated_s) if row.simulated_s is not None else "",
        f"{row.idle_share:.1%}" if row.idle_share is not None else "",
        f"{best.middle:.2f} ({best.low:.2f}–{best.high:.2f})" if best else "",
        f"{row.stolen_share:.1%}",
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.1f}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _reason(error: str | None) -> str:
    lines = [line.strip() for line in (error or "").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "nothing was said"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
