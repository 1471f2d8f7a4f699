"""Events become a summary: what `--json` prints and the table shows. Reads events and nothing else."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from ringtmp.errors import UsageError
from ringtmp.metrics.energy import Energy, Load, Power, Source, Spent, attribute, loads
from ringtmp.metrics.events import HomesMet, NodeEnded, NodeStarted, NodeStep, Regrouped
from ringtmp.metrics.fold_events import Part
from ringtmp.metrics.test_then_train_error import Predicted, predicted

_Key = TypeVar("_Key")
_Number = TypeVar("_Number", int, float)
#: From the strongest claim to the weakest: what is added up is as good as its weakest part.
_SOURCES: tuple[Source, ...] = ("measured", "estimated", "modelled")

#: Of a record that stops somewhere: nothing in it says how the run ended, or whether it has.
UNFINISHED = "unfinished"
#: Numeric mode.
USUAL_MODE = "float32"
NO_END = "the event log has no end: the run is still going, was killed, or could not write its last events"


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
    device: str = ""  # its own name, where it has one

    @property
    def name(self) -> str:
        return self.device or node_name(self.node)


def node_name(node: int) -> str:
    """Of a node without a name of its own."""
    return "master" if node == 0 else f"node {node}"


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
    left_out_text: str = ""  # one line for people: who trains, who does not, why, and how all would


class Considered(msgspec.Struct, frozen=True):
    """A way to train that `--strategy auto` looked at before the first step."""

    strategy: str  # as --strategy takes it; or the master's device alone
    step_s: float | None  # as forecast
    problem: str = ""  # why it cannot be
    gives_up: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()  # options that would have allowed it


class PartSummary(msgspec.Struct, frozen=True):
    """From a start, or a resumption, to its end."""

    started: str  # wall clock
    first_step: int
    steps: int  # done when it ended, without those a later part did again
    lost_steps: int  # finished, and done again by a later part
    nodes: int
    seconds: float
    outcome: str  # "cut off": it was killed, or its machine was


class Summary(msgspec.Struct, frozen=True):
    """Of the whole run; what a run can change when it is resumed is that of its last part."""

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
    schedule_chosen: bool = False  # by the plan, with --schedule auto
    layer_ways: dict[str, str] = {}  # where a strategy chooses: how the gradient of each layer travels
    forecast: Forecast | None = None
    parts: tuple[PartSummary, ...] = ()
    skipped_samples: int = 0  # of a stream, after losses: nobody had them any more
    bad_lines: int = 0  # of standard input in the last part: left out, as asked
    predicted: Predicted | None = None  # with --test-then-train
    #: Against eager PyTorch before the start: "model", "layers", "evaluation" alone, "traced" (docs/models.md), or not ("").
    checked: str = ""
    perplexity: float | None = None  # of the test part, if it is text
    strategy_chosen: str = ""  # by --strategy auto: why, in one line
    considered: tuple[Considered, ...] = ()  # by --strategy auto
    sum_tree: int = 1  # parts of a batch that are added up as a tree
    numeric_mode: str = USUAL_MODE  # within one mode bits repeat (docs/exactness.md)
    meetings: tuple[HomesMet, ...] = ()  # with another home
    drifts: bool = False  # it is trained otherwise than by one process, not only with other rounding

    def name_of(self, node: int) -> str:
        """Its device's own name, where it has one."""
        return next((each.name for each in self.per_node if each.node == node), node_name(node))

    @property
    def energy_j(self) -> float | None:
        """Of all nodes; None where that of one is unknown."""
        known = [each.energy_j for each in self.per_node if each.energy_j is not None]
        return sum(known) if len(known) == len(self.per_node) else None

    @property
    def loads(self) -> tuple[Load, ...]:
        """What the energy model is applied to, for `sensitivity`: nodes whose device is known."""
        return tuple(loads_of(self.per_node, self.lab_scale).values())


def _exactness(parts: Sequence[Part]) -> str:
    """What could be promised at the start; less, if something else was found since."""
    promised = str(parts[-1].started.facts.get("exactness", "bits"))
    if parts[-1].strayed:
        return "stream"
    return "replay" if promised == "bits" and any(part.unlike for part in parts) else promised


def of_parts(parts: Sequence[Part], run_dir: str) -> Summary:
    per_node = _whole_run(nodes_by_part(parts))
    try:
        return _summary(parts, per_node, run_dir)
    except (KeyError, msgspec.ValidationError) as error:
        raise UsageError(
            f"the line of events.jsonl that begins part {len(parts)} of {run_dir} is damaged ({error}): without it there is "
            "no summary; put a copy of the file back. Checkpoints do not need it"
        ) from error


def _summary(parts: Sequence[Part], per_node: tuple[NodeSummary, ...], run_dir: str) -> Summary:
    last = parts[-1]
    started, ended = last.started, last.ended
    config, facts = started.config, started.facts
    steps = [each for part in parts for each in part.steps]
    # A score of before the run was resumed is not that of what has been trained since.
    latest = next((part for part in reversed(parts) if part.steps), last)
    evaluation = latest.evaluations[-1] if latest.evaluations else None
    walls = [each.wall_s for each in steps]
    return Summary(
        strategy=config["ring"]["strategy"],
        model=config["model"]["name"],
        data=facts["data"],
        seed=config["training"]["seed"],
        nodes=next((len(part.nodes) for part in reversed(parts) if part.nodes), 0),
        steps=_reached(last),
        batch_size=facts["batch_size"],
        microbatches=facts["microbatches"],
        window=facts.get("window", 0),
        schedule=facts.get("schedule", config["ring"]["schedule"]),
        schedule_chosen=facts.get("schedule_chosen", False),
        layer_ways=facts.get("layer_ways", {}),
        staleness=config["training"]["staleness"],
        sum_tree=config["training"].get("sum_tree", 1),
        wire=config["training"]["wire"],
        threads=facts["threads"],
        numeric_mode=facts.get("numeric_mode", USUAL_MODE),
        exactness=_exactness(parts),
        emulated=bool(facts.get("emulated")),
        lab_scale=facts.get("lab_scale", 1.0),
        outcome=ended.outcome if ended else UNFINISHED,
        wall_s=sum(part.seconds for part in parts),
        step_s=_spread(walls),
        samples_per_s=sum(each.samples for each in steps) / sum(walls) if walls else None,
        loss=FirstLast(steps[0].loss if steps else None, steps[-1].loss if steps else None),
        test_loss=evaluation.loss if evaluation else None,
        accuracy=evaluation.accuracy if evaluation else None,
        bits_per_byte=evaluation.bits_per_byte if evaluation else None,
        weights_sha256=ended.weights_sha256 if ended else None,
        bytes_total=sum(each.bytes_sent for each in per_node),
        placement_bytes=sum(end.placement_bytes for part in parts for node, end in part.ends.items() if node != 0),
        recoveries=tuple(each for part in parts for each in part.recoveries),
        meetings=tuple(each for part in parts for each in part.meetings),
        warnings=(*(each for part in parts for each in part.warnings), *(() if ended else (NO_END,))),
        error=ended.error if ended else None,
        run_dir=run_dir,
        per_node=per_node,
        microbatches_chosen=facts.get("microbatches_chosen", False),
        forecast=msgspec.convert(facts["forecast"], Forecast) if "forecast" in facts else None,
        parts=tuple(_part(part, part is last) for part in parts),
        # What was skipped before the run was resumed is known to it then.
        skipped_samples=facts.get("skipped_samples", 0) + sum(each.skipped for each in last.strayed),
        bad_lines=last.left_out,
        predicted=predicted(steps),
        checked=facts.get("checked", ""),
        drifts=facts.get("drifts", False),
        strategy_chosen=parts[0].started.facts.get("strategy_chosen", ""),
        considered=msgspec.convert(parts[0].started.facts.get("considered", ()), tuple[Considered, ...]),
        perplexity=evaluation.perplexity if evaluation else None,
    )


def _reached(part: Part) -> int:
    return part.steps[-1].step + 1 if part.steps else part.first_step


def _part(part: Part, last: bool) -> PartSummary:
    outcome = part.ended.outcome if part.ended else UNFINISHED if last else "cut off"
    return PartSummary(
        part.started.wall_clock,
        part.first_step,
        _reached(part),
        part.lost_steps,
        len(part.nodes),
        part.seconds,
        outcome,
    )


# -- nodes --------------------------------------------------------------------------------------------------------------


def nodes_by_part(parts: Sequence[Part]) -> list[dict[int, NodeSummary]]:
    """What every node did in each part."""
    found = []
    for part in parts:
        bare = {
            node: _node(part.nodes[node], part.node_steps.get(node, ()), part.ends.get(node), part.powers.get(node))
            for node in sorted(part.nodes)
        }
        spent = {node: _spent(each, _metered(part.node_steps.get(node, ()))) for node, each in bare.items()}
        energy = attribute(spent, part.started.facts.get("lab_scale", 1.0))
        found.append({node: _with_energy(each, energy.get(node)) for node, each in bare.items()})
    return found


def loads_of(nodes: Iterable[NodeSummary], scale: float) -> dict[int, Load]:
    """What the energy model is applied to, of nodes whose device is known."""
    return loads({each.node: _spent(each, None) for each in nodes}, scale)


def _whole_run(by_part: Sequence[Mapping[int, NodeSummary]]) -> tuple[NodeSummary, ...]:
    """Every node over all parts. One that is no longer there holds nothing."""
    numbers = sorted({node for nodes in by_part for node in nodes})
    together = {node: _together([nodes[node] for nodes in by_part if node in nodes]) for node in numbers}
    here = next((nodes for nodes in reversed(by_part) if nodes), {})
    return tuple(
        together[node] if node in here else msgspec.structs.replace(together[node], segments=(), params=0)
        for node in numbers
    )


def _together(of_parts: Sequence[NodeSummary]) -> NodeSummary:
    last = of_parts[-1]
    if len(of_parts) == 1:
        return last
    worked = [each for each in of_parts if each.busy_s + each.idle_s] or [last]
    busy, idle = sum(each.busy_s for each in of_parts), sum(each.idle_s for each in of_parts)
    sources = [each.energy_source for each in worked if each.energy_source is not None]
    known = len(sources) == len(worked)
    return msgspec.structs.replace(
        last,
        busy_s=busy,
        idle_s=idle,
        idle_fraction=idle / (busy + idle) if busy + idle else 0.0,
        idle_causes=_sums(each.idle_causes for each in of_parts),
        busy_kinds=_sums(each.busy_kinds for each in of_parts),
        bytes_sent=sum(each.bytes_sent for each in of_parts),
        bytes_received=sum(each.bytes_received for each in of_parts),
        peak_rss_bytes=max((each.peak_rss_bytes for each in of_parts if each.peak_rss_bytes), default=None),
        energy_j=sum(each.energy_j or 0.0 for each in worked) if known else None,
        energy_source=max(sources, key=_SOURCES.index) if known else None,
        sent_to=_sums(each.sent_to for each in of_parts),
    )


def _sums(dicts: Iterable[Mapping[_Key, _Number]]) -> dict[_Key, _Number]:
    found: dict[_Key, _Number] = {}
    for each in dicts:
        for key, value in each.items():
            found[key] = found[key] + value if key in found else value
    return found


def _node(
    start: NodeStarted, steps: Sequence[NodeStep], end: NodeEnded | None, power: Power | None
) -> NodeSummary:  # fmt: skip
    busy = sum(each.busy_s for each in steps)
    idle = sum(each.idle_s for each in steps)
    return NodeSummary(
        node=start.node,
        role=start.role,
        segments=start.segments,
        params=start.parameters,
        busy_s=busy,
        idle_s=idle,
        idle_fraction=idle / (busy + idle) if busy + idle else 0.0,
        idle_causes=_sums(each.idle for each in steps),
        bytes_sent=sum(each.sent_bytes for each in steps),
        bytes_received=sum(each.received_bytes for each in steps),
        peak_rss_bytes=end.peak_rss_bytes if end else None,
        busy_kinds=_sums(each.busy for each in steps),
        power=power,
        sent_to=end.sent_to if end else {},
        device=start.device,
    )


def _spent(node: NodeSummary, metered_j: float | None) -> Spent:
    return Spent(
        node.power, node.busy_s + node.idle_s, node.busy_s, node.bytes_sent + node.bytes_received, metered_j
    )  # fmt: skip


def _metered(steps: Sequence[NodeStep]) -> float | None:
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
