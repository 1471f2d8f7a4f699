"""What a strategy is given to plan with, and what a run asks of whoever leads it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ringtmp.config import RunConfig
from ringtmp.data.batches import Batch
from ringtmp.errors import NodeLost
from ringtmp.metrics.events import EventLog, NodeEnded, Regrouped
from ringtmp.model.portable_layer import Layer
from ringtmp.plan.devices import Device, Paths
from ringtmp.runtime.checkpoint import Checkpoint, CheckpointWriter
from ringtmp.runtime.endpoint import Endpoint
from ringtmp.runtime.leader import STOP_LIMIT_S, NodePool
from ringtmp.runtime.losses import LossFunction, Score
from ringtmp.runtime.run_directory import LayerIndex
from ringtmp.runtime.snapshot_schedule import Protection, Snapshot
from ringtmp.wire.address import Address
from ringtmp.wire.messages import Hello, Recipe

#: The batch of a later step; None: not before the steps so far are done (an evaluation, a checkpoint, the end).
Upcoming = Callable[[int], Batch | None]


def nothing_ahead(step: int) -> Batch | None:
    return None


@dataclass(frozen=True)
class Brief:
    """A run as a strategy sees it."""

    config: RunConfig
    index: LayerIndex
    layers: list[Layer]
    loss: LossFunction
    loss_name: str
    recipe: Recipe
    step: int  # steps already done
    microbatches: int
    batch_size: int
    addresses: dict[int, Address]
    devices: tuple[Device, ...]  # of every node, the master first
    keep_all: bool  # every node takes part, in the order of their numbers
    targets: torch.Tensor  # of a few samples
    apart: frozenset[frozenset[int]] = frozenset()  # pairs of nodes that cannot reach each other
    paths: Paths = field(default_factory=dict)  # between devices, where they are not as their links say
    chosen: bool = False  # the number of microbatches is the plan's own choice


@dataclass(frozen=True)
class Share:
    """What one node does, for the record."""

    node: int
    role: str
    segments: tuple[str, ...]
    parameters: int


class Leader(Protocol):
    """The master of a run."""

    endpoint: Endpoint
    hellos: dict[int, Hello]  # of the nodes that are there
    protection: Protection
    snapshot: Snapshot | None
    survived: Callable[[Regrouped], None]  # told of a node whose loss needed no new generation

    @property
    def committed(self) -> int:
        """The first step nobody has begun: a run may only be stopped there."""
        ...

    def train_step(self, step: int, batch: Batch, fresh: bool, upcoming: Upcoming = nothing_ahead) -> float:
        """One update of every layer. The batch's mean loss before it."""
        ...

    def evaluate(self, batches: Iterable[Batch], step: int, bytes_model: bool) -> Score: ...
    def save(self, writer: CheckpointWriter) -> None: ...
    def leave(self) -> dict[int, float]:
        """The generation ends. Losses of steps that are done and not counted yet."""
        ...

    def stop(self, reason: str, limit_s: float = STOP_LIMIT_S) -> list[NodeLost]:
        """Everyone says goodbye; returns those who had died before they could."""
        ...

    def farewell(self) -> NodeEnded: ...


class Plan(Protocol):
    """A strategy laid out for the nodes that are there."""

    @property
    def warnings(self) -> tuple[str, ...]: ...
    @property
    def lines(self) -> tuple[str, ...]:
        """What to expect, for people."""
        ...

    @property
    def facts(self) -> dict[str, Any]: ...
    @property
    def shares(self) -> tuple[Share, ...]: ...

    def lead(self, endpoint: Endpoint, pool: NodePool, log: EventLog) -> Leader: ...

    def start(self, leader: Any, checkpoint: Checkpoint, phase: Callable[[str], None]) -> None:
        """Wait for the nodes and give everyone what it needs. `leader` is the one `lead` made."""
        ...
