"""A layer as data: two graphs of ATen operators and named tensors. No code, no pickle.

    Layer   name, training graph, evaluation graph, tensor descriptions
    Graph   inputs (which tensors enter), operations in order, outputs
    Op      an operator from the list in operators.py; arguments are plain values or references
    Custom  a function with a backward of its own, as two graphs

Values are numbered slots: the graph's inputs come first, every operation adds one. A reference to slot 7 is
written Ref(7). Encoded as MessagePack, which keeps every double and infinity exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from ringtmp import untrusted
from ringtmp.errors import ProtocolError

FORMAT = 1
#: A graph larger than this is refused before it is decoded.
MAX_ENCODED_BYTES = 16 * 1024 * 1024


class Ref(msgspec.Struct, frozen=True, tag="r", array_like=True):
    slot: int


class Items(msgspec.Struct, frozen=True, tag="l", array_like=True):
    values: tuple[Argument, ...]


class Named(msgspec.Struct, frozen=True, tag="n", array_like=True):
    """A torch constant: dtype, layout or memory format. Devices are not data: a node computes on its own."""

    kind: Literal["dtype", "layout", "memory_format", "device"]
    name: str


Argument = None | bool | int | float | str | Ref | Items | Named


class Op(msgspec.Struct, frozen=True, array_like=True):
    target: str
    args: tuple[Argument, ...]
    kwargs: dict[str, Argument]


class Input(msgspec.Struct, frozen=True, array_like=True):
    """What fills one input slot: the n-th tensor that enters the layer, or a tensor the layer owns."""

    kind: Literal["input", "parameter", "buffer", "constant"]
    name: str
    kept: str = ""  # a frozen weight that is kept so (frozen_formats.py) and becomes float32 where it is used


class Custom(msgspec.Struct, frozen=True):
    """A custom autograd function, or a hook on a parameter. All inputs of its graphs have the kind "input"."""

    name: str  # as the user called it, for messages
    forward: Graph  # -> results, then what backward needs
    backward: (
        Graph  # what forward kept, then one gradient per result -> a gradient per argument, None where there is none
    )
    differentiable: tuple[bool, ...]  # per result


#: The operation that calls one: its arguments are the position in `Graph.customs` and the function's arguments, those
#: that get a gradient first. It gives a tuple of results.
CUSTOM = "custom"


class Graph(msgspec.Struct, frozen=True):
    inputs: tuple[Input, ...]
    ops: tuple[Op, ...]
    outputs: tuple[Argument, ...]
    #: An operation writes into what enters the layer, which autograd forbids on a received leaf: copy it first.
    changes_inputs: bool
    customs: tuple[Custom, ...] = ()

    @property
    def entering(self) -> int:
        """How many tensors enter."""
        return sum(each.kind == "input" for each in self.inputs)


class OwnedTensor(msgspec.Struct, frozen=True):
    """A tensor that belongs to a layer. Only `saved` ones are part of the model's state_dict; a "scale" belongs to the int8
    parameter before it."""

    name: str
    kind: Literal["parameter", "buffer", "constant", "scale"]
    dtype: str
    shape: tuple[int, ...]
    trainable: bool
    saved: bool
    full: str = ""  # its name in the model's state_dict; empty: the layer's name, a dot and its own
    rank: int = -1  # its place among the model's parameters, which clipping goes by; -1: that of the layers
    copied: bool = False  # of a frozen parameter that another cell owns; in runs of older versions False always


class OutputTree(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a layer's flat outputs are nested for the next layer, the loss and the user: '*' is one tensor, 'none' is None,
    an 'object' is a dataclass or a named tuple."""

    kind: Literal["*", "tuple", "list", "dict", "object", "none"]
    children: tuple[OutputTree, ...] = ()
    names: tuple[str, ...] = ()  # of the children of a dict or an object
    cls: str = ""  # of an object, as "module:name"; never imported


#: A tensor on its way through the model: the layer that made it, counted from 1 (0: it is one of the model's inputs),
#: and its place among what that layer gives.
Value = tuple[int, int]
#: How many random operations come before a layer; more than fit into a model are a mistake.
RandomBefore = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]


class Layer(msgspec.Struct, frozen=True):
    name: str
    train: Graph
    evaluate: Graph
    tensors: tuple[OwnedTensor, ...]
    output: OutputTree
    format: int = FORMAT
    #: What enters the training graph and the evaluation graph; None: all that the layer before gives.
    train_takes: tuple[Value, ...] | None = None
    evaluate_takes: tuple[Value, ...] | None = None
    #: Numbers taken by the random operations of all layers before it, in training and in evaluation.
    random_before: RandomBefore = 0
    random_before_evaluating: RandomBefore = 0

    def graph(self, training: bool) -> Graph:
        return self.train if training else self.evaluate

    def takes(self, index: int, training: bool) -> tuple[Value, ...]:
        """What enters the layer, which is number `index` of its model."""
        given = self.train_takes if training else self.evaluate_takes
        if given is not None:
            return given
        return tuple((index, place) for place in range(self.graph(training).entering))

    def full_name(self, tensor: OwnedTensor) -> str:
        return tensor.full or f"{self.name}.{tensor.name}"

    @property
    def parameters(self) -> int:
        return sum(count(tensor.shape) for tensor in self.tensors if tensor.kind == "parameter")

    @property
    def takes_inputs(self) -> bool:
        """Whether one of the model's inputs enters it, or in a list of layers all that there is."""
        return self.train_takes is None or any(maker == 0 for maker, _ in self.train_takes)

    @property
    def trained(self) -> int:
        """Of its parameters, those that are not frozen."""
        return sum(count(tensor.shape) for tensor in self.tensors if tensor.trainable)


class HidesInputs:
    """Asked of every layer in order: whether the inputs have met parameters in it. Those of a cell before the first that
    takes an input (a weight that is computed from others) hide nothing."""

    def __init__(self) -> None:
        self._entered = False

    def __call__(self, layer: Layer) -> bool:
        self._entered = self._entered or layer.takes_inputs
        return self._entered and layer.parameters > 0


def hides_inputs(layers: Sequence[Layer]) -> list[bool]:
    return list(map(HidesInputs(), layers))


def slots(value: Argument) -> list[int]:
    """Every slot a value refers to."""
    if isinstance(value, Ref):
        return [value.slot]
    if isinstance(value, Items):
        return [slot for item in value.values for slot in slots(item)]
    return []


def references(op: Op) -> list[int]:
    return [slot for value in (*op.args, *op.kwargs.values()) for slot in slots(value)]


def count(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Layer)


def encode(layer: Layer) -> bytes:
    return _encoder.encode(layer)


def decode(data: bytes | memoryview) -> Layer:
    layer = untrusted.decode(_decoder, data, "a layer", MAX_ENCODED_BYTES)
    if layer.format != FORMAT:
        raise ProtocolError(f"layer format {layer.format}, this version reads {FORMAT}: use one version everywhere")
    return layer
