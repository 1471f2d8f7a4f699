"""Before a plan is made: how fast every device runs one of the model's own layers, and how fast its line is.

All devices run the layer at the same time, for the same span of wall time, under whatever quota they have: the time a run
takes on average is what a plan can count on. Only the layer's graph travels; its tensors are made up on the spot. Lines
are tried one after another, half a mebibyte each way, until the time for it is over.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ringtmp.errors import ProtocolError
from ringtmp.metrics.events import EventLog
from ringtmp.model import portable
from ringtmp.model.execute import Program, dtype_of
from ringtmp.model.portable import Layer
from ringtmp.plan.device import CURVE_BYTE_CPU_S, MESSAGE_CPU_S, Device, Link
from ringtmp.ring.edges import run_backward
from ringtmp.ring.endpoint import Endpoint, Mail
from ringtmp.ring.lead import HELLO_LIMIT_S, Crew, Lead
from ringtmp.wire.message import Crossing, Echo, Sample, Timed

MEASURE_S = 0.4
LEAST_RUNS = 2
LINES_S = 1.5
ECHO_BYTES = 512 * 1024


@dataclass(frozen=True)
class Seen:
    """What was found out of one device."""

    run_s: float  # one forward and backward of the sample layer, on the wall
    down_bytes_per_s: float | None = None  # from the master; None: not tried
    up_bytes_per_s: float | None = None
    latency_s: float = 0.0  # one way


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


def answer(endpoint: Endpoint, mail: Mail) -> bool:
    """On a node without a plan: do what a scout asks. False: it was something else."""
    message = mail.message
    if isinstance(message, Sample):
        endpoint.post(mail.sender, Timed(run_sample(message)))
    elif isinstance(message, Echo):
        rate = rate_of(mail)
        endpoint.post(mail.sender, Echo(rate), [torch.zeros(ECHO_BYTES, dtype=torch.uint8)])
    else:
        return False
    return True


def rate_of(mail: Mail) -> float:
    """Of the packets behind the first, which has no beginning one could see."""
    took = mail.arrived_at - mail.first_at
    return (mail.payload_bytes - 256 * 1024) / took if took > 0 else float("inf")


def described(devices: Sequence[Device], seen: Sequence[Seen], profiled_s: float) -> tuple[Device, ...]:
    """Devices with the pace and the lines that were found. `profiled_s`: processor time of the sample, as costs have it."""
    found = []
    for device, look in zip(devices, seen, strict=True):
        pace = profiled_s / look.run_s
        # Work of the node itself around its layers takes as much longer as the layers do.
        link = Link(
            look.up_bytes_per_s or math.inf,
            look.down_bytes_per_s or math.inf,
            look.latency_s,
            MESSAGE_CPU_S / pace,
            CURVE_BYTE_CPU_S / pace,
        )
        found.append(replace(device, speed=pace, quota=None, link=link))
    return tuple(found)


class Scout(Lead):
    def __init__(self, endpoint: Endpoint, crew: Crew, log: EventLog) -> None:
        super().__init__(endpoint, crew, log)
        self._timed: dict[int, float] = {}
        self._echoes: dict[int, tuple[float, float, float]] = {}

    def look(self, others: Sequence[int], sample: Sample) -> dict[int, Seen]:
        """Of every node, the master's own first."""
        self.gather(others)
        for node in others:
            self.endpoint.post(node, sample)
        mine = run_sample(sample)
        self._until(lambda: len(self._timed) == len(others), lambda: "the devices to be measured", HELLO_LIMIT_S)
        self._try_lines(others)
        seen = {0: Seen(mine)}
        for node in others:
            down, up, latency = self._echoes.get(node, (None, None, 0.0))
            seen[node] = Seen(self._timed[node], down, up, latency)
        return seen

    def _try_lines(self, others: Sequence[int]) -> None:
        limit = self.endpoint.clock() + LINES_S
        for node in others:
            if self.endpoint.clock() > limit:
                return
            self.endpoint.post(node, Echo(0.0), [torch.zeros(ECHO_BYTES, dtype=torch.uint8)])
            self._until(lambda node=node: node in self._echoes, lambda node=node: f"node {node} to echo", HELLO_LIMIT_S)  # type: ignore[misc]

    def _hear(self, mail: Mail) -> bool:
        if isinstance(mail.message, Timed):
            self._timed[mail.sender] = mail.message.seconds
        elif isinstance(mail.message, Echo):
            self._echoes[mail.sender] = (mail.message.bytes_per_s, rate_of(mail), 0.0)
        else:
            raise ProtocolError(f"node {mail.sender} sent {type(mail.message).__name__} while it was measured")
        return True
