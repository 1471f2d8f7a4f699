"""The page of one training run, from its events and nothing else.

Pure: events in, Page out. Steps that were done again after a loss count once, except in the picture of the speed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

import msgspec

from ringtmp.metrics.energy import Load
from ringtmp.metrics.events import Evaluated, Event, NodeStep, Regrouped, RunStarted, StepDone
from ringtmp.metrics.summary import NodeSummary, Summary, summarise
from ringtmp.report.findings import Figure, Mark, Page, Section, Series, Span, Table
from ringtmp.report.theme import in_order
from ringtmp.units import bytes_text, count_text, seconds_text

_SPEED_POINTS = 120
_EXACTNESS = {
    "bits": "exact to the bits",
    "replay": "the same bits every time",
    "steps": "the same batches as one process",
    "stream": "the order of batches is not ours to repeat",
}


class Run(msgspec.Struct, frozen=True):
    """What a run left, sorted. `steps` and `node_steps` are without those that were done again."""

    summary: Summary
    started: RunStarted
    steps: tuple[StepDone, ...]
    every_step: tuple[StepDone, ...]
    node_steps: dict[int, tuple[NodeStep, ...]]
    evaluations: tuple[Evaluated, ...]


def gather(stream: Iterable[Event], run_dir: str) -> Run | None:
    """Of the last start in the log; None when nothing was started."""
    everything = list(stream)
    summary = summarise(everything, run_dir)
    if summary is None:
        return None
    begin = max(index for index, event in enumerate(everything) if isinstance(event, RunStarted))
    started = everything[begin]
    assert isinstance(started, RunStarted)
    steps: list[StepDone] = []
    every_step: list[StepDone] = []
    node_steps: dict[int, list[NodeStep]] = {}
    evaluations: list[Evaluated] = []
    for event in everything[begin:]:
        if isinstance(event, StepDone):
            steps.append(event)
            every_step.append(event)
        elif isinstance(event, NodeStep):
            node_steps.setdefault(event.node, []).append(event)
        elif isinstance(event, Evaluated):
            evaluations.append(event)
        elif isinstance(event, Regrouped):
            steps = [each for each in steps if each.step < event.step]
            node_steps = {node: [each for each in done if each.step < event.step] for node, done in node_steps.items()}
    kept = {each.node: tuple(node_steps.get(each.node, ())) for each in summary.per_node}
    return Run(summary, started, tuple(steps), tuple(every_step), kept, tuple(evaluations))


def page(run: Run) -> Page:
    summary = run.summary
    sections = [
        Section("loss", "Loss", figures=tuple(_loss(run))),
        Section("time", "Where the time goes", _idle_text(summary), figures=tuple(_time(run))),
        Section("nodes", "Nodes", figures=(*_bytes(summary), *_memory(summary)), tables=(_table(summary),)),
    ]
    if any(each.energy_j is not None for each in summary.per_node):
        sections.insert(2, Section("energy", "Energy", _energy_text(summary), figures=tuple(_energy(run))))
    if summary.recoveries:
        sections.append(Section("recoveries", "Recoveries", tables=(_recoveries(summary),)))
    return Page(
        f"{summary.model} on {summary.data}",
        f"{summary.strategy}, {summary.nodes} {'nodes' if summary.nodes > 1 else 'node'}, {summary.steps} steps of "
        f"{summary.batch_size} samples: {summary.outcome}",
        _facts(run),
        summary.emulated,
        tuple(section for section in sections if section.figures or section.tables),
        _highlights(summary),
    )


def _title(node: NodeSummary) -> str:
    return f"{name_of(node.node)} (server)" if node.role == "server" else name_of(node.node)


def name_of(node: int) -> str:
    return "master" if node == 0 else f"node {node}"


# -- loss ---------------------------------------------------------------------------------------------------------------


def _loss(run: Run) -> Iterable[Figure]:
    if not run.steps:
        return
    loss = tuple(each.loss for each in run.steps)
    tested = [each for each in run.evaluations if each.step <= run.steps[-1].step + 1]
    number = {each.step: place for place, each in enumerate(run.steps)}
    energy = ", ".join(sorted({each.energy_source for each in run.summary.per_node if each.energy_source}))
    axes: list[tuple[str, str, str, list[float]]] = [
        ("steps", "step", "Loss over steps", [float(each.step + 1) for each in run.steps]),
        ("seconds", "seconds", "Loss over time", _seconds(run)),
        ("bytes", "bytes sent by all nodes", "Loss over bytes", _running(_bytes_by_step(run))),
    ]
    if energy:
        axes.append(("joules", f"joules of all nodes ({energy})", "Loss over energy", _running(joules_by_step(run))))
    for name, label, title, x in axes:
        if x[-1] <= 0:  # one node sends nothing
            continue
        series = [Series("training", tuple(x), loss)]
        points = [(x[number[each.step - 1]], each.loss) for each in tested if each.step - 1 in number]
        if points:
            series.append(Series("test", tuple(at for at, _ in points), tuple(value for _, value in points)))
        yield Figure(f"loss-{name}", title, "lines", label, "loss", tuple(series))


def _seconds(run: Run) -> list[float]:
    begin = run.steps[0].at - run.steps[0].wall_s
    return [each.at - begin for each in run.steps]


def _bytes_by_step(run: Run) -> list[float]:
    by_step: dict[int, float] = {}
    for each in _all(run):
        by_step[each.step] = by_step.get(each.step, 0.0) + each.sent_bytes
    return [by_step.get(each.step, 0.0) for each in run.steps]


def joules_by_step(run: Run) -> list[float]:
    """A node's joules, spread over its steps as its meter or the model says."""
    by_step: dict[int, float] = {}
    loads = dict(zip((each.node for each in run.summary.per_node if each.power), run.summary.loads, strict=True))
    for node in run.summary.per_node:
        if node.energy_j is None:
            continue
        weights = [each.joules if each.joules is not None else _modelled(loads[node.node], each)
                   for each in run.node_steps[node.node]]  # fmt: skip
        whole = sum(weights)
        for each, weight in zip(run.node_steps[node.node], weights, strict=True):
            by_step[each.step] = by_step.get(each.step, 0.0) + (node.energy_j * weight / whole if whole else 0.0)
    return [by_step.get(each.step, 0.0) for each in run.steps]


def _modelled(load: Load, step: NodeStep) -> float:
    return msgspec.structs.replace(
        load, seconds=step.busy_s + step.idle_s, busy_s=step.busy_s, bytes=step.sent_bytes + step.received_bytes
    ).joules


def _running(values: Sequence[float]) -> list[float]:
    total, found = 0.0, []
    for value in values:
        total += value
        found.append(total)
    return found


def _all(run: Run) -> Iterable[NodeStep]:
    return (each for steps in run.node_steps.values() for each in steps)


# -- time ---------------------------------------------------------------------------------------------------------------


def _time(run: Run) -> Iterable[Figure]:
    nodes = run.summary.per_node
    names = tuple(name_of(each.node) for each in nodes)
    parts = (
        ("idle", "Idle time by what was waited for", sorted({each for node in nodes for each in node.idle_causes}),
         [node.idle_causes for node in nodes], "Time in training steps when a node has nothing runnable."),
        ("busy", "Busy time by kind of work", in_order(each for node in nodes for each in node.busy_kinds),
         [node.busy_kinds for node in nodes], "The rest is idle. A throttled processor counts as busy."),
    )  # fmt: skip
    for name, title, kinds, seconds, caption in parts:
        if kinds:
            yield Figure(
                name, title, "stacked", "node", "% of the time in training steps",
                tuple(
                    Series(kind, names, tuple(
                        100 * _part(node, spent.get(kind, 0.0)) for node, spent in zip(nodes, seconds, strict=True)
                    ))
                    for kind in kinds
                ),
                caption=caption,
            )  # fmt: skip
    if (drawn := median_step(run)) is not None:
        step, spans = drawn
        yield Figure(
            "gantt", "One step", "gantt", spans=spans,
            caption=f"Step {step}, of median length among those recorded in full. Pale: waiting.",
        )  # fmt: skip
    if len(run.every_step) > 1:
        yield speed(run)


def _part(node: NodeSummary, seconds: float) -> float:
    return seconds / (node.busy_s + node.idle_s) if node.busy_s + node.idle_s else 0.0


def median_step(run: Run) -> tuple[int, tuple[Span, ...]] | None:
    """The step of median length among those whose every piece of work was recorded, the first left out if it can be."""
    recorded: dict[int, list[NodeStep]] = {}
    for each in _all(run):
        if each.spans:
            recorded.setdefault(each.step, []).append(each)
    whole = {step: parts for step, parts in recorded.items() if len(parts) == len(run.summary.per_node)}
    walls = sorted((each.wall_s, each.step) for each in run.steps if each.step in whole)
    if not walls:
        return None
    later = [each for each in walls if each[1] != run.steps[0].step] or walls
    step = later[(len(later) - 1) // 2][1]
    parts = sorted(whole[step], key=lambda each: each.node)
    begin = min(each.start for each in parts)
    return step, tuple(
        Span(name_of(part.node), span.kind, span.start - begin, span.end - begin)
        for part in parts
        for span in part.spans
        if span.kind not in ("send", "receive")
    )


def speed(run: Run) -> Figure:
    """Samples finished per second in stretches of equal length, with what was done again; nothing is left out."""
    begin = run.every_step[0].at - run.every_step[0].wall_s
    length = run.every_step[-1].at - begin
    typical = statistics.median(each.wall_s for each in run.every_step)
    count = max(1, min(_SPEED_POINTS, int(length / max(2 * typical, 1e-9))))
    done = [0.0] * count
    for each in run.every_step:
        # A step's samples came evenly over its time, which may be longer than a stretch.
        first, last = (each.at - each.wall_s - begin) / length * count, (each.at - begin) / length * count
        for place in range(max(0, int(first)), min(count - 1, int(last)) + 1):
            overlap = min(last, place + 1) - max(first, place)
            done[place] += each.samples * max(0.0, overlap) / max(last - first, 1e-12)
    stretch = length / count
    middles = tuple((place + 0.5) * stretch for place in range(count))
    return Figure(
        "speed", "Speed", "lines", "seconds", "samples per second",
        (Series("samples/s", middles, tuple(each / stretch for each in done)),),
        marks=tuple(Mark(each.at - begin, _reason(each)) for each in run.summary.recoveries),
        caption=f"Over stretches of {seconds_text(stretch)}; evaluations and checkpoints take their time too." + (
            " Marked: a new generation of the ring." if run.summary.recoveries else ""),
        from_zero=True,
    )  # fmt: skip


def _reason(event: Regrouped) -> str:
    if event.lost:
        return f"{', '.join(name_of(node) for node in event.lost)} lost, healed in {seconds_text(event.seconds)}"
    return f"generation {event.generation}"


def _idle_text(summary: Summary) -> str:
    workers = [each for each in summary.per_node if each.role != "server"]
    busy, idle = sum(each.busy_s for each in workers), sum(each.idle_s for each in workers)
    if not busy + idle:
        return ""
    return f"{idle / (busy + idle):.0%} of all nodes' time in training steps was idle" + (
        ", dedicated servers apart." if len(workers) < len(summary.per_node) else "."
    )


# -- energy -------------------------------------------------------------------------------------------------------------


def _energy(run: Run) -> Iterable[Figure]:
    nodes = run.summary.per_node
    loads = dict(zip((each.node for each in nodes if each.power is not None), run.summary.loads, strict=True))
    if all(each.energy_source == "modelled" for each in nodes):
        names = tuple(name_of(each.node) for each in nodes)
        parts = (
            Series("being on", names, tuple(loads[each.node].idle_j for each in nodes)),
            Series("working", names, tuple(loads[each.node].work_j for each in nodes)),
            Series("bytes", names, tuple(loads[each.node].bytes_j for each in nodes)),
        )
        yield Figure(
            "energy", "Energy by node (modelled)", "stacked", "node", "joules", parts,
            caption="Idle watts times time, more watts times busy time, nanojoules times bytes.",
        )  # fmt: skip
        return
    known = [each for each in nodes if each.energy_j is not None]
    names = tuple(f"{name_of(each.node)} ({each.energy_source})" for each in known)
    sources = " and ".join(sorted({each.energy_source for each in known if each.energy_source}))
    yield Figure(
        "energy", f"Energy by node ({sources})", "bars", "node", "joules",
        (Series("energy", names, tuple(each.energy_j or 0.0 for each in known)),),
    )  # fmt: skip


def _energy_text(summary: Summary) -> str:
    total = summary.energy_j
    devices = ", ".join(sorted({each.power.name for each in summary.per_node if each.power is not None}))
    text = f"{total:.3g} J in training steps, all nodes together." if total is not None else ""
    if any(each.energy_source == "modelled" for each in summary.per_node):
        text += (
            f" Modelled joules restate time and bytes in other units; no meter was read. Watts of: {devices}. With idle "
            "watts, busy watts and nanojoules per byte each half or half as much again, the total varies by 50 % either way."
        )
    if any(each.energy_source == "estimated" for each in summary.per_node):
        text += " Estimated: one meter saw several nodes; its joules are theirs by the time each was busy."
    return text


# -- nodes --------------------------------------------------------------------------------------------------------------


def _bytes(summary: Summary) -> Iterable[Figure]:
    nodes = [each.node for each in summary.per_node]
    names = tuple(map(name_of, nodes))
    if any(each.sent_to for each in summary.per_node):
        rows = tuple(
            Series(name_of(each.node), names, tuple(float(each.sent_to.get(to, 0)) or math.nan for to in nodes))
            for each in summary.per_node
        )
        caption = "Tensor payload from the node of the row to that of the column, evaluations included."
        yield Figure("links", "Bytes by link", "heat", "to", "from", rows, caption=caption)
    sent = Series("sent", names, tuple(float(each.bytes_sent) for each in summary.per_node))
    received = Series("received", names, tuple(float(each.bytes_received) for each in summary.per_node))
    if any((*sent.y, *received.y)):
        caption = "Tensor payload in training steps."
        yield Figure("bytes", "Bytes by node", "bars", "node", "bytes", (sent, received), caption=caption)


def _memory(summary: Summary) -> Iterable[Figure]:
    known = [each for each in summary.per_node if each.peak_rss_bytes]
    if known:
        names = tuple(name_of(each.node) for each in known)
        values = tuple((each.peak_rss_bytes or 0) / 2**20 for each in known)
        caption = "The largest resident size of each node's process; torch itself is about 220 MiB of it."
        yield Figure("memory", "Peak memory", "bars", "node", "MiB", (Series("peak", names, values),), caption=caption)


def _table(summary: Summary) -> Table:
    rows = []
    for each in summary.per_node:
        cause = max(each.idle_causes, key=lambda cause: each.idle_causes[cause]) if each.idle_causes else ""
        energy = f"{each.energy_j:.3g} J {each.energy_source}" if each.energy_j is not None else "?"
        rows.append((
            _title(each), ", ".join(each.segments), count_text(each.params), seconds_text(each.busy_s),
            f"{each.idle_fraction:.0%}", cause, bytes_text(each.bytes_sent), bytes_text(each.bytes_received),
            bytes_text(each.peak_rss_bytes) if each.peak_rss_bytes else "?", energy,
        ))  # fmt: skip
    columns = (
        "node", "layers", "parameters", "busy", "idle", "waits most for", "sent", "received", "peak memory",
        "energy",
    )  # fmt: skip
    return Table("Every node", columns, tuple(rows))


def _recoveries(summary: Summary) -> Table:
    rows = tuple(
        (
            str(each.step), each.reason, ", ".join(name_of(node) for node in each.lost), seconds_text(each.notice_s),
            seconds_text(each.seconds), str(each.repeated), each.source,
        )
        for each in summary.recoveries
    )  # fmt: skip
    columns = ("step", "reason", "lost", "noticed after", "healed in", "steps again", "from")
    return Table("What happened", columns, rows)


def _highlights(summary: Summary) -> tuple[tuple[str, str], ...]:
    workers = [each for each in summary.per_node if each.role != "server"]
    idle = sum(each.idle_s for each in workers) / max(1e-12, sum(each.busy_s + each.idle_s for each in workers))
    found = [("loss", f"{summary.loss.last:.4g}" if summary.loss.last is not None else "none")]
    if summary.bits_per_byte is not None:
        found.append(("test bits per byte", f"{summary.bits_per_byte:.3f}"))
    elif summary.accuracy is not None:
        found.append(("test accuracy", f"{summary.accuracy:.1%}"))
    if summary.samples_per_s is not None and summary.step_s is not None:
        found += [("samples/s", count_text(summary.samples_per_s)), ("a step", seconds_text(summary.step_s.median))]
    found += [("idle", f"{idle:.0%}"), ("bytes sent", bytes_text(summary.bytes_total))]
    if summary.energy_j is not None:
        sources = ", ".join(sorted({each.energy_source or "" for each in summary.per_node}))
        found.append((f"{sources} energy", f"{summary.energy_j:.3g} J"))
    return tuple(found)


def _facts(run: Run) -> tuple[tuple[str, str], ...]:
    summary, facts = run.summary, run.started.facts
    found = [
        ("outcome", summary.outcome + (f": {summary.error}" if summary.error else "")),
        ("started", run.started.wall_clock.replace("T", " ").replace("+00:00", " UTC")),
        ("took", seconds_text(summary.wall_s)),
        ("strategy", summary.strategy),
        ("nodes", str(summary.nodes)),
        ("batch", f"{summary.batch_size} samples in {summary.microbatches} microbatches"),
        ("wire", summary.wire),
        ("seed", str(summary.seed)),
        ("threads per node", str(summary.threads)),
        ("exactness", _EXACTNESS.get(summary.exactness, summary.exactness)),
        ("ringtmp", run.started.version),
        ("torch", str(facts.get("torch", "?"))),
        ("Python", str(facts.get("python", "?"))),
        ("processor", str(facts.get("capability", "?"))),
        ("platform", str(facts.get("platform", "?"))),
    ]
    if summary.lab_scale != 1:
        found.append(("devices slowed to", f"{summary.lab_scale:.3g} of what was asked"))
    if summary.weights_sha256:
        found.append(("weights", summary.weights_sha256))
    found.append(("settings", msgspec.json.encode(run.started.config).decode()))
    return tuple(found)
