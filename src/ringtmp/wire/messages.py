"""Every message nodes exchange, and who may say it to whom and when (who_may_send.py). Adding a field or a kind means a new
PROTOCOL number. Here are those of every run; a ring's passes and the data-parallel strategies have files of their own.

The ring's passes        Activations clockwise, Gradients anticlockwise, one per training Activations; Norms, Scale;
                         GroupSum, GroupNorms, GroupWeights, GroupState, GroupChange within a group
Before there is a plan   Hello; Sample, Timed, Meet, Try, Tried; Echo, Echoed between any two; then Setup, or Enlist
Layers come and go       Place, Placed, Fetch, LayerState; snapshots: Keep, Held, Whole, Void, Recall, Restore, Missing
Data-parallel ones       Work, Enough, Did, Lend, Scored, Predicted; Store, Kept; Push, Pull, Pulled; Copy, Copied; Squares,
                         Total; Lost; GradientPart, PeerModel, Factors between workers
A key-value store        ServeTables, FirstRows; PushRows, Tick, PullRows, PulledRows
Besides                  Report, Detail, Inspect, Inspected, Accused, Failed; Renew: the next generation; Stop, Bye
"""

from __future__ import annotations

from typing import ClassVar, get_args

from msgspec import field

from ringtmp.model.frozen_formats import FLOAT32
from ringtmp.plan.route import Route
from ringtmp.plan.sum_tree import SumTree
from ringtmp.wire.address import Address
from ringtmp.wire.protocol import PROTOCOL as PROTOCOL

from ringtmp.wire.who_may_send import (  # isort: skip
    ALWAYS, ANYONE, BEFORE, BULK, CONTROL, END, MEETING, NODE, PLAN, NodeMessage, between, reported, told,
)  # fmt: skip
from ringtmp.wire.data_parallel_messages import (  # isort: skip
    Enlist as Enlist, Work as Work, Enough as Enough, WorkDone as WorkDone, Lend as Lend, Scored as Scored, Predicted as
    Predicted, Store as Store, Kept as Kept, Push as Push, Pull as Pull, Pulled as Pulled, Copy as Copy, Copied as Copied,
    Lost as Lost, Squares as Squares, Total as Total, PeerModel as PeerModel, GradientPart as GradientPart, Factors as
    Factors,
)  # fmt: skip
from ringtmp.wire.key_value_messages import (  # isort: skip
    ServeTables as ServeTables, FirstRows as FirstRows, PushRows as PushRows, Tick as Tick, PullRows as PullRows, PulledRows
    as PulledRows,
)  # fmt: skip
from ringtmp.wire.ring_messages import (  # isort: skip
    Activations as Activations, Gradients as Gradients, Norms as Norms, Scale as Scale, GroupSum as GroupSum,
    GroupNorms as GroupNorms, GroupWeights as GroupWeights, GroupState as GroupState, GroupChange as
    GroupChange,
)  # fmt: skip
from ringtmp.wire.message_parts import Crossing as Crossing
from ringtmp.wire.message_parts import Edge as Edge
from ringtmp.wire.message_parts import Randomness as Randomness
from ringtmp.wire.message_parts import Recipe as Recipe
from ringtmp.wire.message_parts import Specs as Specs


class Hello(NodeMessage, frozen=True, tag="hello"):
    RULE: ClassVar = reported(CONTROL, MEETING)
    pid: int
    torch: str
    capability: str
    kept: tuple[tuple[int, int], ...] = ()  # (step, layer) of every snapshot it has
    bfloat16: str = ""  # units for it, where it computes
    device: str = "cpu"  # where it computes


class Setup(NodeMessage, frozen=True, tag="setup"):
    RULE: ClassVar = told(CONTROL, MEETING)
    route: Route
    recipe: Recipe
    window: int
    rule: str
    step: int  # steps already done
    addresses: dict[int, Address]  # of the receiver's neighbours
    detailed_steps: int
    crossings: dict[int, tuple[Crossing, ...]] = field(default_factory=dict)  # what enters each visit but the first
    recompute: str = "none"  # or all, auto: compute activations again instead of storing them
    wire: str = "float32"
    keep: str = "off"  # or auto, memory, disk: where snapshots are kept
    lines: dict[int, float] = field(
        default_factory=dict
    )  # bytes per second from a node to the one behind it, where that is known
    flow: tuple[Edge, ...] = ()  # which tensors go from which visit to which; empty: everything to the next
    shares_state: bool = False  # members of a group share the optimizer state of their stage
    aside: bool = False  # the master has frozen parameters on its disk: they are neither sent back nor in snapshots
    late: int = 0  # steps that what members of a group make may be late; 0: they add up
    parts: int = 0  # of a step's microbatches, which members of groups share; 0: those of the tree of sums

    @property
    def tree(self) -> SumTree:
        """The parts of a step that members of groups share."""
        return SumTree(self.parts or self.recipe.sum_tree)


class Place(NodeMessage, frozen=True, tag="place"):
    """A layer moves in: its graph, its tensors in the graph's order, then optimizer state as (parameter, key). To a worker
    of a data-parallel strategy the layer behind the last is a loss of the user's own."""

    RULE: ClassVar = told(BULK, PLAN)
    layer: int
    graph: bytes
    state: tuple[tuple[str, str], ...]
    tensors: Specs = ()


class Placed(NodeMessage, frozen=True, tag="placed"):
    RULE: ClassVar = reported(BULK, PLAN)
    layer: int


class Fetch(NodeMessage, frozen=True, tag="fetch"):
    RULE: ClassVar = told(BULK, PLAN)
    layer: int
    step: int  # answered when every update before this step has been made
    whole: bool = True  # with parameters and optimizer state, not only what belongs to the asked node alone


class LayerState(NodeMessage, frozen=True, tag="state"):
    RULE: ClassVar = reported(BULK, PLAN)
    layer: int
    state: tuple[tuple[str, str], ...]
    tensors: Specs = ()


class Keep(NodeMessage, frozen=True, tag="keep"):
    """A piece of a layer's state on its way to the neighbour that holds it."""

    RULE: ClassVar = between(BULK, BEFORE)
    step: int
    layer: int
    start: int
    seconds: float  # the owner has spent on it
    label: bytes  # with the first piece
    tensors: Specs = ()


class Held(NodeMessage, frozen=True, tag="held"):
    """A layer of a snapshot has arrived whole at its holder; or why it was not kept."""

    RULE: ClassVar = reported(CONTROL, PLAN)
    step: int
    layer: int
    owner: int
    owner_s: float
    holder_s: float
    trouble: str = ""


class Whole(NodeMessage, frozen=True, tag="whole"):
    """Every layer of the snapshot is held: older ones may go."""

    RULE: ClassVar = told(CONTROL, PLAN)
    step: int


class Void(NodeMessage, frozen=True, tag="void"):
    """Somebody has no room for its part of the snapshot: what there is of it only takes up room."""

    RULE: ClassVar = told(CONTROL, PLAN)
    step: int


class Recall(NodeMessage, frozen=True, tag="recall"):
    """Send a layer as it was before a step; the answer is LayerState or Missing."""

    RULE: ClassVar = told(BULK, PLAN)
    step: int
    layer: int


class Restore(NodeMessage, frozen=True, tag="restore"):
    """A layer moves in from the receiver's own snapshots; the answer is Placed or Missing."""

    RULE: ClassVar = told(BULK, PLAN)
    step: int
    layer: int
    graph: bytes


class Missing(NodeMessage, frozen=True, tag="missing"):
    RULE: ClassVar = reported(CONTROL, PLAN)
    layer: int
    why: str


class Report(NodeMessage, frozen=True, tag="report"):
    """Events of the sender, encoded as in events.jsonl."""

    RULE: ClassVar = reported(CONTROL, PLAN)
    events: tuple[bytes, ...]


class Detail(NodeMessage, frozen=True, tag="detail"):
    """Report every span of this step: somebody looks on. One step at a time; it may come too late, and is then forgotten."""

    RULE: ClassVar = told(CONTROL, PLAN)
    step: int


class Sample(NodeMessage, frozen=True, tag="sample"):
    """A layer to run for a while, on made-up tensors: how fast is this device? As many copies as it would hold, and as many
    microbatches between forward and backward, so that caches are as full as they will be."""

    RULE: ClassVar = told(CONTROL, MEETING)
    graph: bytes
    inputs: tuple[Crossing, ...]
    samples: int
    copies: int = 1
    held: int = 1
    compute: str = FLOAT32


class Timed(NodeMessage, frozen=True, tag="timed"):
    """One run of the sample took so long; of this much memory in all the process has taken so much by now; it may use this
    many cores in every period (None: as many as it likes)."""

    RULE: ClassVar = reported(CONTROL, MEETING)
    seconds: float
    rss_bytes: int
    memory_bytes: int
    cores: float | None = None
    period_s: float | None = None


class Echo(NodeMessage, frozen=True, tag="echo"):
    """Bytes to try a line with; the answer brings `back` bytes."""

    RULE: ClassVar = between(BULK, ANYONE, NODE, ALWAYS)
    number: int
    back: int
    tensors: Specs = ()


class Echoed(NodeMessage, frozen=True, tag="echoed"):
    RULE: ClassVar = between(BULK, NODE, ANYONE, ALWAYS)
    number: int  # of what it answers
    tensors: Specs = ()


class Meet(NodeMessage, frozen=True, tag="meet"):
    """Others whose line to the receiver will be tried."""

    RULE: ClassVar = told(CONTROL, MEETING)
    addresses: dict[int, Address]


class Try(NodeMessage, frozen=True, tag="try"):
    """How fast is the line from you to this one? Given up after the limit."""

    RULE: ClassVar = told(CONTROL, MEETING)
    peer: int
    limit_s: float


class Tried(NodeMessage, frozen=True, tag="tried"):
    RULE: ClassVar = reported(CONTROL, ALWAYS)
    peer: int
    there_bytes_per_s: float
    back_bytes_per_s: float
    latency_s: float


class Inspect(NodeMessage, frozen=True, tag="inspect"):
    """Which visits hold values that are not finite, and who does not answer you?"""

    RULE: ClassVar = told(CONTROL, PLAN)
    microbatch: int


class Inspected(NodeMessage, frozen=True, tag="inspected"):
    RULE: ClassVar = reported(CONTROL, PLAN)
    bad: tuple[int, ...]
    unheard: tuple[int, ...] = ()


class Failed(NodeMessage, frozen=True, tag="failed"):
    RULE: ClassVar = reported(CONTROL, ALWAYS)
    step: int
    error: str
    traceback: str


class Accused(NodeMessage, frozen=True, tag="accused"):
    """Another node broke the protocol: the sender does not listen to it any more."""

    RULE: ClassVar = reported(CONTROL, ALWAYS)
    node: int
    why: str


class Bye(NodeMessage, frozen=True, tag="bye"):
    """The answer to Stop: the sender's last event."""

    RULE: ClassVar = reported(CONTROL, END)
    event: bytes


class Stop(NodeMessage, frozen=True, tag="stop"):
    RULE: ClassVar = told(CONTROL, ALWAYS)
    reason: str


class Renew(NodeMessage, frozen=True, tag="renew"):
    """Everyone's part in the run so far is over; the process lives on. Said in the generation that ends."""

    RULE: ClassVar = told(CONTROL, ALWAYS)
    generation: int  # the one that begins


Message = (
    Activations | Gradients | Norms | Scale | Hello | Setup | Place | Placed | Fetch | LayerState | Report | Inspect |
    Inspected | Failed | Accused | Stop | Bye | Renew | Keep | Held | Whole | Void | Recall | Restore | Missing | Detail |
    Sample | Timed | Echo | Echoed | Meet | Try | Tried | Enlist | Work | Enough | WorkDone | Lend | Scored | Predicted |
    Store | Kept | Push | Pull | Pulled | Copy | Copied | Lost | Squares | Total | GradientPart | PeerModel | Factors |
    GroupSum | ServeTables | FirstRows | PushRows | Tick | PullRows | PulledRows | GroupNorms | GroupWeights |
    GroupState | GroupChange
)  # fmt: skip

#: Every class a message may be of.
MESSAGES: tuple[type[Message], ...] = get_args(Message)
