"""Colours of a report, light and dark, as names that a style sheet can give values to.

A figure is drawn once, in the light colours. In its SVG every colour is one of these, so the dark figure is the same text
with other colours, and a page has variables instead. Hues of series stay apart for colour-blind eyes (Okabe and Ito 2008).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

#: name -> light, dark. No two light colours are equal.
COLOURS = {
    "ink": ("#1c2430", "#e8edf3"),
    "muted": ("#5b6675", "#9aa7b5"),
    "grid": ("#e3e7ec", "#2b343f"),
    "ground": ("#fefefe", "#171d25"),
    "on": ("#ffffff", "#0d1218"),
    "track": ("#eef1f4", "#222a34"),
    "limit": ("#c2185b", "#ff6f9f"),
    "c0": ("#0072b2", "#4cb0ec"),
    "c1": ("#e08a00", "#f5b340"),
    "c2": ("#009e73", "#35cfa0"),
    "c3": ("#c65f9a", "#ec9ccb"),
    "c4": ("#d55e00", "#ff8a4f"),
    "c5": ("#56b4e9", "#9bdcff"),
    "c6": ("#7a5cc0", "#b39df0"),
    "c7": ("#8a8f98", "#a9b0ba"),
    "c8": ("#b3a100", "#e6d84a"),
}
SERIES = [name for name in COLOURS if name[0] == "c"]
LIGHT = {name: pair[0] for name, pair in COLOURS.items()}
#: What a name means is the same colour in every figure; the part before a colon or a space counts.
_PREFERRED = {
    "ring": 0, "ps": 1, "allreduce": 2, "easgd": 3, "one": 7, "alone": 7,
    "forward": 5, "backward": 1, "weights": 6, "update": 2, "serialise": 3, "mail": 8, "send": 7, "receive": 7,
    "compute": 5, "reduce": 3,
    "busy": 0, "activations": 5, "gradients": 1, "parameters": 2, "window": 3, "norms": 6, "slowest": 4,
    "ideal": 7, "measured": 0, "predicted": 1,
}  # fmt: skip
#: Kinds of work in the order in which they are told of; others follow.
WORK = ("forward", "backward", "weights", "update", "compute", "reduce", "serialise", "mail", "send", "receive")
_HEX = re.compile(r"#[0-9a-f]{6}")


def series_colours(names: Sequence[str]) -> list[str]:
    """A colour name for each series of one figure: its own if it has one and it is free, else the next free one."""
    free = list(SERIES)
    chosen: dict[int, str] = {}
    for place, name in enumerate(names):
        wish = _PREFERRED.get(re.split(r"[:, ]", name.lower())[0])
        if wish is not None and SERIES[wish] in free:
            chosen[place] = SERIES[wish]
            free.remove(SERIES[wish])
    for place in range(len(names)):
        if place not in chosen:
            chosen[place] = free.pop(0) if free else SERIES[place % len(SERIES)]
    return [chosen[place] for place in range(len(names))]


def dark(svg: str) -> str:
    return _swap(svg, dict(COLOURS.values()))


def variable(svg: str) -> str:
    """With the colours of the page it is put into."""
    return _swap(svg, {light: f"var(--{name})" for name, (light, _) in COLOURS.items()})


def variables(night: bool) -> str:
    """The style sheet's part: a value for every name."""
    return " ".join(f"--{name}: {pair[night]};" for name, pair in COLOURS.items())


def _swap(svg: str, values: dict[str, str]) -> str:
    return _HEX.sub(lambda found: values.get(found[0], found[0]), svg)


def short(value: float) -> str:
    """At most four figures, for ticks and cells: 12500 -> '12.5k'."""
    size = abs(value)
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            scale = 1e3 if unit == "k" else limit
            return f"{value / scale:.3g}{unit}" if size / scale < 1000 else f"{value / scale:.0f}{unit}"
    if size >= 1000:
        return f"{value:.0f}"
    return "0" if value == 0 else f"{value:.3g}"


def in_order(kinds: Iterable[str]) -> list[str]:
    """Each once."""
    return sorted(dict.fromkeys(kinds), key=lambda kind: WORK.index(kind) if kind in WORK else len(WORK))


def longest(texts: Iterable[str]) -> int:
    return max((len(text) for text in texts), default=0)


def cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
