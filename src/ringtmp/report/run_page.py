"""The page of one training run, from its events and nothing else.

Pure: events in, Page out. Steps that were done again after a loss count once, except in the picture of the speed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable

import msgspec

from ringtmp.metrics.energy import Load
from ringtmp.metrics.events import Regrouped
from ringtmp.metrics.fold_events import work_in
from ringtmp.metrics.summary import NodeSummary, Summary, loads_of
from ringtmp.report import learning_curves
from ringtmp.report.page_content import Figure, Mark, Page, Section, Series, Span, Table
from ringtmp.report.run_timeline import Run
from ringtmp.report.theme import in_order
from ringtmp.units import bytes_text, count_text, joules_text, seconds_text

_SPEED_POINTS = 120
_EXACTNESS = {
    "bits": "exact to the bits",
    "replay": "the same bits every time",
    "steps": "the same batches as one process",
    "stream": "the order of batches cannot be reproduced",
}
_PARTS_TEXT = (
    "The run was stopped and resumed. Figures, bytes and joules are of all its parts, with every step once: a step that was "
    "lost with what came after a checkpoint was done again. Times are those of the parts added up, without what lay between."
)


def page(run: Run) -> Page:
    summary = run.summary
    sections = [
        Section(
            "loss",
            "Loss" if summary.accuracy is None else "Loss and accuracy",
            figures=(*learning_curves.loss(run), *learning_curves.scores(run), *learning_curves.predicted(run)),
            tables=tuple(learning_curves.epochs(run)),
        ),
        Section("time", "Where the time goes", _idle_text(summary), figures=tuple(_time(run))),
        Section("nodes", "Nodes", figures=(*_bytes(summary), *_memory(summary)), tables=(_table(summary),)),
    ]
    if any(each.energy_j is not None for each in summary.per_node):
        sections.insert(2, Section("energy", "Energy", _energy_text(summary), figures=tuple(_energy(run))))
    if summary.recoveries:
        sections.append(Section("recoveries", "Recoveries", tables=(_recoveries(summary),)))
    if len(summary.parts) > 1:
        sections.append(Section("parts", "Parts", _PARTS_TEXT, tables=(_parts(summary),)))
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
    return f"{node.name} (server)" if node.role == "server" else node.name


# -- time ---------------------------------------------------------------------------------------------------------------


def _time(run: Run) -> Iterable[Figure]:
    nodes = run.summary.per_node
    names = tuple(each.name for each in nodes)
    parts = (
        ("idle", "Idle time by cause", sorted({each for node in nodes for each in node.idle_causes}),
         [node.idle_causes for node in nodes], "Time in training steps when a node has nothing to do."),
        ("busy", "Busy time by kind of work", in_order(each for node in nodes for each in node.busy_kinds),
         [node.busy_kinds for node in nodes], "The rest is idle. A throttled processor counts as busy. Mail: taking messages "
         "and deciding what to do."),
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
            caption=f"Step {step + 1}, of median length among those recorded in full"
            + (", in the last part of the run" if len(run.parts) > 1 else "") + ". Pale: waiting.",
        )  # fmt: skip
    if sum(len(part.every_step) for part in run.parts) > 1:
        yield speed(run)


def _part(node: NodeSummary, seconds: float) -> float:
    return seconds / (node.busy_s + node.idle_s) if node.busy_s + node.idle_s else 0.0


def median_step(run: Run) -> tuple[int, tuple[Span, ...]] | None:
    """Of the last part that has one recorded in full."""
    done = next((found for part in reversed(run.parts) if (found := part.typical_step())), ())
    if not done:
        return None
    name = run.summary.name_of
    return done[0].step, tuple(Span(name(node), kind, start, end) for node, kind, start, end in work_in(done))


def speed(run: Run) -> Figure:
    """Samples finished per second in stretches of equal length, with what was done again; nothing is left out."""
    begin = run.began_s
    every = [(part.run_s(each.at) - begin, each) for part in run.parts for each in part.every_step]
    length = every[-1][0]
    typical = statistics.median(each.wall_s for _, each in every)
    count = max(1, min(_SPEED_POINTS, int(length / max(2 * typical, 1e-9))))
    done = [0.0] * count
    for ended, each in every:
        # A step's samples came evenly over its time, which may be longer than a stretch.
        first, last = (ended - each.wall_s) / length * count, ended / length * count
        for place in range(max(0, int(first)), min(count - 1, int(last)) + 1):
            overlap = min(last, place + 1) - max(first, place)
            done[place] += each.samples * max(0.0, overlap) / max(last - first, 1e-12)
    stretch = length / count
    middles = tuple((place + 0.5) * stretch for place in range(count))
    marks = [
        Mark(part.run_s(each.at) - begin, _reason(run.summary, each)) for part in run.parts for each in part.recoveries
    ]
    marks += [Mark(part.before_s - begin, text) for part, text in run.resumed]
    return Figure(
        "speed", "Speed", "lines", "seconds", "samples per second",
        (Series("samples/s", middles, tuple(each / stretch for each in done)),),
        marks=tuple(sorted(marks, key=lambda each: each.x)),
        caption=f"Over stretches of {seconds_text(stretch)}; evaluations, checkpoints and steps that were lost take their "
        "time too." + (" Marked: a new generation of the ring." if run.summary.recoveries else ""),
        from_zero=True,
    )  # fmt: skip


def _reason(summary: Summary, event: Regrouped) -> str:
    if event.lost:
        return f"{', '.join(map(summary.name_of, event.lost))} lost, healed in {seconds_text(event.seconds)}"
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
    if all(each.energy_source == "modelled" for each in nodes):
        names = tuple(each.name for each in nodes)
        loads = [
            (node, load)
            for part, there in zip(run.parts, run.nodes, strict=True)
            for node, load in loads_of(there.values(), part.started.facts.get("lab_scale", 1.0)).items()
        ]

        def joules(kind: Callable[[Load], float]) -> tuple[float, ...]:
            return tuple(sum(kind(load) for node, load in loads if node == each.node) for each in nodes)

        parts = (
            Series("being on", names, joules(lambda load: load.idle_j)),
            Series("working", names, joules(lambda load: load.work_j)),
            Series("bytes", names, joules(lambda load: load.bytes_j)),
        )
        yield Figure(
            "energy", "Energy by node (modelled)", "stacked", "node", "joules", parts,
            caption="Idle watts times time, more watts times busy time, nanojoules times bytes.",
        )  # fmt: skip
        return
    known = [each for each in nodes if each.energy_j is not None]
    names = tuple(f"{each.name} ({each.energy_source})" for each in known)
    sources = " and ".join(sorted({each.energy_source for each in known if each.energy_source}))
    yield Figure(
        "energy", f"Energy by node ({sources})", "bars", "node", "joules",
        (Series("energy", names, tuple(each.energy_j or 0.0 for each in known)),),
    )  # fmt: skip


def _energy_text(summary: Summary) -> str:
    total = summary.energy_j
    devices = ", ".join(sorted({each.power.name for each in summary.per_node if each.power is not None}))
    text = f"{joules_text(total)} in training steps, all nodes together." if total is not None else ""
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
    names = tuple(map(summary.name_of, nodes))
    if any(each.sent_to for each in summary.per_node):
        rows = tuple(
            Series(each.name, names, tuple(float(each.sent_to.get(to, 0)) or math.nan for to in nodes))
            for each in summary.per_node
        )
        caption = "Tensor payload from the node of the row to that of the column, evaluations included."
        if any(each.outcome == "cut off" for each in summary.parts):
            caption += " Of parts that were cut off only the bytes by node are known."
        yield Figure("links", "Bytes by link", "heat", "to", "from", rows, caption=caption)
    sent = Series("sent", names, tuple(float(each.bytes_sent) for each in summary.per_node))
    received = Series("received", names, tuple(float(each.bytes_received) for each in summary.per_node))
    if any((*sent.y, *received.y)):
        caption = "Tensor payload in training steps."
        yield Figure("bytes", "Bytes by node", "bars", "node", "bytes", (sent, received), caption=caption)


def _memory(summary: Summary) -> Iterable[Figure]:
    known = [each for each in summary.per_node if each.peak_rss_bytes]
    if known:
        names = tuple(each.name for each in known)
        values = tuple((each.peak_rss_bytes or 0) / 2**20 for each in known)
        caption = "The largest resident size of each node's process; torch itself is about 220 MiB of it."
        yield Figure("memory", "Peak memory", "bars", "node", "MiB", (Series("peak", names, values),), caption=caption)


def _table(summary: Summary) -> Table:
    rows = []
    for each in summary.per_node:
        cause = max(each.idle_causes, key=lambda cause: each.idle_causes[cause]) if each.idle_causes else ""
        energy = f"{joules_text(each.energy_j)} {each.energy_source}" if each.energy_j is not None else "?"
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
            str(each.step), each.reason, ", ".join(map(summary.name_of, each.lost)), seconds_text(each.notice_s),
            seconds_text(each.seconds), str(each.repeated), each.source,
        )
        for each in summary.recoveries
    )  # fmt: skip
    columns = ("step", "reason", "lost", "noticed after", "healed in", "steps again", "from")
    return Table("What happened", columns, rows)


def _parts(summary: Summary) -> Table:
    rows = tuple(
        (
            str(number), each.started.replace("T", " ").replace("+00:00", " UTC"), str(each.first_step), str(each.steps),
            str(each.lost_steps), str(each.nodes), seconds_text(each.seconds), each.outcome,
        )
        for number, each in enumerate(summary.parts, start=1)
    )  # fmt: skip
    columns = ("part", "started", "after step", "to step", "steps lost", "nodes", "took", "outcome")
    return Table("Where it was stopped and resumed", columns, rows)


def _highlights(summary: Summary) -> tuple[tuple[str, str], ...]:
    workers = [each for each in summary.per_node if each.role != "server"]
    idle = sum(each.idle_s for each in workers) / max(1e-12, sum(each.busy_s + each.idle_s for each in workers))
    found = [("loss", f"{summary.loss.last:.4g}" if summary.loss.last is not None else "none")]
    if summary.bits_per_byte is not None:
        found.append(("test bits per byte", f"{summary.bits_per_byte:.3f}"))
    if summary.perplexity is not None:
        found.append(("test perplexity", f"{summary.perplexity:.4g}"))
    elif summary.accuracy is not None:
        found.append(("test accuracy", f"{summary.accuracy:.1%}"))
    if summary.predicted is not None and summary.predicted.accuracy is not None:
        found.append(("wrong before learning", f"{1 - summary.predicted.accuracy:.1%}"))
    if summary.samples_per_s is not None and summary.step_s is not None:
        found += [("samples/s", count_text(summary.samples_per_s)), ("a step", seconds_text(summary.step_s.median))]
    found += [("idle", f"{idle:.0%}"), ("bytes sent", bytes_text(summary.bytes_total))]
    if summary.energy_j is not None:
        sources = ", ".join(sorted({each.energy_source or "" for each in summary.per_node}))
        found.append((f"{sources} energy", joules_text(summary.energy_j)))
    return tuple(found)


def _facts(run: Run) -> tuple[tuple[str, str], ...]:
    summary, facts = run.summary, run.started.facts
    found = [
        ("outcome", summary.outcome + (f": {summary.error}" if summary.error else "")),
        ("started", run.parts[0].started.wall_clock.replace("T", " ").replace("+00:00", " UTC")),
        ("took", seconds_text(summary.wall_s) + (f" in {len(run.parts)} parts" if len(run.parts) > 1 else "")),
        ("strategy", summary.strategy),
        *([("why", summary.strategy_chosen)] if summary.strategy_chosen else []),
        ("nodes", str(summary.nodes)),
        ("batch", f"{summary.batch_size} samples in {summary.microbatches} microbatches"),
        ("wire", summary.wire),
        ("seed", str(summary.seed)),
        ("threads per node", str(summary.threads)),
        ("exactness", _EXACTNESS.get(summary.exactness, summary.exactness)),
        ("numeric mode", summary.numeric_mode),
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
