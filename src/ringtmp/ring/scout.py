"""Before a plan is made: how fast every device runs one of the model's own layers, and how fast its line is.

All devices run the layer at the same time, for the same span of wall time, under whatever quota they have: the time a run
takes on average is what a plan can count on. Only the layer's graph travels; its tensors are made up on the spot. Lines
are tried one after another, each way by itself. The shortest of a few round trips of an empty message is twice the
latency. A small and a larger message differ by what the rate alone explains: latency, the start of a connection and what
a shaped line lets through at once are in both. A slow line gets less to carry, so that all together take a second or so.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from ringtmp.errors import ProtocolError
from ringtmp.limits import group_limits
from ringtmp.metrics.events import EventLog
from ringtmp.model import portable
from ringtmp.model.execute import Program, dtype_of
from ringtmp.model.portable import Layer
from ringtmp.plan.device import CURVE_BYTE_CPU_S, MESSAGE_CPU_S, Device, Link, Quota
from ringtmp.plan.memory import PROCESS_BYTES
from ringtmp.resources import own_memory_bytes, rss_bytes
from ringtmp.ring.edges import run_backward
from ringtmp.ring.endpoint import Endpoint, Mail
from ringtmp.ring.lead import HELLO_LIMIT_S, Crew, Lead
from ringtmp.wire.message import Crossing, Echo, Sample, Timed

MEASURE_S = 0.4
LEAST_RUNS = 2
#: All lines together.
LINES_S = 1.5
PINGS = 5
SMALL_BYTES = 32 * 1024
#: The larger message takes about this long, and is within these sizes.
LARGE_S = 0.04
LARGE_BYTES = (64 * 1024, 2 * 2**20)


@dataclass(frozen=True)
class Seen:
    """What was found out of one device."""

    told: Timed  # on the wall, without a model
    line: Line | None = None  # to the master; None: not tried


@dataclass(frozen=True)
class Line:
    """From the master to a device and back; latencies of both ends are in it."""

    down_bytes_per_s: float
    up_bytes_per_s: float
    latency_s: float  # one way


def sample_of(
    layers: Sequence[Layer], costs_s: Sequence[float], outputs: Sequence[Sequence[Crossing]], samples: int
) -> tuple[int, Sample] | None:
    """The dearest layer that gets what another layer gives (only then is it known what enters); None: there is none."""
    inner = [index for index in range(1, len(layers)) if outputs[index - 1] and costs_s[index] > 0]
    if not inner:
        return None
    dearest = max(inner, key=lambda index: costs_s[index])
    return dearest, Sample(portable.encode(layers[dearest]), tuple(outputs[dearest - 1]), samples)


def run_sample(sample: Sample, clock_s: float = MEASURE_S) -> float:
    """Seconds of one forward and backward, on average over `clock_s` on the wall."""
    layer = portable.decode(sample.graph)
    program = Program(layer.train)
    owned = {
        each.name: torch.zeros(each.shape, dtype=dtype_of(each.dtype)).requires_grad_(each.trainable)
        for each in layer.tensors
    }
    entering = []
    for crossing in sample.inputs:
        shape = (sample.samples, *crossing.rest) if crossing.per_sample else crossing.rest
        tensor = torch.zeros(shape, dtype=dtype_of(crossing.dtype))
        entering.append(tensor.requires_grad_(tensor.is_floating_point()))
    runs, began = -1, time.monotonic()  # the first warms up
    while runs < LEAST_RUNS or time.monotonic() - began < clock_s:
        values = [each.clone() for each in entering] if program.changes_inputs else list(entering)
        outputs = [each for each in program.run(values, owned) if each.requires_grad]
        if outputs:
            run_backward(outputs, [torch.zeros_like(each) for each in outputs])
        runs += 1
        if runs == 0:
            began = time.monotonic()
    return (time.monotonic() - began) / runs


def timed(sample: Sample) -> Timed:
    limits = group_limits()
    seconds = run_sample(sample)
    return Timed(seconds, rss_bytes(), own_memory_bytes(), limits.cores, limits.period_s)


def answer(endpoint: Endpoint, mail: Mail) -> bool:
    """On a node without a plan: do what a scout asks. False: it was something else."""
    message = mail.message
    if isinstance(message, Sample):
        endpoint.post(mail.sender, timed(message))
    elif isinstance(message, Echo):
        if not 0 <= message.back <= SMALL_BYTES + LARGE_BYTES[1]:
            raise ProtocolError(f"node {mail.sender} asks for {message.back} bytes to try a line with")
        endpoint.post(mail.sender, Echo(0), _bytes(message.back))
    else:
        return False
    return True


def _bytes(count: int) -> list[torch.Tensor | None]:
    return [torch.zeros(count, dtype=torch.uint8)] if count else []


def large_bytes(small_s: float) -> int:
    """How much to send after a small message took so long, beyond the round trip."""
    least, most = LARGE_BYTES
    return int(min(max(SMALL_BYTES / max(small_s, 1e-6) * LARGE_S, least), most))


def described(devices: Sequence[Device], seen: Sequence[Seen], profiled_s: float, threads: int) -> tuple[Device, ...]:
    """Devices with the pace and the lines that were found. `profiled_s`: processor time of the sample, as costs have it.
    A latency is that of two ends; the master's is taken to be half of the shortest. A line that was not tried is taken to
    be as the slowest that was."""
    found = []
    lines = [look.line for look in seen if look.line is not None]
    own_s = min((line.latency_s for line in lines), default=0.0) / 2
    slowest = min(lines, key=lambda line: line.up_bytes_per_s, default=Line(math.inf, math.inf, 0.0))
    # The master's own line carries at least what the fastest of the others does.
    fastest = max((max(line.up_bytes_per_s, line.down_bytes_per_s) for line in lines), default=math.inf)
    master = Line(fastest, fastest, 2 * own_s)
    for node, (device, look) in enumerate(zip(devices, seen, strict=True)):
        line = master if node == 0 else look.line or slowest
        told, quota = look.told, None
        pace = profiled_s / told.seconds
        speed = pace
        if told.cores is not None and told.period_s is not None and told.cores < threads:
            # All threads run until what they may use together in a period is used up.
            quota = Quota(told.cores / threads * told.period_s, told.period_s)
            speed = pace / quota.share
        # Work of the node itself around its layers takes as much longer as the layers do.
        link = Link(
            line.up_bytes_per_s,
            line.down_bytes_per_s,
            max(line.latency_s - own_s, 0.0),
            MESSAGE_CPU_S / speed,
            CURVE_BYTE_CPU_S / speed,
        )
        # Library code that processes share counts as taken, and so as memory there is: a cap does not count it.
        extra, memory = told.rss_bytes - PROCESS_BYTES, told.memory_bytes
        found.append(
            replace(device, speed=speed, quota=quota, link=link, extra_bytes=extra, memory_bytes=memory)
        )  # fmt: skip
    return tuple(found)


class Scout(Lead):
    def __init__(self, endpoint: Endpoint, crew: Crew, log: EventLog) -> None:
        super().__init__(endpoint, crew, log)
        self._timed: dict[int, Timed] = {}
        self._echoes = 0

    def look(self, others: Sequence[int], sample: Sample) -> dict[int, Seen]:
        """Of every node, the master's own first."""
        self.gather(others)
        for node in others:
            self.endpoint.post(node, sample)
        mine = Seen(timed(sample))
        self._until(lambda: len(self._timed) == len(others), lambda: "the devices to be measured", HELLO_LIMIT_S)
        lines = self._try_lines(others)
        return {0: mine} | {node: Seen(self._timed[node], lines.get(node)) for node in others}

    def _try_lines(self, others: Sequence[int]) -> dict[int, Line]:
        limit = self.endpoint.clock() + LINES_S
        found = {}
        for node in others:
            if self.endpoint.clock() > limit:
                break
            around_s = min(self._around_s(node, 0, 0) for _ in range(PINGS))
            down = self._rate(around_s, lambda count, node=node: self._around_s(node, count, 0))  # type: ignore[misc]
            up = self._rate(around_s, lambda count, node=node: self._around_s(node, 0, count))  # type: ignore[misc]
            # What the nodes do with a message is counted as their work.
            found[node] = Line(down, up, max(around_s / 2 - 2 * MESSAGE_CPU_S, 0.0))
        return found

    def _rate(self, around_s: float, take_s: Callable[[int], float]) -> float:
        small_s = min(take_s(SMALL_BYTES) for _ in range(2))
        large = large_bytes(small_s - around_s)
        large_s = take_s(SMALL_BYTES + large)
        # A line too fast to tell from the noise is as fast as anything a plan could want.
        return large / max(large_s - small_s, 1e-4)

    def _around_s(self, node: int, there: int, back: int) -> float:
        """Seconds until so many bytes have gone there, and the answer with so many has come back."""
        before, began = self._echoes, self.endpoint.clock()
        self.endpoint.post(node, Echo(back), _bytes(there))
        self._until(lambda: self._echoes > before, lambda: f"node {node} to echo", HELLO_LIMIT_S)
        return self.endpoint.clock() - began

    def _hear(self, mail: Mail) -> bool:
        if isinstance(mail.message, Timed):
            self._timed[mail.sender] = mail.message
        elif isinstance(mail.message, Echo):
            self._echoes += 1
        else:
            raise ProtocolError(f"node {mail.sender} sent {type(mail.message).__name__} while it was measured")
        return True
