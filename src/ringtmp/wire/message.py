"""Every message nodes exchange. Adding a field or a kind means a new PROTOCOL number.

Between neighbours, during a pass (a training step or an evaluation):
    Activations  clockwise        Gradients  anticlockwise, exactly one per training Activations
    Norms        anticlockwise    Scale      clockwise; only when gradients are clipped
Between the master and a node, outside passes:
    Hello, Setup, Place, Placed, Fetch, LayerState, Report, Inspect, Inspected, Failed, Stop, Bye
"""

from __future__ import annotations

from typing import Any

import msgspec

from ringtmp.plan.route import Route
from ringtmp.wire.address import Address
from ringtmp.wire.protocol import PROTOCOL as PROTOCOL
from ringtmp.wire.tensors import TensorSpec

Specs = tuple[TensorSpec | None, ...]


class Activations(msgspec.Struct, frozen=True, array_like=True, tag="activations"):
    turn: int  # number of the pass; passes follow one another strictly
    step: int
    visit: int  # where they arrive
    microbatch: int
    microbatches: int
    training: bool
    fresh: bool  # no training step came directly before: waiting for this one is not idleness
    wants: tuple[bool, ...]  # which tensors need a gradient in return
    tensors: Specs = ()


class Gradients(msgspec.Struct, frozen=True, array_like=True, tag="gradients"):
    turn: int
    step: int
    visit: int
    microbatch: int
    tensors: Specs = ()


class Norms(msgspec.Struct, frozen=True, array_like=True, tag="norms"):
    """Gradient norms of all parameters from the sender's visit to the tail, one tensor, in parameter order."""

    turn: int
    visit: int
    tensors: Specs = ()


class Scale(msgspec.Struct, frozen=True, array_like=True, tag="scale"):
    turn: int
    visit: int
    tensors: Specs = ()


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    pid: int
    torch: str
    capability: str


class Recipe(msgspec.Struct, frozen=True):
    """How every node trains: the same for all, whatever the number of nodes."""

    seed: int
    threads: int
    optimizer: str
    optimizer_settings: dict[str, Any]
    schedule: dict[str, Any]  # learning rate over steps
    clip_norm: float | None = None
    staleness: int = 0  # 1: every gradient is taken at the weights one update ago


class Crossing(msgspec.Struct, frozen=True, array_like=True):
    """A tensor that crosses a cut, as the plan knows it: everything but the number of samples."""

    dtype: str
    rest: tuple[int, ...]  # the shape behind the samples
    per_sample: bool  # whether the first dimension counts samples; else `rest` is the whole shape

    def allows(self, spec: TensorSpec) -> bool:
        shape = spec.shape[1:] if self.per_sample else spec.shape
        return spec.dtype == self.dtype and shape == self.rest and (not self.per_sample or len(spec.shape) > 0)


class Setup(msgspec.Struct, frozen=True, array_like=True, tag="setup"):
    route: Route
    recipe: Recipe
    window: int
    rule: str
    step: int  # steps already done
    addresses: dict[int, Address]  # of the receiver's neighbours
    detailed_steps: int
    crossings: dict[int, tuple[Crossing, ...]] = {}  # what enters each visit but the first
    recompute: str = "none"  # or all, auto: compute activations again instead of storing them


class Place(msgspec.Struct, frozen=True, array_like=True, tag="place"):
    """A layer moves in: its graph, its tensors in the graph's order, then optimizer state as (parameter, key)."""

    layer: int
    graph: bytes
    state: tuple[tuple[str, str], ...]
    tensors: Specs = ()


class Placed(msgspec.Struct, frozen=True, array_like=True, tag="placed"):
    layer: int


class Fetch(msgspec.Struct, frozen=True, array_like=True, tag="fetch"):
    layer: int


class LayerState(msgspec.Struct, frozen=True, array_like=True, tag="state"):
    layer: int
    state: tuple[tuple[str, str], ...]
    tensors: Specs = ()


class Report(msgspec.Struct, frozen=True, array_like=True, tag="report"):
    """Events of the sender, encoded as in events.jsonl."""

    events: tuple[bytes, ...]


class Inspect(msgspec.Struct, frozen=True, array_like=True, tag="inspect"):
    """Which visits hold values that are not finite?"""

    microbatch: int


class Inspected(msgspec.Struct, frozen=True, array_like=True, tag="inspected"):
    bad: tuple[int, ...]


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    step: int
    error: str
    traceback: str


class Bye(msgspec.Struct, frozen=True, array_like=True, tag="bye"):
    """The answer to Stop: the sender's last event."""

    event: bytes


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    reason: str


Message = (
    Activations | Gradients | Norms | Scale | Hello | Setup | Place | Placed | Fetch | LayerState | Report
    | Inspect | Inspected | Failed | Stop | Bye
)  # fmt: skip
