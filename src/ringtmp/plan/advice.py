"""What limits a plan, and what would help most: every change is planned and simulated again.

Pure. Limits are shares of the step: how long the busiest node computes, the busiest line sends, or all wait for fill and
drain because there are few microbatches for many visits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from ringtmp.errors import RingError
from ringtmp.plan.devices import Device, Paths
from ringtmp.plan.pipeline_schedules import DEFAULT_SCHEDULE, SCHEDULES
from ringtmp.plan.planner import Plan, PlanOptions, plan
from ringtmp.units import seconds_text

#: A change that gains less is not worth telling.
LEAST_GAIN = 0.005


@dataclass(frozen=True, slots=True)
class Limit:
    """`what`: compute, link, or fill and drain. `share`: of the step, taken by it."""

    what: str
    device: str
    share: float
    text: str


@dataclass(frozen=True, slots=True)
class Gain:
    change: str
    step_s: float
    gain: float  # 0.25: a quarter more samples per second


@dataclass(frozen=True, slots=True)
class Parts:
    """Where the busiest node's step goes; the sum is the step."""

    device: str
    forward_s: float
    backward_s: float  # all gradients, deferred ones too
    update_s: float
    waiting_s: dict[str, float]


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits no schedule beats, in seconds per step."""

    compute_s: float  # T: all work spread over all paces
    link_s: float  # c: the busiest line
    slowest_s: float  # the node with most work, never waiting

    @property
    def ideal_s(self) -> float:
        """Equation (3): max(c, T)."""
        return max(self.compute_s, self.link_s)


def bounds(made: Plan) -> Bounds:
    nodes = made.simulated.nodes
    work = sum(node.busy_s * device.pace for node, device in zip(nodes, made.devices, strict=True))
    return Bounds(
        work / sum(device.pace for device in made.devices),
        max(max(node.up_busy_s, node.down_busy_s) for node in nodes),
        max(node.busy_s for node in nodes),
    )


def limit(made: Plan) -> Limit:
    """The busiest processor or line; fill and drain where neither is busy for most of the step."""
    nodes, step_s = made.simulated.nodes, made.step_s
    worker = max(nodes, key=lambda node: node.busy_s)
    line = max(nodes, key=lambda node: max(node.up_busy_s, node.down_busy_s))
    line_s = max(line.up_busy_s, line.down_busy_s)
    if max(worker.busy_s, line_s) < 0.6 * step_s and len(nodes) > 1:
        share = 1 - max(worker.busy_s, line_s) / step_s
        text = (
            f"fill and drain: {len(made.bounds)} visits share {made.options.ring.microbatches} microbatches, so even the "
            f"busiest device, {worker.device}, waits {share:.0%} of a step"
        )
        return Limit("fill and drain", worker.device, share, text)
    if line_s > worker.busy_s:
        text = f"the link of {line.device}: it carries for {seconds_text(line_s)} of a step of {seconds_text(step_s)}"
        return Limit("link", line.device, line_s / step_s, text)
    text = (
        f"the processor of {worker.device}: it works {seconds_text(worker.busy_s)} of a step of {seconds_text(step_s)}"
    )
    return Limit("compute", worker.device, worker.busy_s / step_s, text)


def parts(made: Plan) -> Parts:
    """Of the node that works most."""
    number, node = max(enumerate(made.simulated.nodes), key=lambda each: each[1].busy_s)
    took: dict[str, float] = {}
    for span in made.simulated.spans:
        if span.node == number:
            took[span.kind] = took.get(span.kind, 0.0) + span.end_s - span.start_s
    # Spans are of one step, busy_s the mean of a few.
    scale = node.busy_s / total if (total := sum(took.values())) else 0.0
    each = {kind: length * scale for kind, length in took.items()}
    backward_s = each.get("backward", 0.0) + each.get("weights", 0.0)
    return Parts(node.device, each.get("forward", 0.0), backward_s, each.get("update", 0.0), node.idle_causes)


def gains(made: Plan, everyone: tuple[Device, ...], may_grow: bool = True) -> tuple[Gain, ...]:
    """What would help, best first. `everyone`: all devices that were offered, left out or not. `may_grow`: another device
    brings a processor of its own."""
    options = made.options
    free = replace(options, cuts=None)
    count = options.ring.microbatches
    tries: list[tuple[str, Callable[[], Plan]]] = []

    def attempt(
        change: str, devices: tuple[Device, ...], with_options: PlanOptions, paths: Paths = made.paths
    ) -> None:  # fmt: skip
        tries.append((change, lambda: plan(made.layers, devices, with_options, paths)))

    if options.cuts is not None or options.keep_all:
        attempt("let the plan choose cuts and devices", everyone, replace(free, keep_all=False))
    workers = made.devices[1:] or made.devices
    common, _ = Counter(device.kind for device in workers).most_common(1)[0]
    like = next(device for device in workers if device.kind == common)
    if may_grow:
        attempt(f"one more device like {like.name}", (*everyone, replace(like, name="one more")), free)
    if len(everyone) > 1:
        paths = {pair: replace(path, bytes_per_s=2 * path.bytes_per_s) for pair, path in made.paths.items()}
        attempt("twice the link rate everywhere", tuple(map(_twice_as_fast, everyone)), free, paths)
        strongest = max(everyone, key=lambda each: each.pace)
        if strongest is not everyone[0]:  # a ring begins and ends at the master, however weak
            attempt(f"starting the run on {strongest.name} alone", (strongest,), replace(free, keep_all=False))
        if options.wire_ratio == 1.0:
            attempt("a bfloat16 wire", everyone, replace(free, wire_ratio=0.5))
        if 2 * count <= options.batch_size:
            attempt(f"{2 * count} microbatches", everyone, replace(free, microbatches=2 * count))
        if count > 1:
            attempt(f"{count // 2} microbatches", everyone, replace(free, microbatches=count // 2))
        if options.schedule == DEFAULT_SCHEDULE.name and not options.any_schedule:
            for name in (each.name for each in SCHEDULES.values() if each.defers_weights):
                attempt(f"the {name} schedule", everyone, replace(free, schedule=name))
        if made.window < count * (1 + options.staleness):
            attempt(f"a window of {2 * made.window}", everyone, replace(free, window=2 * made.window))
    if options.recompute != "none":
        attempt("storing activations instead of computing them again", everyone, replace(free, recompute="none"))
    found = []
    for change, make in tries:
        try:
            other = make()
        except RingError:
            continue  # does not fit: no help
        gain = other.samples_per_s / made.samples_per_s - 1
        if gain > LEAST_GAIN:
            used = len(other.devices)
            who = f", on {used} device{'s' if used > 1 else ''}" if used != len(made.devices) else ""
            found.append(Gain(change + who, other.step_s, gain))
    return tuple(sorted(found, key=lambda each: -each.gain))


def _twice_as_fast(device: Device) -> Device:
    link = device.link
    twice = replace(link, up_bytes_per_s=2 * link.up_bytes_per_s, down_bytes_per_s=2 * link.down_bytes_per_s)
    return replace(device, link=twice)
