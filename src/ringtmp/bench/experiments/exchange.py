"""exchange: one exchange of the model by pattern, its lower bound beside a measured step.

The bounds are those of plan/exchange_bounds.py, for the model of the task and the rate of a device's link. A step has work
besides its exchange, so it may take longer for that reason alone; it cannot take less than what passes the fullest link.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Any

import msgspec

from ringtmp.bench.analysis import per_step_values
from ringtmp.bench.analysis.intervals import middle
from ringtmp.bench.bench_request import Choices
from ringtmp.bench.measuring.measurement_files import Measured
from ringtmp.bench.measuring.run_record import Record
from ringtmp.bench.training_runs import common_runs
from ringtmp.bench.training_runs.train_commands import Cell
from ringtmp.plan.exchange_bounds import Exchange, Speeds
from ringtmp.report.page_content import Figure, Section, Series, Skipped, Table
from ringtmp.units import seconds_text
from ringtmp.wire.formats import wire_format

#: The paper's own assumptions for its figure; beside a link of 100 Mbit/s neither counts for much.
REDUCE_BYTES_PER_S, UPDATE_BYTES_PER_S = 10 * 2**30, 2 * 2**30
FLOOR, IN_TURN, MEASURED = "the fullest link alone", "bound, one after the other", "a measured step"


class Row(msgspec.Struct, frozen=True):
    """A way that exchanges the model. Seconds and models of a step."""

    label: str
    pattern: str
    formula: str
    source: str
    least_models: float  # through the fullest direction of a link
    models: float  # that passed it
    floor_s: float | None  # None: the rate of the links is not known
    in_turn_s: float | None
    step_s: float
    busy_s: float  # of the busiest node: work, whatever is exchanged meanwhile


def cells(choices: Choices) -> list[Cell]:
    return common_runs.task_cells(choices)


def rows(choices: Choices, measured: Measured) -> list[Row]:
    found = []
    for each in cells(choices):
        exchange, records = each.way.exchange(each.nodes), measured.records(each.job)
        if exchange is not None and records:
            found.append(_row(choices, each, exchange, records))
    return found


def _row(choices: Choices, each: Cell, exchange: Exchange, records: Sequence[Record]) -> Row:
    warm_up = each.job.warm_up
    parameters = max(track.parameters for track in records[0].tracks)
    payload = wire_format(each.way.wire).payload_bytes(parameters)
    passed = mean(mean(per_step_values.busiest_step_bytes(record, warm_up)) for record in records)
    busy = mean(max(mean(track.busy_s[warm_up:]) for track in record.tracks) * record.scale for record in records)
    speeds = _speeds(choices, payload, 4.0 * parameters)
    return Row(
        label=each.way.label,
        pattern=exchange.pattern,
        formula=exchange.formula,
        source=exchange.source,
        least_models=exchange.busiest,
        models=passed / payload,
        floor_s=exchange.floor_s(speeds) if speeds else None,
        in_turn_s=exchange.in_turn_s(speeds) if speeds else None,
        step_s=middle([per_step_values.step_s(record, warm_up) for record in records], "mean"),
        busy_s=busy,
    )


def _speeds(choices: Choices, payload: float, model_bytes: float) -> Speeds | None:
    """Of the fastest link there is: what a slower one adds is no part of a lower bound."""
    if choices.listen:
        return None
    rate = max(device.link_mbps for device in choices.place(choices.nodes)) * 1e6 / 8
    return Speeds(payload / rate, model_bytes / REDUCE_BYTES_PER_S, model_bytes / UPDATE_BYTES_PER_S)


def results(choices: Choices, measured: Measured) -> dict[str, Any]:
    return {"rows": rows(choices, measured)}


def section(choices: Choices, measured: Measured) -> Section:
    found = rows(choices, measured)
    others = [
        Skipped(each.way.label, "it does not exchange the model, or less of it")
        for each in cells(choices)
        if each.way.exchange(each.nodes) is None
    ]
    return Section(
        "exchange",
        "One exchange of the model",
        (__doc__ or "").partition("\n\n")[2].strip(),
        (),
        (figure(found),) if any(each.floor_s is not None for each in found) else (),
        (_table(found),) if found else (),
        (*common_runs.refused(choices), *others, *common_runs.missing(cells(choices), measured)),
    )


def figure(found: Sequence[Row]) -> Figure:
    """Of those whose links are known."""
    known = [each for each in found if each.floor_s is not None and each.in_turn_s is not None]
    names = tuple(each.label for each in known)
    values = (
        (FLOOR, tuple(each.floor_s or 0.0 for each in known)),
        (IN_TURN, tuple(each.in_turn_s or 0.0 for each in known)),
        (MEASURED, tuple(each.step_s for each in known)),
    )
    return Figure(
        "exchange-bounds", "One exchange of the model: lower bounds and a measured step", "bars", "", "seconds a step",
        tuple(Series(name, names, taken) for name, taken in values),
        caption="What the fullest link alone takes, the bounds of Langer et al. 2020, and a step with its work.",
    )  # fmt: skip


def _table(found: Sequence[Row]) -> Table:
    columns = (
        "strategy", "exchange", "lower bound", "from", "models through the fullest link: at least", "measured",
        "the link alone", "bound", "measured step", "of it the busiest node works",
    )  # fmt: skip
    cells = tuple(
        (
            each.label,
            each.pattern,
            each.formula,
            each.source,
            f"{each.least_models:.3g}",
            f"{each.models:.3g}",
            seconds_text(each.floor_s) if each.floor_s is not None else "",
            seconds_text(each.in_turn_s) if each.in_turn_s is not None else "",
            seconds_text(each.step_s),
            seconds_text(each.busy_s),
        )
        for each in found
    )
    return Table(
        "Lower bounds of an exchange and measured steps", columns, cells, "T, R, U: a model sent, added, updated."
    )
