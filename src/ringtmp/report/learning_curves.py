"""How the model got better: the loss over steps, seconds, bytes and joules, scores on the test part, epoch by epoch.

Of the whole run, every step once, with marks where the run was resumed.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

import msgspec

from ringtmp.metrics.energy import Load
from ringtmp.metrics.events import NodeStep
from ringtmp.metrics.history import history_of
from ringtmp.metrics.summary import loads_of
from ringtmp.metrics.test_then_train_error import in_stretches
from ringtmp.report.page_content import Figure, Mark, Series, Table
from ringtmp.report.run_timeline import Run
from ringtmp.units import seconds_text

_POINTS = 100


def loss(run: Run) -> Iterable[Figure]:
    steps = run.steps
    if not steps:
        return
    values = tuple(each.loss for each in steps)
    number = {each.step: place for place, each in enumerate(steps)}
    energy = ", ".join(sorted({each.energy_source for each in run.summary.per_node if each.energy_source}))
    axes: list[tuple[str, str, str, list[float]]] = [
        ("steps", "step", "Loss over steps", [float(each.step + 1) for each in steps]),
        ("seconds", "seconds", "Loss over time", _seconds(run)),
        ("bytes", "bytes sent by all nodes", "Loss over bytes", list(accumulate(_bytes_by_step(run)))),
    ]
    if energy:
        axes.append(
            ("joules", f"joules of all nodes ({energy})", "Loss over energy", list(accumulate(joules_by_step(run))))
        )
    for name, label, title, x in axes:
        if x[-1] <= 0:  # one node sends nothing
            continue
        series = [Series("training", tuple(x), values)]
        points = [(x[number[each.step - 1]], each.loss) for each in run.evaluations if each.step - 1 in number]
        if points:
            series.append(Series("test", tuple(at for at, _ in points), tuple(value for _, value in points)))
        marks = tuple(
            Mark(part.before_s - run.began_s if name == "seconds" else x[number[part.first_step - 1]], text)
            for part, text in run.resumed
            if part.first_step - 1 in number
        )
        yield Figure(f"loss-{name}", title, "lines", label, "loss", tuple(series), marks=marks)


def scores(run: Run) -> Iterable[Figure]:
    """What a user understands better than a loss."""
    tested = sorted(run.evaluations, key=lambda each: each.step)
    marks = tuple(Mark(float(part.first_step), text) for part, text in run.resumed)
    right = [(float(each.step), 100 * each.accuracy) for each in tested if each.accuracy is not None]
    if right:
        series = Series("test", tuple(at for at, _ in right), tuple(value for _, value in right))
        caption = "How many of the test part's samples the model gets right."
        yield Figure("accuracy", "Accuracy", "lines", "step", "% right", (series,), marks=marks, caption=caption)
    bits = [(float(each.step), each.bits_per_byte) for each in tested if each.bits_per_byte is not None]
    if bits:
        series = Series("test", tuple(at for at, _ in bits), tuple(value for _, value in bits))
        yield Figure("bits", "Bits per byte", "lines", "step", "bits per byte of the test part", (series,), marks=marks)
    puzzled = [(float(each.step), each.perplexity) for each in tested if each.perplexity is not None]
    if puzzled:
        series = Series("test", tuple(at for at, _ in puzzled), tuple(value for _, value in puzzled))
        caption = "Among how many equally likely tokens the model would choose as badly; of a model of bytes, bytes."
        label = "perplexity of the test part"
        yield Figure("perplexity", "Perplexity", "lines", "step", label, (series,), marks=marks, caption=caption)


def predicted(run: Run) -> Iterable[Figure]:
    """Test-then-train: the error on samples the model had not learned from."""
    stretches = in_stretches(run.steps, _POINTS)
    if not stretches:
        return
    at = tuple(float(each.last_step) for each in stretches)
    caption = "Every sample counts once, predicted before it was learned; a point is the mean over a stretch of steps."
    loss = Series("predicted", at, tuple(each.loss for each in stretches))
    yield Figure("predicted-loss", "Loss before learning", "lines", "step", "loss", (loss,), caption=caption)
    wrong = [(float(each.last_step), 100 * (1 - each.accuracy)) for each in stretches if each.accuracy is not None]
    if wrong:
        error = Series("predicted", tuple(x for x, _ in wrong), tuple(y for _, y in wrong))
        yield Figure(
            "predicted-error",
            "Error before learning",
            "lines",
            "step",
            "% wrong",
            (error,),
            caption=caption,
            from_zero=True,
        )


def epochs(run: Run) -> Iterable[Table]:
    rows = history_of(run.parts).epochs
    if not rows:
        return
    cells = tuple(
        (
            str(row.epoch), str(row.step), f"{row.loss:.4g}",
            "" if row.test_loss is None else f"{row.test_loss:.4g}",
            "" if row.accuracy is None else f"{row.accuracy:.1%}",
            f"{row.rate:.3g}", seconds_text(row.seconds), str(row.part),
        )
        for row in rows
    )  # fmt: skip
    columns = ("epoch", "step", "training loss", "test loss", "test accuracy", "learning rate", "in steps", "part")
    kept = [
        place for place in range(len(columns))
        if any(row[place] for row in cells) and (place < 7 or len(run.parts) > 1)
    ]  # fmt: skip
    yield Table(
        "Epoch by epoch",
        tuple(columns[place] for place in kept),
        tuple(tuple(row[place] for place in kept) for row in cells),
    )


def _seconds(run: Run) -> list[float]:
    return [part.run_s(each.at) - run.began_s for part in run.parts for each in part.steps]


def _bytes_by_step(run: Run) -> list[float]:
    by_step: dict[int, float] = {}
    for each in run.node_steps:
        by_step[each.step] = by_step.get(each.step, 0.0) + each.sent_bytes
    return [by_step.get(each.step, 0.0) for each in run.steps]


def joules_by_step(run: Run) -> list[float]:
    """A node's joules of a part, spread over its steps there as its meter or the model says."""
    by_step: dict[int, float] = {}
    for part, nodes in zip(run.parts, run.nodes, strict=True):
        loads = loads_of(nodes.values(), part.started.facts.get("lab_scale", 1.0))
        for node in nodes.values():
            if node.energy_j is None:
                continue
            done = part.node_steps.get(node.node, ())
            weights = [
                each.joules if each.joules is not None else _modelled(loads[node.node], each) for each in done
            ]  # fmt: skip
            whole = sum(weights)
            for each, weight in zip(done, weights, strict=True):
                by_step[each.step] = by_step.get(each.step, 0.0) + (node.energy_j * weight / whole if whole else 0.0)
    return [by_step.get(each.step, 0.0) for each in run.steps]


def _modelled(load: Load, step: NodeStep) -> float:
    return msgspec.structs.replace(
        load, seconds=step.busy_s + step.idle_s, busy_s=step.busy_s, bytes=step.sent_bytes + step.received_bytes
    ).joules
