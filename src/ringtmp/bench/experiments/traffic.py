"""traffic: values and bytes per epoch by strategy, over batch sizes and three shapes of network, with the break-even.

Mostly arithmetic (`shapes.py`); measured runs stand beside it, of the task and of every shape, to show that the nodes send
what the arithmetic says. One row is the set-up of the 2021 prototype.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import median

import msgspec

from ringtmp.bench.analysis import page_drawings, per_step_values, ring_against_server, traffic_formulas
from ringtmp.bench.analysis.ring_against_server import Sampled
from ringtmp.bench.analysis.traffic_formulas import FAMILIES, NETS, SERVERS, Net
from ringtmp.bench.bench_request import Choices
from ringtmp.bench.measuring.measurement_files import Measured
from ringtmp.bench.measuring.run_record import Track
from ringtmp.bench.training_runs import common_runs
from ringtmp.bench.training_runs.strategy_variants import PLAIN_SERVER, RING, SERVER, Way
from ringtmp.bench.training_runs.train_commands import Cell, local
from ringtmp.bench.training_runs.workloads import Workload
from ringtmp.report.page_content import Figure, Section, Series, Skipped, Table, Verdict
from ringtmp.strategies.base import Sizes
from ringtmp.units import bytes_text
from ringtmp.wire.formats import wire_format

AIM = "There is less communication than with a parameter server"
BOTTLENECK = "Only neighbours communicate, so no link is a bottleneck"
BATCH_SIZES = tuple(2**power for power in range(11))
EPOCH = 60_000
VALUE_BYTES = 4
#: Of the runs that hold the arithmetic to account.
SHAPE_BATCH, SHAPE_STEPS = 64, 8
PROTOTYPE = Workload("prototype", "mlp", {"depth": 2, "width": 50}, "random:784x10", 1, 1, steps=12)


def prototype_cells(choices: Choices) -> list[Cell]:
    """As it was: three nodes, a sample at a time; the parameter server's two workers take one each."""
    work = msgspec.structs.replace(PROTOTYPE, seed=choices.seed)
    nodes = traffic_formulas.PROTOTYPE_NODES
    return [
        local(Way(RING, RING), work, nodes, "the prototype's ring", ("--cuts", "0,1,2,-")),
        local(Way(PLAIN_SERVER, SERVER), msgspec.structs.replace(work, batch_size=2), nodes, "the prototype's server"),
    ]


def shape_cells(choices: Choices) -> list[tuple[Net, str, Cell]]:
    """A few steps of every shape, on processes: what is sent depends on no link."""
    found: list[tuple[Net, str, Cell]] = []
    for net in () if choices.quick else NETS:
        name = net.name.replace(" ", "-")
        work = Workload(name, net.model, net.settings, net.data, SHAPE_BATCH, 4, seed=choices.seed, steps=SHAPE_STEPS)
        cuts = ("--cuts", traffic_formulas.cuts_text(net, choices.nodes))
        ring, server = Way(RING, RING), Way(PLAIN_SERVER, SERVER)
        if traffic_formulas.can_cut(net, choices.nodes):
            found.append((net, RING, local(ring, work, choices.nodes, net.name, cuts)))
        found.append((net, SERVER, local(server, work, choices.nodes, net.name)))
    return found


def cells(choices: Choices) -> list[Cell]:
    shaped = [each for _, _, each in shape_cells(choices)]
    return [*common_runs.task_cells(choices), *prototype_cells(choices), *shaped]


def section(choices: Choices, measured: Measured) -> Section:
    nodes = choices.nodes
    main = common_runs.task_cells(choices)
    found = page_drawings.sampled(main, measured, per_step_values.sent_bytes)
    fair, behind = common_runs.learned(main, measured)
    per_step = ring_against_server.figures(found, choices.seed)
    sent, busiest = (
        ring_against_server.both(page_drawings.sampled(fair, measured, values), choices.seed)
        for values in (per_step_values.sent_bytes, per_step_values.busiest_step_bytes)
    )
    batch = choices.task().batch_size
    figures = [
        *(_epoch_figure(net, nodes) for net in NETS),
        _map("break-even-total", "Bytes in all", nodes, busiest=False),
        _map("break-even-busiest", "Bytes on the busiest device's link", nodes, busiest=True),
        *([page_drawings.bars("bytes-per-step", f"Bytes per step as measured, batch {batch}", "bytes", per_step, log=True)]
          if per_step else []),
        *_links(main, measured),
    ]  # fmt: skip
    return Section(
        "traffic",
        "Traffic",
        "Bytes are tensor payload, without framing and control. The ring's traffic grows with the number of samples, that of "
        "strategies that exchange the model with the number of steps. So the larger the batch, the worse for the ring. "
        f"Predictions are for {nodes} nodes and float32.",
        (
            ring_against_server.verdict(AIM, f"bytes sent in all at batch {batch}", _bytes_a_step, sent),
            ring_against_server.verdict(BOTTLENECK, "bytes through the busiest link", _bytes_a_step, busiest),
            _break_even_verdict(nodes),
        ),
        tuple(figures),
        (
            _prototype_table(choices, measured),
            _break_even_table(nodes),
            _checked(main, measured),
            *([_shapes_table(choices, measured)] if not choices.quick else []),
        ),
        (
            *common_runs.refused(choices),
            *behind,
            *common_runs.missing(cells(choices), measured),
            *([Skipped("the three shapes, measured", "small sizes; ringtmp bench traffic has them")] * choices.quick),
            *(
                Skipped(f"ring, {nodes} nodes, {net.name}", f"it has {len(net.outputs)} layers, fewer than nodes")
                for net in NETS
                if not traffic_formulas.can_cut(net, nodes)
            ),
        ),
    )


def _epoch_figure(net: Net, nodes: int) -> Figure:
    series = tuple(
        Series(
            family,
            tuple(float(size) for size in BATCH_SIZES),
            tuple(VALUE_BYTES * traffic_formulas.epoch_values(net, family, nodes, size, EPOCH) for size in BATCH_SIZES),
        )
        for family in FAMILIES
        if ":" not in family
    )
    at = traffic_formulas.break_even(net, nodes)
    return Figure(
        f"epoch-{net.name.replace(' ', '-')}", f"Bytes per epoch of {EPOCH:,} samples, {net.name} ({net.text})", "lines",
        "samples per step", "bytes per epoch", series, log_x=True, log_y=True,
        caption=f"Predicted. Ring and parameter server send as much at {at:.0f} samples per step; servers on all workers and "
        "all-reduce send as much as one server does, but spread over all links.",
    )  # fmt: skip


def _map(name: str, title: str, nodes: int, busiest: bool) -> Figure:
    """Ring over each of the others: below 1 the ring sends less."""
    rows = []
    others = SERVERS if busiest else SERVERS[:1]
    values = traffic_formulas.busiest_values if busiest else partial(traffic_formulas.epoch_values, samples=EPOCH)
    for net in NETS:
        for other in others:
            ratios = [values(net, RING, nodes, size) / values(net, other, nodes, size) for size in BATCH_SIZES]
            label = f"{net.name} / {other}" if busiest else net.name
            rows.append(Series(label, tuple(str(size) for size in BATCH_SIZES), tuple(ratios)))
    return Figure(
        name, f"{title}: the ring over the parameter server", "map", "samples per step", "", tuple(rows),
        caption="Predicted; below 1 the ring sends less, above 1 more.",
    )  # fmt: skip


def _bytes_a_step(side: Sampled) -> str:
    return f"{bytes_text(side.middle)} a step"


def _break_even_verdict(nodes: int) -> Verdict:
    parts = [f"{net.name} below {traffic_formulas.break_even(net, nodes):.0f}" for net in NETS]
    return Verdict(
        f"{AIM} (over shapes and batch sizes)",
        f"With {nodes} nodes the ring sends less in all while a step has few samples: {', '.join(parts)}; above, the "
        "parameter server sends less.",
        "mixed",
        ", ".join(f"{traffic_formulas.break_even(net, nodes):.0f}" for net in NETS),
    )


def _break_even_table(nodes: int) -> Table:
    rows = []
    for net in NETS:
        cuts = traffic_formulas.even_cuts(net, nodes)
        rows.append(
            (
                net.name,
                net.text,
                f"{net.size:,}",
                " ".join(map(str, cuts)),
                f"{traffic_formulas.break_even(net, nodes):.1f}",
            )
        )
    columns = (
        "shape",
        "layers",
        "parameters P",
        "values per sample at the cuts",
        "break-even samples per step P (n-1) / W",
    )
    return Table(f"Break-even, {nodes} nodes", columns, tuple(rows))


def _prototype_table(choices: Choices, measured: Measured) -> Table:
    """Values per epoch: reported then, by arithmetic, and as our nodes send them."""
    ring, server = (_values_per_sample(each, measured) for each in prototype_cells(choices))
    said = [f"{each * traffic_formulas.PROTOTYPE_SAMPLES:.5g}" if each else "not measured" for each in (ring, server)]
    return Table(
        "The prototype of 2021: 784-50-50-10, loss-only tail, batch 1, three nodes, 60,000 samples",
        (
            "system",
            "values per epoch it reported",
            "by arithmetic",
            "measured here, x 60,000 samples",
            "how it comes about",
        ),
        (
            (
                RING,
                f"{traffic_formulas.PROTOTYPE_RING:.5g}",
                f"{traffic_formulas.prototype_ring():.5g}",
                said[0],
                "60,000 samples x 2 directions x (50 + 50 + 10) values at the three cuts",
            ),
            (
                "parameter server",
                f"{traffic_formulas.PROTOTYPE_SERVER:.5g}",
                f"{traffic_formulas.prototype_server():.5g}",
                said[1],
                "60,000 samples x (push + pull) x 42,310 parameters: every sample is a worker's whole batch",
            ),
        ),
        "The ratio is 384.6 / b for b samples per worker and step, so it was a matter of batch size 1 as much as of topology. "
        "Here a parameter travels in vectors whose tensors start on 64-byte boundaries, at most 15 values of padding each.",
    )


def _values_per_sample(each: Cell, measured: Measured) -> float | None:
    records = measured.records(each.job)
    if not records:
        return None
    # The median step: what leaves a server at the turn of two steps may be counted to either.
    return median(per_step_values.sent_bytes(records[0], each.job.warm_up)) / VALUE_BYTES / each.work.batch_size


def _checked(main: Sequence[Cell], measured: Measured) -> Table:
    """Measured bytes per step beside the arithmetic, for every way whose wire it knows."""
    rows = []
    for each in main:
        wire = wire_format(each.way.wire)
        width = None if wire.carries_error else wire.value_bytes
        for record in measured.records(each.job)[:1]:
            moved = per_step_values.sent_bytes(record, each.job.warm_up)
            seen = sum(moved) / max(1, len(moved))
            samples = sum(record.samples[each.job.warm_up :]) / max(1, len(moved))
            predicted = width * _step_values(each, samples) if width else None
            rows.append(
                (
                    each.way.label,
                    bytes_text(predicted) if predicted else "",
                    bytes_text(seen),
                    f"{seen / predicted:.3f}" if predicted else "",
                )
            )
    return Table(
        "Bytes per step of the task: arithmetic and measurement",
        ("strategy", "predicted", "measured", "ratio"),
        tuple(rows),
    )


def _shapes_table(choices: Choices, measured: Measured) -> Table:
    """Every shape beside its arithmetic, in all and on the busiest device's link."""
    rows = []
    for net, family, each in shape_cells(choices):
        for record in measured.records(each.job)[:1]:
            warm_up = each.job.warm_up
            cells = []
            for predicted, seen in (
                (
                    VALUE_BYTES * traffic_formulas.epoch_values(net, family, choices.nodes, SHAPE_BATCH, SHAPE_BATCH),
                    median(per_step_values.sent_bytes(record, warm_up)),
                ),
                (
                    VALUE_BYTES * traffic_formulas.busiest_values(net, family, choices.nodes, SHAPE_BATCH),
                    median(per_step_values.busiest_step_bytes(record, warm_up)),
                ),
            ):
                cells += [bytes_text(predicted), bytes_text(seen), f"{seen / predicted:.3f}"]
            rows.append((net.name, each.way.label, *cells))
    columns = (
        "shape",
        "strategy",
        "in all: predicted",
        "measured",
        "ratio",
        "busiest link: predicted",
        "measured",
        "ratio",
    )
    title = (
        f"Bytes per step of the three shapes, {choices.nodes} nodes, batch {SHAPE_BATCH}: arithmetic and measurement"
    )
    return Table(title, columns, tuple(rows))


def _step_values(each: Cell, samples: float) -> float:
    width, depth = int(each.work.settings["width"]), int(each.work.settings["depth"])
    net = traffic_formulas.dense("task", "", (64, *[width] * depth, 10))
    return each.way.traffic(Sizes(net.size, (width,) * each.nodes, samples, net.inside), each.nodes).total


def _links(main: Sequence[Cell], measured: Measured) -> list[Figure]:
    """A heat map per way: who sends how much to whom."""
    found = []
    for each in main:
        for record in measured.records(each.job)[:1]:
            nodes = [track.node for track in record.tracks]
            names = tuple(f"to {_name(track)}" for track in record.tracks)
            rows = tuple(
                Series(_name(track), names, tuple(float(track.sent_to.get(node, 0)) for node in nodes))
                for track in record.tracks
            )
            found.append(
                Figure(
                    f"links-{page_drawings.slug(each.way.label)}",
                    f"Bytes by link, {each.way.label}",
                    "heat",
                    "",
                    "",
                    rows,
                    caption="First repeat, the whole run with its evaluations.",
                )
            )
    return found


def _name(track: Track) -> str:
    return "master" if track.node == 0 else f"{track.role} {track.node}"
