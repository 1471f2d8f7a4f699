"""Every message nodes exchange, and who may say it to whom and when (permissions.py). Adding a field or a kind means a new
PROTOCOL number.

The ring's passes        Activations clockwise, Gradients anticlockwise, one per training Activations; Norms, Scale, GroupSum
Before there is a plan   Hello; Sample, Timed, Meet, Try, Tried; Echo, Echoed between any two; then Setup, or Enlist
Layers come and go       Place, Placed, Fetch, LayerState; snapshots: Keep, Held, Whole, Void, Recall, Restore, Missing
Data-parallel ones       Work, Did, Lend, Scored; Store, Kept; Push, Pull, Pulled; Copy, Copied; Squares, Total; Lost
                         GradientPart, PeerModel between workers
Besides                  Report, Detail, Inspect, Inspected, Accused, Failed; Renew: the next generation; Stop, Bye
"""

from __future__ import annotations

from typing import Any, ClassVar, get_args

from msgspec import field

from ringtmp.plan.route import Route
from ringtmp.wire.address import Address
from ringtmp.wire.protocol import PROTOCOL as PROTOCOL

from ringtmp.wire.permissions import (  # isort: skip
    AFTER, ALWAYS, ANYONE, BEFORE, BULK, CONTROL, END, MEETING, NODE, PLAN, SERVER, TENSOR, WORKER, NodeMessage,
    between, reported, told,
)  # fmt: skip
from ringtmp.wire.group_messages import GroupSum as GroupSum
from ringtmp.wire.message_parts import Crossing as Crossing
from ringtmp.wire.message_parts import Edge as Edge
from ringtmp.wire.message_parts import Randomness as Randomness
from ringtmp.wire.message_parts import Recipe as Recipe
from ringtmp.wire.message_parts import Specs as Specs


class Activations(NodeMessage, frozen=True, tag="activations"):
    RULE: ClassVar = between(TENSOR, BEFORE)
    turn: int  # number of the pass; passes follow one another strictly
    step: int
    visit: int  # where they arrive
    microbatch: int  # -1: the receiver, one of a group, has none in this pass
    microbatches: int  # of the whole pass
    training: bool
    fresh: bool  # no training step came directly before: waiting for this one is not idleness
    wants: tuple[bool, ...]  # which tensors need a gradient in return
    tensors: Specs = ()
    keep: bool = False  # take a snapshot before this step
    same: tuple[int, ...] = ()  # for each tensor, the first that is the same one; () where all differ
    source: int = -1  # the visit they come from; -1: the one before


class Gradients(NodeMessage, frozen=True, tag="gradients"):
    RULE: ClassVar = between(TENSOR, AFTER)
    turn: int
    step: int
    visit: int
    microbatch: int
    tensors: Specs = ()
    source: int = -1  # the visit they come from; -1: the one behind


class Norms(NodeMessage, frozen=True, tag="norms"):
    """Gradient norms of every parameter from the sender's visit to the tail, in order, a tensor for each run of one dtype."""

    RULE: ClassVar = between(TENSOR, AFTER)
    turn: int
    visit: int
    tensors: Specs = ()


class Scale(NodeMessage, frozen=True, tag="scale"):
    RULE: ClassVar = between(TENSOR, BEFORE)
    turn: int
    visit: int
    tensors: Specs = ()


class Hello(NodeMessage, frozen=True, tag="hello"):
    RULE: ClassVar = reported(CONTROL, MEETING)
    pid: int
    torch: str
    capability: str
    kept: tuple[tuple[int, int], ...] = ()  # (step, layer) of every snapshot it has


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
    aside: bool = False  # the master has frozen parameters on its disk: they are neither sent back nor in snapshots


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


class Enlist(NodeMessage, frozen=True, tag="enlist"):
    """The plan of a data-parallel strategy; who does what follows from the settings and the number of nodes."""

    RULE: ClassVar = told(CONTROL, MEETING)
    strategy: str
    settings: dict[str, Any]
    nodes: int
    recipe: Recipe
    wire: str
    loss: str
    sizes: tuple[int, ...]  # trainable values of every layer, laid end to end
    step: int  # steps already done
    addresses: dict[int, Address]  # of everyone the receiver talks to
    detailed_steps: int
    package: str = ""  # with its version, that the strategy comes from; empty: ringtmp itself
    slots: tuple[tuple[int, ...], ...] = ()  # with a tree of sums: values of every trainable tensor, by layer
    order: tuple[int, ...] = ()  # of these tensors in the model, where layers do not go by it (runtime/clipping.py)


class Work(NodeMessage, frozen=True, tag="work"):
    """A worker's share of a batch. Samples it has seen are named, the others come along: inputs, then targets."""

    RULE: ClassVar = told(BULK, PLAN, WORKER)
    step: int
    training: bool
    fresh: bool  # no training step came directly before: waiting for this one is not idleness
    samples: int  # of the whole batch
    first: int  # number of its first microbatch
    sizes: tuple[int, ...]  # samples per microbatch
    table: str  # where sample numbers count; empty: a stream, whose samples are not kept
    microbatches: int = 0  # of the whole batch
    tensors: Specs = ()  # numbers of all samples, numbers of those that come along, inputs, targets


class WorkDone(NodeMessage, frozen=True, tag="did"):
    RULE: ClassVar = reported(CONTROL, PLAN, WORKER)
    step: int
    loss: float  # mean over the worker's samples
    share: float
    skipped: bool = False  # the others had gone on: nothing was computed


class Lend(NodeMessage, frozen=True, tag="lend"):
    """What to evaluate with where workers differ: a layer of the model that would be saved, holes for what is frozen. The
    receiver goes back to its own when it trains on, or is asked for the layer."""

    RULE: ClassVar = told(BULK, PLAN, WORKER)
    layer: int
    tensors: Specs = ()


class Scored(NodeMessage, frozen=True, tag="scored"):
    RULE: ClassVar = reported(CONTROL, PLAN, WORKER)
    loss_sum: float
    samples: int
    right: int
    guesses: int
    token_loss_sum: float = 0.0
    tokens: int = 0


class Store(NodeMessage, frozen=True, tag="store"):
    """A key moves in: its values, then optimizer state by name."""

    RULE: ClassVar = told(BULK, PLAN, SERVER)
    key: int
    state: tuple[str, ...]
    tensors: Specs = ()


class Kept(NodeMessage, frozen=True, tag="kept"):
    RULE: ClassVar = reported(BULK, PLAN, SERVER)
    key: int
    state: tuple[str, ...]
    tensors: Specs = ()


class Push(NodeMessage, frozen=True, tag="push"):
    RULE: ClassVar = between(TENSOR, WORKER, SERVER)
    key: int
    step: int
    share: float  # of the batch this gradient is of
    fresh: bool  # no training step came directly before
    node: int = 0  # of the tree of sums that this is the sum below; 0: there is no tree
    tensors: Specs = ()  # empty: with a tree, nobody below has a gradient


class Pull(NodeMessage, frozen=True, tag="pull"):
    """The key's values, when they are new enough for `step`; `exact`: with every update before it."""

    RULE: ClassVar = between(TENSOR, WORKER, SERVER)
    key: int
    step: int
    exact: bool = False


class Pulled(NodeMessage, frozen=True, tag="pulled"):
    RULE: ClassVar = between(TENSOR, SERVER, WORKER)
    key: int
    step: int  # the one they were asked for
    oldest: int  # every update before this step is in them
    change: bool = False  # a difference from what the worker has, not the values
    tensors: Specs = ()


class Copy(NodeMessage, frozen=True, tag="copy"):
    """An update for the replica to repeat: the gradient that was applied."""

    RULE: ClassVar = between(TENSOR, SERVER, SERVER)
    key: int
    step: int
    worker: int  # whose gradient; -1: the sum of all
    share: float
    tensors: Specs = ()


class Copied(NodeMessage, frozen=True, tag="copied"):
    RULE: ClassVar = between(TENSOR, SERVER, SERVER)
    key: int
    updates: int


class Lost(NodeMessage, frozen=True, tag="lost"):
    RULE: ClassVar = told(BULK, PLAN)
    node: int


class Squares(NodeMessage, frozen=True, tag="squares"):
    """The sum of squares of all gradients on one server, for clipping; with a tree of sums, the norm of every key."""

    RULE: ClassVar = between(TENSOR, SERVER, SERVER)
    step: int
    value: float
    servers: int  # how many there are, as far as the sender knows
    keys: tuple[int, ...] = ()
    tensors: Specs = ()  # the norms of these keys


class Total(NodeMessage, frozen=True, tag="total"):
    RULE: ClassVar = between(TENSOR, SERVER, SERVER)
    step: int
    norm: float


class PeerModel(NodeMessage, frozen=True, tag="peer"):
    """Some layers of the sender's parameters, or of what its strategy makes of them, for one other worker."""

    RULE: ClassVar = between(TENSOR, WORKER, WORKER)
    step: int  # of the sender
    bucket: int  # which layers; they come in order
    weight: float  # how much it counts, where that is the sender's to say
    tensors: Specs = ()


class GradientPart(NodeMessage, frozen=True, tag="part"):
    """A chunk of a gradient on its way: being summed up, or summed up and on its way to everyone."""

    RULE: ClassVar = between(TENSOR, WORKER, WORKER)
    step: int
    bucket: int
    chunk: int
    hop: int
    summed: bool
    tensors: Specs = ()  # empty: nobody below has a gradient
    there: tuple[bool, ...] = ()  # which tensors of the bucket got a gradient; empty: all


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
    Activations | Gradients | Norms | Scale | Hello | Setup | Place | Placed | Fetch | LayerState | Report | Inspect | Inspected
    | Failed | Accused | Stop | Bye | Renew | Keep | Held | Whole | Void | Recall | Restore | Missing | Detail | Sample | Timed
    | Echo | Echoed | Meet | Try | Tried | Enlist | Work | WorkDone | Lend | Scored | Store | Kept | Push | Pull | Pulled | Copy
    | Copied | Lost | Squares | Total | GradientPart | PeerModel | GroupSum
)  # fmt: skip

#: Every class a message may be of.
MESSAGES: tuple[type[Message], ...] = get_args(Message)
