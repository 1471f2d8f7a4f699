"""What a pass through the ring consists of: messages between neighbours, and between members of a group."""

from __future__ import annotations

from typing import ClassVar

from ringtmp.wire.message_parts import Specs
from ringtmp.wire.who_may_send import AFTER, BEFORE, BULK, MEMBER, TENSOR, NodeMessage, between


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


class GroupNorms(NodeMessage, frozen=True, tag="group norms"):
    """Where a group shares the optimizer state: norms of the sender's parameters, to the member that speaks for all."""

    RULE: ClassVar = between(TENSOR, MEMBER)
    turn: int
    visit: int
    tensors: Specs = ()


class GroupWeights(NodeMessage, frozen=True, tag="group weights"):
    """Where a group shares the optimizer state: parameters that the sender has updated."""

    RULE: ClassVar = between(TENSOR, MEMBER)
    turn: int
    visit: int
    bucket: int
    tensors: Specs = ()


class GroupState(NodeMessage, frozen=True, tag="group state"):
    """Where a group shares the optimizer state: what the sender keeps of a layer, for the snapshot that the first takes."""

    RULE: ClassVar = between(BULK, MEMBER)
    step: int
    visit: int
    layer: int
    state: tuple[tuple[str, str], ...]  # parameter and key, as in LayerState
    tensors: Specs = ()


class GroupChange(NodeMessage, frozen=True, tag="group change"):
    """Where members of a group do not wait for each other: what the sender's own gradients of a step change a bucket of
    parameters by."""

    RULE: ClassVar = between(TENSOR, MEMBER)
    step: int
    visit: int
    bucket: int
    tensors: Specs = ()  # empty: the sender had no microbatch


class GroupSum(NodeMessage, frozen=True, tag="group sum"):
    """A chunk of a sum of gradients on its way through a group: being added up, or (the root of the tree) the total."""

    RULE: ClassVar = between(TENSOR, MEMBER)
    turn: int
    visit: int
    bucket: int
    node: int  # of the tree of sums
    chunk: int
    there: tuple[bool, ...] = ()  # which tensors of the bucket got a gradient; empty: all
    tensors: Specs = ()  # empty: none did
