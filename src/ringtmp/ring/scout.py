"""Before a plan is made: how fast every device runs one of the model's own layers, and how fast its line is.

All devices run the layer at the same time, for the same span of wall time, under whatever quota they have: the time a run
takes on average is what a plan can count on. Only the layer's graph travels; its tensors are made up on the spot. Then
lines are tried (lines.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median_low

import msgspec
import torch

from ringtmp.errors import ProtocolError
from ringtmp.limits import group_limits
from ringtmp.metrics.events import EventLog
from ringtmp.model import portable
from ringtmp.model.execute import Program, dtype_of
from ringtmp.model.portable import Layer
from ringtmp.plan.device import CURVE_BYTE_CPU_S, NETWORK_MESSAGE_CPU_S, Device, LayerCost, Link, quota_of
from ringtmp.plan.memory import PROCESS_BYTES
from ringtmp.resources import own_memory_bytes, rss_bytes
from ringtmp.ring.edges import run_backward
from ringtmp.ring.endpoint import Endpoint, Mail
from ringtmp.ring.lead import HELLO_LIMIT_S, Crew, Lead
from ringtmp.ring.lines import Line, Lines, echo
from ringtmp.wire.message import Crossing, Echo, Sample, Timed

#: So long every device is busy, its first round included: a weak one is still at it when a strong one has done many.
MEASURE_S = 1.2
#: Devices with the same quota that differ by no more than this are taken to be alike: a plan that believes in what was
#: noise gives the lucky one too much to do.
ALIKE = 0.12
#: Of weights with their gradients, and of stored activations: more than this is in no small device's caches anyway.
WORKING_BYTES = 48 * 2**20
FILL = 0.01


@dataclass(frozen=True)
class Seen:
    """What was found out of one device."""

    told: Timed  # on the wall, without a model
    line: Line | None = None  # to the master; None: not tried


def sample_of(
    layers: Sequence[Layer], costs: Sequence[LayerCost], outputs: Sequence[Sequence[Crossing]], samples: int, nodes: int
) -> tuple[int, Sample] | None:
    """The dearest layer that gets what another layer gives (only then is it known what enters); None: there is none."""
    inner = [index for index in range(1, len(layers)) if outputs[index - 1] and costs[index].largest_s > 0]
    if not inner:
        return None
    dearest = max(inner, key=lambda index: costs[index].largest_s)
    cost = costs[dearest]
    copies = _within(-(-len(layers) // nodes), cost.weight_bytes + cost.gradient_bytes)
    held = _within(nodes, copies * cost.at(samples).stored_bytes)
    return dearest, Sample(portable.encode(layers[dearest]), tuple(outputs[dearest - 1]), samples, copies, held)


def _within(wanted: int, each_bytes: float) -> int:
    return max(1, min(wanted, int(WORKING_BYTES // max(each_bytes, 1))))


class Trial:
    """A sample made ready: copies of the layer, and what enters them."""

    def __init__(self, sample: Sample) -> None:
        layer = portable.decode(sample.graph)
        self._program = Program(layer.train)
        # Not zeros: pages never written to are all one page, which no cache ever loses.
        self._copies = [
            {
                each.name: torch.full(each.shape, FILL, dtype=dtype_of(each.dtype)).requires_grad_(each.trainable)
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
        return len(gone)

    def _forward(self, entering: Sequence[torch.Tensor], owned: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        values = [each.clone() for each in entering] if self._program.changes_inputs else list(entering)
        return [each for each in self._program.run(values, owned) if each.requires_grad]


def _made_up(crossing: Crossing, samples: int) -> torch.Tensor:
    shape = (samples, *crossing.rest) if crossing.per_sample else crossing.rest
    dtype = dtype_of(crossing.dtype)
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype)
    return torch.full(shape, FILL, dtype=dtype).requires_grad_()


def run_sample(sample: Sample, clock_s: float = MEASURE_S) -> float:
    """Seconds of one forward and backward, on average over all but the first of the rounds that begin within `clock_s` on the
    wall, and at least one."""
    trial = Trial(sample)
    limit = time.monotonic() + clock_s
    trial.round()  # warms up
    runs, began = 0, time.monotonic()
    while runs == 0 or time.monotonic() < limit:
        runs += trial.round()
    return (time.monotonic() - began) / runs


def timed(sample: Sample) -> Timed:
    limits, memory = group_limits(), own_memory_bytes()
    small = msgspec.structs.replace(sample, copies=1, held=1)
    Trial(small).round()
    rss = rss_bytes()  # libraries loaded, and what a process keeps in any case; not what the trial itself takes
    roomy = memory - rss > 3 * WORKING_BYTES
    return Timed(run_sample(sample if roomy else small), rss, memory, limits.cores, limits.period_s)


def answer(endpoint: Endpoint, mail: Mail) -> bool:
    """On a node without a plan: do what a scout asks. False: it was something else."""
    message = mail.message
    if isinstance(message, Sample):
        endpoint.post(mail.sender, timed(message))
    elif isinstance(message, Echo):
        echo(endpoint, mail, message)
    else:
        return False
    return True


def described(devices: Sequence[Device], seen: Sequence[Seen], profiled_s: float, threads: int) -> tuple[Device, ...]:
    """Devices with the pace and the lines that were found. `profiled_s`: processor time of the sample, as costs have it.
    A latency is that of two ends; the master's is taken to be half of the shortest. A line that was not tried is taken to
    be as the slowest that was."""
    found = []
    paces_s = _alike([look.told for look in seen])
    lines = [look.line for look in seen if look.line is not None]
    own_s = min((line.latency_s for line in lines), default=0.0) / 2
    slowest = min(lines, key=lambda line: line.up_bytes_per_s, default=Line(math.inf, math.inf, 0.0))
    # The master's own line carries at least what the fastest of the others does.
    fastest = max((max(line.up_bytes_per_s, line.down_bytes_per_s) for line in lines), default=math.inf)
    master = Line(fastest, fastest, 2 * own_s)
    for node, (device, look) in enumerate(zip(devices, seen, strict=True)):
        line = master if node == 0 else look.line or slowest
        told = look.told
        quota = quota_of(told.cores, told.period_s, threads)
        speed = profiled_s / paces_s[node] / (quota.share if quota is not None else 1.0)
        # Work of the node itself around its layers takes as much longer as the layers do.
        link = Link(
            line.up_bytes_per_s,
            line.down_bytes_per_s,
            max(line.latency_s - own_s, 0.0),
            NETWORK_MESSAGE_CPU_S / speed,
            CURVE_BYTE_CPU_S / speed,
        )
        # Library code that processes share counts as taken, and so as memory there is: a cap does not count it.
        extra, memory = told.rss_bytes - PROCESS_BYTES, told.memory_bytes
        found.append(
            replace(device, speed=speed, quota=quota, link=link, extra_bytes=extra, memory_bytes=memory)
        )  # fmt: skip
    return tuple(found)


def _alike(told: Sequence[Timed]) -> list[float]:
    """Seconds of a run on each device; those of one kind that are close to its middle have the middle."""
    found = []
    for each in told:
        kind = [other.seconds for other in told if (other.cores, other.period_s) == (each.cores, each.period_s)]
        middle = median_low(kind)  # one that was measured, so that two that differ are not both moved
        found.append(middle if abs(each.seconds - middle) <= ALIKE * middle else each.seconds)
    return found


class Scout(Lead):
    def __init__(self, endpoint: Endpoint, crew: Crew, log: EventLog) -> None:
        super().__init__(endpoint, crew, log)
        self._timed: dict[int, Timed] = {}
        self._lines = Lines(endpoint, self._until_node)

    def look(self, others: Sequence[int], sample: Sample) -> dict[int, Seen]:
        """Of every node, the master's own first."""
        self.gather(others)
        for node in others:
            self.endpoint.post(node, sample)
        mine = Seen(timed(sample))
        for node in others:
            self._until_node(node, lambda node=node: node in self._timed, "to be measured", HELLO_LIMIT_S)  # type: ignore[misc]
        lines = self._lines.tried(others)
        return {0: mine} | {node: Seen(self._timed[node], lines.get(node)) for node in others}

    def _hear(self, mail: Mail) -> bool:
        if isinstance(mail.message, Timed):
            self._timed[mail.sender] = mail.message
        elif isinstance(mail.message, Echo):
            self._lines.heard()
        else:
            raise ProtocolError(f"node {mail.sender} sent {type(mail.message).__name__} while it was measured")
        return True
