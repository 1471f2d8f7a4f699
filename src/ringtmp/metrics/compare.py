"""Which of several runs was better, and why. Pure: summaries and histories in, a Comparison out.

Every number has a side that is better. A run that did not finish is shown and never called better; totals (time, bytes,
joules) are held against each other only where the same work was done.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

from ringtmp.metrics.history import History
from ringtmp.metrics.summary import UNFINISHED, Summary
from ringtmp.units import bytes_text, count_text, joules_text, seconds_text

#: Two numbers closer than this share are called equal: a run's times differ by more when it is done again.
ALIKE = 0.02
FINISHED = ("done", "stopped early")
#: Where one of these differs, a total is no sign of which run was better.
WORK = ("model", "data", "batch_size", "steps")
#: What a run of the same work took in all.
TOTALS = ("time", "bytes", "energy")


class Measure(msgspec.Struct, frozen=True):
    """A number of every run, in their order; None where a run has none. `best` is the number of a run, counted from 0; None
    where fewer than two runs have it, the best two are alike, or those who have it may not be compared by it."""

    name: str
    better: str  # "lower" or "higher"
    values: tuple[float | None, ...]
    texts: tuple[str, ...]
    best: int | None
    note: str = ""


class Comparison(msgspec.Struct, frozen=True):
    runs: tuple[str, ...]
    measures: tuple[Measure, ...]
    differences: tuple[str, ...]  # in what was done, because of which numbers may not mean the same
    verdict: tuple[str, ...]  # what keeps runs from being compared comes first


def compare(runs: Sequence[tuple[str, Summary, History]]) -> Comparison:
    """By name; at least two."""
    summaries, histories = [each[1] for each in runs], [each[2] for each in runs]
    names = _names(runs)
    target = _common_target(histories)
    sources = sorted({each.energy_source for one in summaries for each in one.per_node if each.energy_source})
    rows: list[tuple[str, str, list[float | None], Callable[[float], str], str]] = [
        ("accuracy", "higher", [each.accuracy for each in summaries], _percent, "on the test part"),
        ("test loss", "lower", [each.test_loss for each in summaries], _loss, ""),
        ("bits per byte", "lower", [each.bits_per_byte for each in summaries], _loss, "on the test part"),
        ("training loss", "lower", [each.loss.last for each in summaries], _loss, "of the last step"),
        ("time", "lower", [each.wall_s for each in summaries], seconds_text, ""),
        ("step", "lower", [each.step_s.median if each.step_s else None for each in summaries], seconds_text, "median"),
        ("samples per second", "higher", [each.samples_per_s for each in summaries], count_text, "within steps"),
        ("idle", "lower", [_idle(each) for each in summaries], _percent, "share of all nodes' time in steps"),
        ("bytes", "lower", [float(each.bytes_total) for each in summaries], bytes_text, "tensors, sent by all nodes"),
        ("energy", "lower", [each.energy_j for each in summaries], joules_text, ", ".join(sources)),
    ]  # fmt: skip
    if target is not None:
        reached = [_reached_s(each, target) for each in histories]
        rows.insert(5, (f"time to test loss {target:.4g}", "lower", reached, seconds_text, "the least good run's best"))
    finished = [place for place, each in enumerate(summaries) if each.outcome in FINISHED]
    totals = finished if _same_work([summaries[place] for place in finished]) else []
    measures = tuple(
        _measure(*row, totals if row[0] in TOTALS else finished)
        for row in rows
        if any(value is not None for value in row[2])
    )
    return Comparison(tuple(names), measures, _differences(summaries), _verdict(names, summaries, measures))


def _names(runs: Sequence[tuple[str, Summary, History]]) -> list[str]:
    """The last part of each path, where that tells them apart."""
    short = [path.rstrip("/").rpartition("/")[2] or path for path, _, _ in runs]
    return short if len(set(short)) == len(short) else [path for path, _, _ in runs]


def _measure(
    name: str, better: str, values: list[float | None], text: Callable[[float], str], note: str, among: Sequence[int]
) -> Measure:  # fmt: skip
    """The best is one of those at these places."""
    sign = 1 if better == "lower" else -1
    known = ((values[place], place) for place in among)
    order = sorted((sign * value, place) for value, place in known if value is not None and value == value)
    best = order[0][1] if len(order) > 1 and not _alike(order[0][0], order[1][0]) else None
    texts = tuple("" if value is None else text(value) for value in values)
    return Measure(name, better, tuple(values), texts, best, note)


def _same_work(summaries: Sequence[Summary]) -> bool:
    return all(len({getattr(each, name) for each in summaries}) < 2 for name in WORK)


def _alike(first: float, second: float) -> bool:
    return math.isclose(first, second, rel_tol=ALIKE, abs_tol=1e-12)


def _common_target(histories: Sequence[History]) -> float | None:
    """The best test loss of the run whose best is worst: all have reached it."""
    best = [min((row.test_loss for row in each.steps if row.test_loss is not None), default=None) for each in histories]
    return None if any(each is None for each in best) else max(each for each in best if each is not None)


def _reached_s(history: History, target: float) -> float | None:
    return next((row.at_s for row in history.steps if row.test_loss is not None and row.test_loss <= target), None)


def _idle(summary: Summary) -> float | None:
    """Dedicated servers are listed apart."""
    workers = [each for each in summary.per_node if each.role != "server"]
    whole = sum(each.busy_s + each.idle_s for each in workers)
    return sum(each.idle_s for each in workers) / whole if whole else None


def _differences(summaries: Sequence[Summary]) -> tuple[str, ...]:
    """Strategies, wires and schedules are what one compares; these are what should be equal."""
    found = []
    for name in ("model", "data", "batch_size", "steps", "nodes", "seed", "threads", "emulated", "lab_scale"):
        values = [getattr(each, name) for each in summaries]
        if len(set(values)) > 1:
            said = ", ".join("yes" if value is True else "no" if value is False else str(value) for value in values)
            found.append(f"{name.replace('_', ' ')}: {said}")
    ended = [each.outcome for each in summaries]
    if any(each not in FINISHED for each in ended):
        found.append(f"outcome: {', '.join(ended)}")
    return tuple(found)


# -- in words -----------------------------------------------------------------------------------------------------------

_LEARNED = ("accuracy", "bits per byte", "test loss", "training loss")
_COST = (("time", "faster"), ("bytes", "sent less"), ("energy", "took less energy"), ("idle", "waited less"))
#: Of runs that did not do the same work.
_RATES = (("samples per second", "faster (samples per second)"), ("idle", "waited less"))


def _verdict(names: Sequence[str], summaries: Sequence[Summary], measures: Sequence[Measure]) -> tuple[str, ...]:
    finished = [place for place, each in enumerate(summaries) if each.outcome in FINISHED]
    lines = [_unfinished(names[place], each) for place, each in enumerate(summaries) if place not in finished]
    if len(finished) < 2:
        return (*lines, "so no run is called better")
    found, same = {each.name: each for each in measures}, _same_work([summaries[place] for place in finished])
    if not same:
        lines.append("the runs did not do the same work: time, bytes and energy are not held against each other")
    digests = {summaries[place].weights_sha256 for place in finished}
    if len(digests) == 1 and None not in digests:
        who = "all" if len(finished) == len(names) else " and ".join(names[place] for place in finished)
        lines.append(f"{who} ended with the same weights, bit for bit")
    else:
        lines.append(_learned(names, next((found[name] for name in _LEARNED if name in found), None), finished))
    for name, words in _COST if same else _RATES:
        measure = found.get(name)
        if measure is not None and measure.best is not None:
            lines.append(f"{names[measure.best]} {_was(words)}: {_against(names, measure, finished)}")
    return tuple(line for line in lines if line)


def _unfinished(name: str, summary: Summary) -> str:
    """First of all, so that nobody takes half a run for a fast one."""
    how = (
        "is still going on, or was cut off,"
        if summary.outcome == UNFINISHED
        else f"was not finished ({summary.outcome})"
    )
    return f"{name} {how} after {summary.steps} steps: its numbers are shown, and it is not called better or worse"


def _was(words: str) -> str:
    return f"was {words}" if words.startswith("faster") else words


def _learned(names: Sequence[str], measure: Measure | None, among: Sequence[int]) -> str:
    if measure is None:
        return ""
    if measure.best is None:
        texts = [measure.texts[place] for place in among if measure.texts[place]]
        return f"they learned equally well: {measure.name} {' and '.join(texts)}" if len(texts) > 1 else ""
    return f"{names[measure.best]} learned better: {measure.name} {_against(names, measure, among)}"


def _against(names: Sequence[str], measure: Measure, among: Sequence[int]) -> str:
    assert measure.best is not None
    texts = [(measure.texts[place], place) for place in among if place != measure.best]
    rest = [f"{text} ({names[place]})" for text, place in texts if text]
    return f"{measure.texts[measure.best]} against {' and '.join(rest)}"


def _percent(share: float) -> str:
    return f"{share:.1%}"


def _loss(value: float) -> str:
    return f"{value:.4f}"
