"""The page's twin in a terminal: a row for each node with its busy share, the loss, what happened last.

Where there is no terminal it prints a line now and then, and one for whatever happens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ringtmp.dashboard.decimated_history import IDLE
from ringtmp.dashboard.messages_to_browser import Member, Membership, News
from ringtmp.dashboard.run_view import RunView
from ringtmp.plan.node_groups import shape_text
from ringtmp.units import bytes_text, rate_text, seconds_text
from ringtmp.untrusted import printable

LOOK_S, LINE_S = 0.5, 10.0
LOSSES, HAPPENED = 48, 5
#: A terminal of so many columns is wide. How wide the bar, a name and what is held may be there, and in a narrower one.
WIDE, BAR, NAME, HELD = 112, (24, 8), (34, 16), (28, 14)
LOST = ("lost; its place is being taken", "lost")
_LEVELS = "▁▂▃▄▅▆▇█"
#: The ring goes on for as long as it is one of these.
GOING = ("waiting", "reading", "running", "healing")


def watch(run: Path, stream: IO[str], sleep: Callable[[float], None] = time.sleep) -> None:
    """Until the run has ended, or Ctrl-C."""
    console, view = Console(file=stream), RunView(run)
    if not console.is_terminal:
        _lines(view, console, sleep)
        return
    with Live(console=console, auto_refresh=False) as live:
        while True:
            more = view.look()
            told = view.everything()
            live.update(drawing(told, console.width), refresh=True)
            if told.status not in GOING:
                return
            sleep(0.05 if more else LOOK_S)


def _lines(view: RunView, console: Console, sleep: Callable[[float], None]) -> None:
    told, said_at = 0, -LINE_S
    while True:
        more = view.look()
        news = view.everything()
        entries = news.log.rows if news.log is not None else []
        for entry in entries[told:]:
            console.print(
                printable(f"{seconds_text(entry.at_s)}  {entry.text}"), markup=False, highlight=False, soft_wrap=True
            )
        told = len(entries)
        over = news.status not in GOING
        if not more and (over or time.monotonic() - said_at > LINE_S):
            said_at = time.monotonic()
            console.print(headline(news), markup=False, highlight=False, soft_wrap=True)
        if over:
            return
        sleep(0.05 if more else LOOK_S)


def headline(news: News) -> str:
    parts = [news.status]
    if news.memberships and news.memberships[-1].groups:
        there = news.memberships[-1]
        parts.append(f"{len(there.members)} nodes as {shape_text([len(each) for each in there.groups])}")
    if news.now is not None:
        parts.append(f"step {news.now.step}{f' of {news.total_steps}' if news.total_steps else ''}")
        parts.append(f"loss {news.now.loss:.4f}")
    if news.tests is not None and news.tests.rows and news.tests.rows[-1].accuracy is not None:
        parts.append(f"accuracy {news.tests.rows[-1].accuracy:.1%}")
    if news.summary is not None and news.summary.samples_per_s:
        parts.append(f"{rate_text(news.summary.samples_per_s)} samples/s")
    return "  ".join(parts)


def drawing(news: News, columns: int) -> Group:
    """The whole picture, as rich draws it in a terminal of so many columns."""
    narrow = columns < WIDE
    full = BAR[narrow]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title, justify in (("node", "left"), ("holds", "left"), ("", "left"), ("busy", "right"), ("waits most for", "left"),
                           ("sends", "right"), ("memory", "right")):  # fmt: skip
        table.add_column(title, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    shares = _shares(news)
    out = {each.node for each in news.outages if each.to_s is None}
    for bracket, member in _rows(news.memberships[-1]) if news.memberships else ():
        name, held = Text(bracket + printable(member.name)), Text(printable(", ".join(member.segments)))
        name.truncate(NAME[narrow], overflow="ellipsis")
        held.truncate(HELD[narrow], overflow="ellipsis")
        if member.node in out:
            name.stylize("red")
            table.add_row(name, held, Text(LOST[narrow], "red"))
            continue
        work, sent, rss = shares.get(member.node, ({}, 0, 0))
        total = sum(work.values())
        idle = {kind.removeprefix(IDLE): seconds for kind, seconds in work.items() if kind.startswith(IDLE)}
        busy = 1 - sum(idle.values()) / total if total else 0.0
        bar = Text("█" * round(full * busy), "blue") + Text("░" * (full - round(full * busy)), "bright_black")
        table.add_row(
            name, held, bar, f"{busy:.0%}" if total else "",
            Text(printable(max(idle, key=lambda each: idle[each]))) if idle else "",
            f"{bytes_text(sent / total)}/s" if total else "", bytes_text(rss) if rss else "",
        )  # fmt: skip
    happened = news.log.rows[-HAPPENED:] if news.log is not None else []
    lines = [Text(f"{seconds_text(each.at_s):>12}  {printable(each.text)}", "bright_black") for each in happened]
    return Group(Text(headline(news), "bold"), Text(_losses(news), "blue"), table, *lines)


def _rows(there: Membership) -> list[tuple[str, Member]]:
    """Every member; those of a group stand together, behind one bracket."""
    if not there.groups:
        return [("", each) for each in there.members]
    by_node = {each.node: each for each in there.members}
    grouped = {node for group in there.groups for node in group}
    rows = [("  ", each) for each in there.members if each.node not in grouped]
    for group in there.groups:
        last = len(group) - 1
        for place, node in enumerate(group):
            bracket = "  " if not last else "┌ " if not place else "└ " if place == last else "│ "
            rows.append((bracket, by_node[node]))
    return rows


def _shares(news: News) -> dict[int, tuple[dict[str, float], int, int]]:
    """By node, of its newest stretch of time: seconds by kind, bytes sent, memory."""
    found: dict[int, tuple[dict[str, float], int, int]] = {}
    for _, _, nodes in reversed(news.frames.rows[-20:] if news.frames is not None else []):
        for node, work, sent, _, rss, _ in nodes:
            if node not in found:
                named = {news.kinds[kind]: seconds for kind, seconds in zip(work[::2], work[1::2], strict=True)}
                found[node] = named, sent, rss
            elif not found[node][2] and rss:
                found[node] = (*found[node][:2], rss)
    return found


def _losses(news: News) -> str:
    values = [row[2] for row in news.points.rows] if news.points is not None else []
    if not values:
        return ""
    width = -(-len(values) // LOSSES)
    means = [sum(values[at : at + width]) / len(values[at : at + width]) for at in range(0, len(values), width)]
    low, high = min(means), max(means)
    return "".join(_LEVELS[round((each - low) / (high - low or 1) * (len(_LEVELS) - 1))] for each in means)
