"""What a node will need at its peak, part by part, before anything is started.

    process + weights + gradients + optimizer + stored activations + boundary tensors + working space + snapshots

Gradients: with a tree of sums (`sum_tree.py`), sums of parts that wait for others are counted too.
Optimizer: where members of a group share its state, a member's part of it.
Stored activations are held from a microbatch's forward to its backward. With gpipe every visit holds all of them. With
1f1b the tail holds one; visit v of p holds 2 (p-1-v) + 1 (a visit and a transfer each, there and back) where all take
about the same time, more behind a slow link or node, and never more than the window. So cuts are searched with the
formula, and what is told and refused counts what the simulation held, and one more; two more where processes share
cores, and who is ahead of whom is the system's choice. Boundary tensors: what came and
waits, and what has left and is not yet acknowledged, one more than is held. Working space: a backward builds gradients of
activations while it frees them (and the gradient of a weight that deeper layers share waits for its own microbatch, as
a boundary tensor does); the largest layer's stored bytes stand for it, with the float32 copy of its largest weight that is
kept small; and where there is plenty of memory a
process keeps some of what it has freed. Snapshots are of weights and optimizer
state, a node's own and those it holds for the one before it in the ring (the master's own stay with it). In memory there are
two of each, the whole one and the next; on disk pieces of each are in memory while it is sent or received. What they take
where it is left to the nodes (auto) is never more than there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ringtmp.errors import DoesNotFit
from ringtmp.plan.devices import Device
from ringtmp.plan.layer_costs import CostTable
from ringtmp.plan.route import MASTER, Route
from ringtmp.plan.simulate_pipeline import RingOptions
from ringtmp.plan.simulated_step import Simulated
from ringtmp.units import bytes_text

#: A compute process with torch loaded, before it holds a single weight.
PROCESS_BYTES = 230 * 2**20
#: Of a snapshot on disk, while it is written, sent or received: a few pieces.
PIECES_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class MemoryForecast:
    device: str
    free_bytes: float
    process_bytes: float
    weight_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    stored_bytes: float
    boundary_bytes: float
    working_bytes: float
    snapshot_bytes: float = 0.0

    @property
    def total_bytes(self) -> float:
        return (
            self.process_bytes + self.weight_bytes + self.gradient_bytes + self.optimizer_bytes + self.stored_bytes
            + self.boundary_bytes + self.working_bytes + self.snapshot_bytes
        )  # fmt: skip

    def with_more(self, vectors: float, keeps: bool) -> MemoryForecast:
        """As many more vectors of what is trained, and a kept copy of weights and optimizer state."""
        kept = self.weight_bytes + self.optimizer_bytes if keeps else 0.0
        return replace(
            self,
            boundary_bytes=self.boundary_bytes + vectors * self.gradient_bytes,
            snapshot_bytes=self.snapshot_bytes + kept,
        )

    def in_shares(self, nodes: int, largest_bytes: float) -> MemoryForecast:
        """A replica's, where what is trained is cut over so many nodes. The largest layer is whole while it runs, with its
        gradients, and on its way to and from the others."""
        frozen = self.weight_bytes - self.gradient_bytes
        return replace(
            self,
            weight_bytes=frozen + self.gradient_bytes / nodes + largest_bytes,
            gradient_bytes=self.gradient_bytes / nodes + largest_bytes,
            optimizer_bytes=self.optimizer_bytes / nodes,
            boundary_bytes=2 * largest_bytes,
        )

    @property
    def missing_bytes(self) -> float:
        return max(0.0, self.total_bytes - self.free_bytes)


def held(visit: int, visits: int, options: RingOptions, safe: bool = False, members: int = 1) -> int:
    """Microbatches a visit holds where all take about the same time; `safe`: whatever happens. Each of several `members` has
    its share of them."""
    window = options.window_for(visits)
    there_are = options.microbatches * (1 + options.staleness)
    if safe or options.widest == 1:
        return min(there_are, options.pipeline.held(visit, visits, window, safe))
    narrow = options.pipeline.held(visit, visits, -(-window // options.widest), safe)
    return min(there_are, -(-narrow * options.widest // members))


def held_in(simulated: Simulated, route: Route, options: RingOptions, devices: Sequence[Device]) -> tuple[int, ...]:
    """By visit: what the simulation held, and one more where the window allows it; two more on a device that takes turns
    with others, which goes on while its neighbour waits for a core and finds what came while it waited itself."""
    seen: dict[int, int] = {}
    for node, each in enumerate(simulated.nodes):
        for visit, most in zip(route.on(node), each.held, strict=True):
            more = most + (2 if devices[node].takes_turns else 1)
            seen[visit.index] = max(more, seen.get(visit.index, 0))
    visits = len(route.visits)
    return tuple(min(seen[index], held(index, visits, options, safe=True)) for index in range(visits))


def segment_bytes(table: CostTable, first: int, stop: int, count: int, largest_working: float) -> float:
    """A visit's part of a node's memory when it holds `count` microbatches: all but process and working space."""
    stage = table.stage(first, stop)
    weights = stage.weight_bytes + stage.gradient_bytes + stage.optimizer_bytes
    boundary = (count + 1) * (stage.input_bytes + (stage.output_bytes if stop < table.count else 0.0))
    boundary += count * stage.waiting_bytes
    return weights + table.stored_by(count) * stage.stored_bytes + boundary + largest_working


def forecast(
    table: CostTable,
    route: Route,
    devices: Sequence[Device],
    counts: Sequence[int],
    process_bytes: float = PROCESS_BYTES,
    protect: str = "off",
) -> tuple[MemoryForecast, ...]:
    """One forecast per node of the route. `counts`: microbatches held, by visit. `protect`: how snapshots are kept."""
    found = []
    for node, device in enumerate(devices):
        weights = gradients = optimizer = stored = boundary = working = 0.0
        for visit in route.on(node):
            stage = table.stage(visit.first, visit.stop)
            count = counts[visit.index]
            weights += stage.weight_bytes
            gradients += stage.gradient_bytes
            optimizer += table.optimizer_bytes(visit.first, visit.stop, len(visit.members))
            stored += table.stored_by(count) * stage.stored_bytes
            boundary += (count + 1) * (stage.input_bytes + (stage.output_bytes if visit.stop < table.count else 0.0))
            boundary += count * stage.waiting_bytes if visit.stop < table.count else 0.0
            exchanged = table.gradients[visit.stop] - table.gradients[visit.first]
            boundary += table.exchanged(len(visit.members)) * exchanged
            working = max(working, largest_working(table, visit.first, visit.stop))
        without = MemoryForecast(
            device.name, device.memory_bytes, process_bytes + device.extra_bytes, weight_bytes=weights,
            gradient_bytes=gradients, optimizer_bytes=optimizer, stored_bytes=stored, boundary_bytes=boundary,
            working_bytes=working,
        )  # fmt: skip
        spare = device.memory_bytes - without.total_bytes
        without = replace(without, snapshot_bytes=_snapshot_bytes(table, route, node, protect, spare))
        found.append(_with_kept(without, device))
    return tuple(found)


def _with_kept(without: MemoryForecast, device: Device) -> MemoryForecast:
    """Of what comes and goes with every microbatch or step, what the process keeps when it is free. Never more than there
    is: a node that is short of memory after its first step keeps nothing (`resources.mind_memory`)."""
    room = max(0.0, device.memory_bytes - without.total_bytes - 1.0)  # a byte less: sums of fractions are not exact
    return replace(without, working_bytes=without.working_bytes + min(_kept_bytes(without, device), room))


def _kept_bytes(without: MemoryForecast, device: Device) -> float:
    passing = without.gradient_bytes + without.stored_bytes + without.boundary_bytes + without.working_bytes
    return min(device.kept_bytes, passing / 2)


def _snapshot_bytes(table: CostTable, route: Route, node: int, protect: str, spare_bytes: float) -> float:
    if protect not in ("auto", "memory", "disk") or len(route.nodes()) == 1:
        return 0.0
    owners = [node] if node <= MASTER + 1 else [node - 1, node]
    if node == MASTER:
        owners.append(max(route.nodes()))  # the last worker's clockwise neighbour
    states = [[_state_bytes(table, i) for visit in route.on(owner) for i in visit.layers] for owner in owners]
    in_memory = 2 * sum(map(sum, states))
    on_disk = sum(min(PIECES_BYTES, max(each, default=0.0)) for each in states)
    if protect != "auto":
        return in_memory if protect == "memory" else on_disk
    return next((each for each in (in_memory, on_disk) if each <= spare_bytes), 0.0)


def _state_bytes(table: CostTable, layer: int) -> float:
    """What a snapshot holds. Frozen parameters are not in it, nor is what little else gets no gradient counted."""
    stage, known = table.stage(layer, layer + 1), table.layers[layer]
    return stage.weight_bytes - (known.weight_bytes - known.gradient_bytes) + stage.optimizer_bytes


def replica_forecast(
    table: CostTable, device: Device, works: bool, process_bytes: float = PROCESS_BYTES
) -> MemoryForecast:
    """A node that holds the whole model: a data-parallel worker, or a server (which stores no activations). What it
    receives of a model while it adds up counts as boundary."""
    stage = table.stage(0, table.count)
    stored = stage.stored_bytes if works else 0.0
    working = largest_working(table, 0, table.count) if works else 0.0
    without = MemoryForecast(
        device.name, device.memory_bytes, process_bytes + device.extra_bytes, weight_bytes=stage.weight_bytes,
        gradient_bytes=stage.gradient_bytes, optimizer_bytes=stage.optimizer_bytes, stored_bytes=stored,
        boundary_bytes=stage.gradient_bytes, working_bytes=working,
    )  # fmt: skip
    return replace(without, working_bytes=working + _kept_bytes(without, device))


def largest_working(table: CostTable, first: int, stop: int) -> float:
    return max(table.working[first:stop], default=0.0)


def require_fit(forecasts: Sequence[MemoryForecast], microbatches: int) -> None:
    """DoesNotFit with the missing bytes of every device that lacks some."""
    short = [each for each in forecasts if each.missing_bytes > 0]
    if not short:
        return
    listed = "; ".join(
        f"{each.device} needs {bytes_text(each.total_bytes)} and has {bytes_text(each.free_bytes)} free, "
        f"{round(each.missing_bytes)} bytes ({bytes_text(each.missing_bytes)}) too few"
        for each in short
    )
    raise DoesNotFit(
        f"{listed}: add a device, use more microbatches than {microbatches}, a smaller --window, or other --cuts"
        + (", or --protect checkpoint" if any(each.snapshot_bytes for each in short) else "")
    )


def refuse_single_layers(table: CostTable, devices: Sequence[Device], process_bytes: float = PROCESS_BYTES) -> None:
    """DoesNotFit for a layer that no device could hold, even alone and with one microbatch in flight."""
    roomiest = max(devices, key=lambda device: device.memory_bytes - device.extra_bytes)
    for index, layer in enumerate(table.layers):
        alone = segment_bytes(table, index, index + 1, 1, largest_working(table, index, index + 1))
        need = process_bytes + roomiest.extra_bytes + alone
        if need > roomiest.memory_bytes:
            raise DoesNotFit(
                f"layer {index} ({layer.name}) alone needs {bytes_text(need)} ({round(need)} bytes) and the roomiest device, "
                f"{roomiest.name}, has {bytes_text(roomiest.memory_bytes)} free: split the layer, or use a larger device or "
                "more microbatches"
            )
