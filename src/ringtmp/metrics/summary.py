"""Events become a summary: what `--json` prints and the table shows. Reads events and nothing else."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

import msgspec

from ringtmp.metrics.energy import Energy, Load, Power, Source, Spent, attribute, loads
from ringtmp.metrics.events import (
    CheckpointSaved,
    Evaluated,
    Event,
    LineTried,
    NodeEnded,
    NodeStarted,
    NodeStep,
    Regrouped,
    RunEnded,
    RunStarted,
    SnapshotWhole,
    StepDone,
    Warned,
)  # fmt: skip


class Spread(msgspec.Struct, frozen=True):
    median: float
    p90: float


class FirstLast(msgspec.Struct, frozen=True):
    first: float | None
    last: float | None


class NodeSummary(msgspec.Struct, frozen=True):
    node: int
    role: str
    segments: tuple[str, ...]
    params: int
    busy_s: float
    idle_s: float
    idle_fraction: float
    idle_causes: dict[str, float]
    bytes_sent: int
    bytes_received: int
    peak_rss_bytes: int | None
    energy_j: float | None = None
    energy_source: Source | None = None
    busy_kinds: dict[str, float] = {}  # seconds of busy_s by kind of work
    power: Power | None = None  # what is known of its device
    sent_to: dict[int, int] = {}  # tensor payload of the whole run by receiver, evaluations included


class NodeForecast(msgspec.Struct, frozen=True):
    node: int
    device: str
    memory_bytes: float  # at its peak
    free_bytes: float | None  # None: nobody knows
    busy_s: float  # of a step


class Forecast(msgspec.Struct, frozen=True):
    """What the plan said before the first step."""

    step_s: float
    idle_fraction: float
    per_node: tuple[NodeForecast, ...]
    left_out: tuple[str, ...] = ()


class Summary(msgspec.Struct, frozen=True):
    strategy: str
    model: str
    data: str
    seed: int
    nodes: int
    steps: int
    batch_size: int
    microbatches: int
    window: int
    schedule: str
    staleness: int
    wire: str
    threads: int
    exactness: str
    emulated: bool
    lab_scale: float
    outcome: str
    wall_s: float
    step_s: Spread | None
    samples_per_s: float | None
    loss: FirstLast
    test_loss: float | None
    accuracy: float | None
    bits_per_byte: float | None
    weights_sha256: str | None
    bytes_total: int
    placement_bytes: int
    recoveries: tuple[Regrouped, ...]
    warnings: tuple[str, ...]
    error: str | None
    run_dir: str
    per_node: tuple[NodeSummary, ...]
    microbatches_chosen: bool = False  # by the plan, with --microbatches auto
    forecast: Forecast | None = None
    checked: str = ""  # against eager PyTorch before the start: "model", "layers" alone, or not ("")

    @property
    def energy_j(self) -> float | None:
        """Of all nodes; None where that of one is unknown."""
        known = [each.energy_j for each in self.per_node if each.energy_j is not None]
        return sum(known) if len(known) == len(self.per_node) else None

    @property
    def loads(self) -> tuple[Load, ...]:
        """What the energy model is applied to, for `sensitivity`: nodes whose device is known."""
        return tuple(loads({each.node: _spent(each, None) for each in self.per_node}, self.lab_scale).values())


def summarise(stream: Iterable[Event], run_dir: str) -> Summary | None:
    """Of the last start in the log; None when nothing was started."""
    started: RunStarted | None = None
    nodes: dict[int, NodeStarted] = {}
    ends: dict[int, NodeEnded] = {}
    node_steps: dict[int, list[NodeStep]] = {}
    steps: list[StepDone] = []
    evaluation: Evaluated | None = None
    ended: RunEnded | None = None
    warnings: list[str] = []
    recoveries: list[Regrouped] = []
    for event in stream:
        if isinstance(event, RunStarted):
            started, ended, evaluation = event, None, None
            nodes, ends, node_steps, steps = {}, {}, {}, []
            recoveries.clear()
        elif isinstance(event, NodeStarted):
            nodes[event.node] = event
        elif isinstance(event, NodeEnded):
            ends[event.node] = event
        elif isinstance(event, NodeStep):
            node_steps.setdefault(event.node, []).append(event)
        elif isinstance(event, StepDone):
            steps.append(event)
        elif isinstance(event, Evaluated):
            evaluation = event
        elif isinstance(event, RunEnded):
            ended = event
        elif isinstance(event, Regrouped):
            recoveries.append(event)
            nodes = {node: each for node, each in nodes.items() if each.generation == event.generation}
            # What is done again counts once.
            steps = [each for each in steps if each.step < event.step]
            node_steps = {node: [each for each in done if each.step < event.step] for node, done in node_steps.items()}
        elif isinstance(event, Warned):
            warnings.append(event.text)
        else:
            assert isinstance(event, CheckpointSaved | SnapshotWhole | LineTried)
    if started is None:
        return None
    config, facts = started.config, started.facts
    bare = {node: _node(nodes[node], node_steps.get(node, []), ends.get(node)) for node in sorted(nodes)}
    spent = {node: _spent(each, _metered(node_steps.get(node, []))) for node, each in bare.items()}
    energy = attribute(spent, facts.get("lab_scale", 1.0))
    per_node = tuple(_with_energy(each, energy.get(node)) for node, each in bare.items())
    walls = [each.wall_s for each in steps]
    last_at = ended.at if ended else steps[-1].at if steps else started.at
    return Summary(
        strategy=config["ring"]["strategy"],
        model=config["model"]["name"],
        data=facts["data"],
        seed=config["training"]["seed"],
        nodes=len(per_node),
        steps=steps[-1].step + 1 if steps else started.first_step,
        batch_size=facts["batch_size"],
        microbatches=facts["microbatches"],
        window=facts.get("window", 0),
        schedule=config["ring"]["schedule"],
        staleness=config["training"]["staleness"],
        wire=config["training"]["wire"],
        threads=facts["threads"],
        exactness=facts.get("exactness", "bits"),
        emulated=bool(facts.get("emulated")),
        lab_scale=facts.get("lab_scale", 1.0),
        outcome=ended.outcome if ended else "running",
        wall_s=last_at - started.at,
        step_s=_spread(walls),
        samples_per_s=sum(each.samples for each in steps) / sum(walls) if walls else None,
        loss=FirstLast(steps[0].loss if steps else None, steps[-1].loss if steps else None),
        test_loss=evaluation.loss if evaluation else None,
        accuracy=evaluation.accuracy if evaluation else None,
        bits_per_byte=evaluation.bits_per_byte if evaluation else None,
        weights_sha256=ended.weights_sha256 if ended else None,
        bytes_total=sum(each.bytes_sent for each in per_node),
        placement_bytes=sum(end.placement_bytes for node, end in ends.items() if node != 0),
        recoveries=tuple(recoveries),
        warnings=tuple(warnings),
        error=ended.error if ended else None,
        run_dir=run_dir,
        per_node=per_node,
        microbatches_chosen=facts.get("microbatches_chosen", False),
        forecast=msgspec.convert(facts["forecast"], Forecast) if "forecast" in facts else None,
        checked=facts.get("checked", ""),
    )


def _node(start: NodeStarted, steps: list[NodeStep], end: NodeEnded | None) -> NodeSummary:
    busy = sum(each.busy_s for each in steps)
    idle = sum(each.idle_s for each in steps)
    causes: dict[str, float] = {}
    kinds: dict[str, float] = {}
    for each in steps:
        for cause, seconds in each.idle.items():
            causes[cause] = causes.get(cause, 0.0) + seconds
        for kind, seconds in each.busy.items():
            kinds[kind] = kinds.get(kind, 0.0) + seconds
    return NodeSummary(
        start.node,
        start.role,
        start.segments,
        start.parameters,
        busy,
        idle,
        idle / (busy + idle) if busy + idle else 0.0,
        causes,
        sum(each.sent_bytes for each in steps),
        sum(each.received_bytes for each in steps),
        end.peak_rss_bytes if end else None,
        busy_kinds=kinds,
        power=end.power if end else None,
        sent_to=end.sent_to if end else {},
    )


def _spent(node: NodeSummary, metered_j: float | None) -> Spent:
    return Spent(
        node.power, node.busy_s + node.idle_s, node.busy_s, node.bytes_sent + node.bytes_received, metered_j
    )  # fmt: skip


def _metered(steps: list[NodeStep]) -> float | None:
    read = [each.joules for each in steps if each.joules is not None]
    return sum(read) if read and len(read) == len(steps) else None


def _with_energy(node: NodeSummary, energy: Energy | None) -> NodeSummary:
    if energy is None:
        return node
    return msgspec.structs.replace(node, energy_j=energy.joules, energy_source=energy.source)


def _spread(values: list[float]) -> Spread | None:
    if not values:
        return None
    ordered = sorted(values)
    return Spread(statistics.median(ordered), ordered[min(len(ordered) - 1, int(len(ordered) * 0.9))])
