"""Before a plan is made: how fast every device runs one of the model's own layers, and how fast the lines are.

All devices run the layer at the same time, for the same span of wall time, under whatever quota they have: the time a run
takes on average is what a plan can count on. Only the layer's graph travels; its tensors are made up on the spot. Then
lines are tried (lines.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec
import torch

from ringtmp.metrics.events import LineTried
from ringtmp.model import portable_layer
from ringtmp.model.deferred_gradients import ROOM, at_once
from ringtmp.model.frozen_formats import FLOAT32
from ringtmp.model.portable_layer import Layer, Value
from ringtmp.model.run_graph import Program, dtype_of
from ringtmp.plan.devices import LayerCost
from ringtmp.plan.memory_forecast import PROCESS_BYTES
from ringtmp.plan.route import MASTER
from ringtmp.runtime import check_node_replies, compute_device
from ringtmp.runtime.base_leader import HELLO_LIMIT_S, BaseLeader, Start
from ringtmp.runtime.gradients_at_segment_edges import run_backward
from ringtmp.runtime.mailbox import Endpoint, Mail
from ringtmp.strategies.ring.link_trials import (
    AGAIN_S,
    ALL_LINES_S,
    ALONE_S,
    PAIR_S,
    Attempt,
    Lines,
    Pair,
    disjoint,
    echo,
    rounds_of,
)
from ringtmp.strategies.ring.trial_results import Seen, better_told, doubtful, settled, uneven
from ringtmp.system.container_limits import group_limits
from ringtmp.system.resources import own_memory_bytes, rss_bytes
from ringtmp.wire.address import Address
from ringtmp.wire.message_parts import FREE
from ringtmp.wire.messages import Crossing, Echo, Echoed, Meet, Sample, Timed, Tried, Try

#: So long every device is busy, its first round included: a weak one is still at it when a strong one has done many.
MEASURE_S = 1.2
#: Of weights with their gradients, and of stored activations: more than this is in no small device's caches anyway.
WORKING_BYTES = 48 * 2**20
FILL = 0.01


def sample_of(
    layers: Sequence[Layer],
    costs: Sequence[LayerCost],
    crossing: Callable[[bool, Value], Crossing],
    samples: int,
    nodes: int,
    compute: str = FLOAT32,
) -> tuple[int, Sample] | None:
    """The dearest layer that gets what another layer gives (only then is it known what enters); None: there is none. A head
    over a large vocabulary is left out if it can be: after a loss the devices still hold their own layers beside it."""
    entering = [tuple(crossing(True, each) for each in layer.takes(index, True)) for index, layer in enumerate(layers)]
    inner = [
        index
        for index in range(1, len(layers))
        if entering[index] and costs[index].largest_s > 0 and all(FREE not in each.rest for each in entering[index])
    ]
    if not inner:
        return None
    small = [at for at in inner if costs[at].weight_bytes + costs[at].gradient_bytes <= WORKING_BYTES]
    dearest = max(small or inner, key=lambda index: costs[index].largest_s)
    cost = costs[dearest]
    copies = _within(-(-len(layers) // nodes), cost.weight_bytes + cost.gradient_bytes)
    held = _within(nodes, copies * cost.at(samples).stored_bytes)
    graph = portable_layer.encode(layers[dearest])
    return dearest, Sample(graph, entering[dearest], samples, copies, held, compute)


def _within(wanted: int, each_bytes: float) -> int:
    return max(1, min(wanted, int(WORKING_BYTES // max(each_bytes, 1))))


class Trial:
    """A sample made ready: copies of the layer, and what enters them."""

    def __init__(self, sample: Sample) -> None:
        layer = portable_layer.decode(sample.graph)
        where = compute_device.here()
        self._program = Program(layer.train, str(where))
        self._compute = sample.compute
        # Not zeros: pages never written to are all one page, which no cache ever loses.
        self._copies = [
            {
                each.name: torch.full(each.shape, FILL, dtype=dtype_of(each.dtype), device=where).requires_grad_(
                    each.trainable
                )
                for each in layer.tensors
            }
            for _ in range(sample.copies)
        ]
        self._held = [[_made_up(crossing, sample.samples) for crossing in sample.inputs] for _ in range(sample.held)]

    def round(self) -> int:
        """Every microbatch forward through every copy, then backward. Returns how many runs of the layer that was."""
        gone = [(entering, owned, self._forward(entering, owned)) for entering in self._held for owned in self._copies]
        for _, _, outputs in gone:
            if outputs:
                run_backward(outputs, [torch.ones_like(each) for each in outputs])
        compute_device.finish()
        return len(gone)

    def _forward(self, entering: Sequence[torch.Tensor], owned: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        values = [each.clone() for each in entering] if self._program.changes_inputs else list(entering)
        with compute_device.going_forward(self._compute):
            return [each for each in self._program.run(values, owned, at_once(owned.values())) if each.requires_grad]


def _made_up(crossing: Crossing, samples: int) -> torch.Tensor:
    shape = (samples, *crossing.rest) if crossing.per_sample else crossing.rest
    dtype, where = dtype_of(crossing.dtype), compute_device.here()
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype, device=where)
    return torch.full(shape, FILL, dtype=dtype, device=where).requires_grad_()


def run_sample(sample: Sample, clock_s: float = MEASURE_S) -> float:
    """Seconds of one forward and backward, on average over all but the first of the rounds that begin within `clock_s` on the
    wall, and at least one."""
    trial = Trial(sample)
    limit = time.monotonic() + clock_s
    trial.round()  # warms up
    runs, began = 0, time.monotonic()
    while runs == 0 or time.monotonic() < limit:
        runs += trial.round()
    ROOM.leave()
    return (time.monotonic() - began) / runs


def timed(sample: Sample, frozen_bytes: int = 0) -> Timed:
    """`frozen_bytes`: what is kept of layers that stay here or go when the next plan is laid out, which counts them itself."""
    limits, memory = group_limits(), own_memory_bytes()
    on_accelerator = compute_device.free_bytes()
    small = msgspec.structs.replace(sample, copies=1, held=1)
    Trial(small).round()
    rss = rss_bytes()  # libraries loaded, and what a process keeps in any case; not what the trial itself takes
    roomy = memory - rss > 3 * WORKING_BYTES
    taken = max(0, rss - frozen_bytes)
    if on_accelerator is not None:  # layers lie there, and no quota slows them down
        return Timed(run_sample(sample), PROCESS_BYTES, on_accelerator + PROCESS_BYTES)
    return Timed(run_sample(sample if roomy else small), taken, memory, limits.cores, limits.period_s)


class Answers:
    """On a node without a plan: does what the master asks it to try."""

    def __init__(self) -> None:
        self._attempt: Attempt | None = None

    def __call__(self, endpoint: Endpoint, mail: Mail) -> bool:
        """False: it was something else."""
        message = mail.message
        if isinstance(message, Echo):
            echo(endpoint, mail, message)
        elif isinstance(message, Echoed):
            self._heard(endpoint, mail, message)
        elif not isinstance(message, Sample | Meet | Try):
            return False
        elif isinstance(message, Sample):
            endpoint.post(MASTER, timed(message, endpoint.snapshots.frozen_bytes))
        elif isinstance(message, Meet):
            endpoint.connect_all({})  # drop the previous ones, if any
            endpoint.meet(message.addresses)
        else:
            self._attempt = Attempt(endpoint, message.peer, message.limit_s)
        return True

    def _heard(self, endpoint: Endpoint, mail: Mail, answer: Echoed) -> None:
        if self._attempt is None:
            return
        self._attempt.heard(mail, answer)
        if (line := self._attempt.line) is not None:
            peer, self._attempt = self._attempt.peer, None
            endpoint.post(MASTER, Tried(peer, line.down_bytes_per_s, line.up_bytes_per_s, line.latency_s))


class DeviceTrials(BaseLeader):
    def __init__(self, start: Start) -> None:
        super().__init__(start)
        self._timed: dict[int, Timed] = {}
        self._lines = Lines(self.endpoint, self._until_node)

    def look(
        self, addresses: Mapping[int, Address], sample: Sample, pairs: Callable[[Sequence[int]], list[list[Pair]]] = rounds_of,
        apart: Collection[frozenset[int]] = (),
    ) -> Seen:  # fmt: skip
        """At every node, the master's own too. `pairs` says in which rounds lines between others are tried; those `apart` are
        known not to reach each other."""
        others = sorted(addresses.keys() - {MASTER})
        rounds = [[pair for pair in each if frozenset(pair) not in apart] for each in pairs(others)]
        self.gather(others)
        for node in others:
            # While they are busy with the sample, their connections are made.
            if met := {peer for each in rounds for pair in each if node in pair for peer in pair} - {node}:
                self.endpoint.post(node, Meet({peer: addresses[peer] for peer in sorted(met)}))
        told = self._told(others, sample)
        if uneven(told.values()):
            # It may have been busy with something else: what is slow by itself is slow twice.
            told = better_told(told, self._told(others, sample))
        until_s = self.endpoint.clock() + ALL_LINES_S
        lines = self._lines.tried(others)
        once = self._lines.between(rounds, until_s, PAIR_S, self._pump)
        # Those at work beside it may have held a pair up: one that looks slow has another try, by itself. Silent ones load
        # nothing, and come first.
        doubted = doubtful(lines, once)
        alone = [[pair] for pair in doubted if once[pair] is not None]
        silent = disjoint([pair for pair in doubted if once[pair] is None])
        again = self._lines.between([*silent, *alone], self.endpoint.clock() + AGAIN_S, ALONE_S, self._pump)
        seen = Seen(told, lines, settled(lines, once, again))
        for (source, target), line in {**{(MASTER, node): line for node, line in lines.items()}, **seen.pairs}.items():
            found = (0.0, 0.0, 0.0) if line is None else (line.down_bytes_per_s, line.up_bytes_per_s, line.latency_s)
            self._log.write(LineTried(time.monotonic(), source, target, *found))
        return seen

    def _told(self, others: Sequence[int], sample: Sample) -> dict[int, Timed]:
        """Everybody's run of the sample, all at the same time."""
        self._timed = {}
        for node in others:
            self.endpoint.post(node, sample)
        own = timed(sample, self.endpoint.snapshots.frozen_bytes)
        for node in others:
            self._until_node(node, lambda node=node: node in self._timed, "to be measured", HELLO_LIMIT_S)  # type: ignore[misc]
        return {MASTER: own, **self._timed}

    def _hear(self, mail: Mail) -> bool:
        if isinstance(mail.message, Timed):
            self._timed[mail.sender] = check_node_replies.timed(mail.message)
            return True
        return self._lines.heard(mail)
