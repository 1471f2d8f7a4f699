"""Several runs side by side, for people and as JSON."""

from __future__ import annotations

import sys
from typing import IO

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ringtmp.metrics.compare import Comparison


def print_json(made: Comparison) -> None:
    sys.stdout.write(msgspec.json.encode(made).decode() + "\n")


def print_table(made: Comparison, stream: IO[str]) -> None:
    """What is not the same comes first. The better value of a row is bold, and has a star for who sees no bold."""
    console = Console(file=stream, width=None if stream.isatty() else 120)
    if made.differences:
        console.print("not the same in all runs, so compare with care:", highlight=False)
        for line in made.differences:
            console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for name in made.runs:
        table.add_column(Text(name), justify="right")
    table.add_column("")
    for measure in made.measures:
        cells = [
            Text(f"{text} *", style="bold") if place == measure.best else Text(f"{text}  ")
            for place, text in enumerate(measure.texts)
        ]
        table.add_row(measure.name, *cells, Text(measure.note, style="dim"))
    console.print(table)
    for line in made.verdict:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
