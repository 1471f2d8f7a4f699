"""Every way its own learning rate: a small sweep before anything is compared. Pure.

What trains like one process, to rounding, is tuned by one process, once for all of them; so is a ring with staleness 1,
whose weights do not depend on the number of nodes. The others (asynchronous, a lossy wire) are tuned as they will run.
The best rate is the one with the smallest test loss at the end; one that diverged is out.
"""

from __future__ import annotations

import math

import msgspec

from ringtmp.bench.bench_request import Choices
from ringtmp.bench.measuring.measurement_files import Measured
from ringtmp.bench.training_runs.strategy_variants import RING, Way
from ringtmp.bench.training_runs.train_commands import Cell, local
from ringtmp.report.page_content import Table
from ringtmp.wire.formats import wire_format

RATES = {True: (0.0007, 0.002), False: (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016)}
EPOCHS = {True: 1, False: 4}
_STEPS_PER_EPOCH = 23


def cells(choices: Choices) -> list[Cell]:
    """Every rate of every way that has a sweep of its own."""
    found: dict[str, Cell] = {}
    for way in choices.ways:
        for each in of_way(choices, way):
            found.setdefault(each.job.file_stem, each)
    return list(found.values())


def of_way(choices: Choices, way: Way) -> list[Cell]:
    if way.full_batch:  # it finds the length of its steps itself
        return []
    steps = EPOCHS[choices.quick] * _STEPS_PER_EPOCH
    tried, nodes = _as_tried(choices, way)
    return [
        local(tried, msgspec.structs.replace(choices.task(), lr=rate, steps=steps), nodes, f"rate {rate:g}")
        for rate in RATES[choices.quick]
    ]


def rates(choices: Choices, measured: Measured) -> dict[str, float]:
    """Way's label -> its best rate. A way none of whose rates was measured is not in it."""
    found = {}
    for way in choices.ways:
        losses = [(_loss(each, measured), each.work.lr) for each in of_way(choices, way)]
        known = [(loss, rate) for loss, rate in losses if math.isfinite(loss)]
        if known:
            found[way.label] = min(known)[1]
    return found


def table(choices: Choices, measured: Measured) -> Table:
    rows = []
    for way in choices.ways:
        if way.full_batch:
            rows.append((way.label, "", *[""] * len(RATES[choices.quick]), "none: it finds its steps itself"))
            continue
        tried, nodes = _as_tried(choices, way)
        losses = {each.work.lr: _loss(each, measured) for each in of_way(choices, way)}
        cells = tuple(f"{loss:.3f}" if math.isfinite(loss) else "diverged or failed" for loss in losses.values())
        chosen = choices.rates.get(way.label)
        rows.append((way.label, f"{tried.label}, {nodes} node(s)", *cells, f"{chosen:g}" if chosen else "none"))
    columns = ("strategy", "tuned as", *(f"test loss at {rate:g}" for rate in RATES[choices.quick]), "chosen")
    return Table("Learning rates, each strategy's own", columns, tuple(rows), "Adam; the smallest test loss wins.")


def _as_tried(choices: Choices, way: Way) -> tuple[Way, int]:
    if way.like_one_process:
        return Way("one process", RING), 1
    if way.splits_layers and wire_format(way.wire).exact:
        return Way(f"one process, staleness {way.staleness}", RING, {}, {"staleness": way.staleness}), 1
    return way, choices.nodes


def _loss(each: Cell, measured: Measured) -> float:
    for facts in measured.facts(each.job):
        loss = facts.get("test_loss")
        return float(loss) if isinstance(loss, int | float) else math.inf
    return math.inf
