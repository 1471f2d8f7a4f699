"""What a run remembers of the nodes it lost, and says of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ringtmp.errors import LinkLost, NodeLost
from ringtmp.metrics.events import Regrouped
from ringtmp.model.portable_layer import Layer
from ringtmp.runtime.optimizers import state_tensors
from ringtmp.wire.messages import Hello

#: So many losses in a row without a step further than ever before: something kills them, and would go on.
MOST_IN_A_ROW = 8


def memory_need(layers: Sequence[Layer], optimizer: str, settings: Mapping[str, Any], nodes: int) -> int:
    """Bytes that all nodes together need at least: weights, gradients, optimizer state. Nothing is kept twice here, and
    activations are not counted: what is short of this cannot go on, what is above it is tried."""
    if nodes == 1:
        return 0
    parameters = sum(layer.parameters for layer in layers) * 4
    return parameters * (2 + state_tensors(optimizer, settings))


class Losses:
    """The losses of one healing, and whether there were too many without any progress between them."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._furthest = 0
        self._now: list[NodeLost] = []

    def begin(self) -> None:
        self._now = []

    def bear(self, lost: NodeLost) -> bool:
        """Whether to go on after one more."""
        self._now.append(lost)
        self._in_a_row += 1
        return lost.node is not None and self._in_a_row <= MOST_IN_A_ROW

    def found(self, losses: Iterable[NodeLost]) -> list[NodeLost]:
        """Of these, whoever was not told of in this healing; from here on it is."""
        new = [each for each in losses if each.node not in self.nodes]
        self._now += new
        return new

    def step_done(self, steps: int) -> None:
        if steps > self._furthest:
            self._furthest, self._in_a_row = steps, 0

    @property
    def reason(self) -> str:
        return "; ".join(map(str, self._now))

    @property
    def nodes(self) -> tuple[int, ...]:
        lost = (each.node for each in self._now if not isinstance(each, LinkLost))
        return tuple(dict.fromkeys(node for node in lost if node is not None))

    @property
    def notice_s(self) -> float:
        return max((each.notice_s for each in self._now), default=0.0)


def unlike(hellos: Mapping[int, Hello], own: Mapping[str, Any]) -> list[str]:
    """A line for every node whose arithmetic may not be the master's."""
    return [
        f"node {node} has torch {hello.torch} with {hello.capability}, the master {own['torch']} with {own['capability']}: "
        "weights may differ in their last bits from those of one process, and after a loss from an undisturbed run's"
        for node, hello in sorted(hellos.items())
        if (hello.torch, hello.capability) != (own["torch"], own["capability"])
    ]


def lost_text(event: Regrouped) -> str:
    """One line for whoever looks on."""
    who = " and ".join(f"node {node}" for node in event.lost) or "a link"
    steps = "no step" if not event.repeated else f"{event.repeated} step{'s' if event.repeated > 1 else ''}"
    lost = f"{who} lost, noticed within {event.notice_s:.1f} s"
    after = f"{event.nodes} nodes go on after {event.seconds:.1f} s (generation {event.generation})"
    if event.source == "servers":
        return f"{lost}; the servers have the parameters, no step to do again; {after}"
    if event.source == "replica":
        return f"{lost}; the next server has its keys, no step to do again; {after}"
    if event.source == "survivors":
        return f"{lost}; on from step {event.step} with what the survivors have, {steps} to do again; {after}"
    return f"{lost}; back to the {event.source} of step {event.step}, {steps} to do again; {after}"
