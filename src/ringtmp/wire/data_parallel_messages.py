"""What the data-parallel strategies say: master, workers and servers to one another."""

from __future__ import annotations

from typing import Any, ClassVar

from ringtmp.wire.address import Address
from ringtmp.wire.message_parts import Recipe, Specs

from ringtmp.wire.who_may_send import (  # isort: skip
    BULK, CONTROL, MEETING, PLAN, SERVER, TENSOR, WORKER, NodeMessage, between, reported, told,
)  # fmt: skip


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
    #: Of layers whose gradients may travel as factors, others empty: the matrix's outputs and inputs, and where it and the
    #: bias begin in the layer's vector (-1: no bias).
    linear: tuple[tuple[int, ...], ...] = ()
    rows: tuple[float, ...] = ()  # that a sample makes of each of these layers; 0: of the others


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


class Enough(NodeMessage, frozen=True, tag="enough"):
    """Work of steps before this one that a worker has not begun is given up."""

    RULE: ClassVar = told(CONTROL, PLAN, WORKER)
    step: int


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


class Predicted(NodeMessage, frozen=True, tag="predicted"):
    """What a member of an ensemble says of samples to be evaluated: its model's one output, for all of them."""

    RULE: ClassVar = reported(BULK, PLAN, WORKER)
    tensors: Specs = ()


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
    rows: int = (
        0  # of a linear layer, of which the server makes the gradient: what entered, and errors; 0: it is the gradient
    )
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


class Factors(NodeMessage, frozen=True, tag="factors"):
    """What a linear layer's gradient of the sender's samples is made of: what entered its matrix, and the errors behind it."""

    RULE: ClassVar = between(TENSOR, WORKER, WORKER)
    step: int
    layer: int
    rows: int  # 0: the sender had no samples in this step
    tensors: Specs = ()  # of the rows, then of the errors, as the wire has them
