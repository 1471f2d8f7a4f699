"""Numbers as people write them."""

from __future__ import annotations

from collections.abc import Sequence


def bytes_text(count: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def seconds_text(seconds: float) -> str:
    """0.0123 -> '12.3 ms'; 90 -> '1 min 30 s'; 12000 -> '3 h 20 min'."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min"


def count_text(count: float) -> str:
    """1234567 -> '1.23M'."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= limit:
            return f"{count / limit:.2f}{unit}"
    return f"{count:.0f}"


def rate_text(per_s: float) -> str:
    """0.254 -> '0.254', 43.21 -> '43.2', 2043 -> '2.04k'."""
    return f"{per_s:.3g}" if abs(per_s) < 999.5 else count_text(per_s)


def joules_text(joules: float) -> str:
    """3.14159 -> '3.14 J', 6371 -> '6371 J', 45678 -> '45.7 kJ': as the live page writes them."""
    if abs(joules) >= 1e4:
        return f"{joules / 1e3:.1f} kJ"
    return f"{joules:.0f} J" if abs(joules) >= 99.95 else f"{joules:.3g} J"


def rows_text(titles: Sequence[str], rows: Sequence[Sequence[str]], most: int, first: int) -> list[str]:
    """A table as lines, columns to the right. Of more than `most` rows the first `first` and the last ones are kept;
    a column in which no row says anything is left out."""
    kept = list(rows)
    if len(rows) > most:
        kept = [*rows[:first], ["..."] + [""] * (len(titles) - 1), *rows[len(rows) - (most - first) :]]
    columns = [place for place in range(len(titles)) if any(row[place] for row in kept)]
    table = [[line[place] for place in columns] for line in (titles, *kept)] if kept else []
    widths = [max(len(line[column]) for line in table) for column in range(len(columns))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in table]
