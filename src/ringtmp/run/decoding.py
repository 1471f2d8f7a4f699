"""A ring that reads a text token after token. Where the model allows it, every node keeps the keys and values of its own
layers, so that a token costs one trip round the ring; otherwise the whole text goes round for every token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from ringtmp.config import TrainingPart
from ringtmp.data.batches import Batch
from ringtmp.data.sample_or_batch import LABELS
from ringtmp.errors import UsageError
from ringtmp.launch.node_pool import NodePool
from ringtmp.model.decoder_cells import DecoderCells
from ringtmp.model.output_tree import leaves_of
from ringtmp.model.portable_layer import Layer, Value
from ringtmp.model.run_graph import layer_bytes
from ringtmp.model.shrink_frozen_weights import enlarged
from ringtmp.plan.route import Route
from ringtmp.run.inference import Inference, Layout, inference, laid_out
from ringtmp.run.measure_model import described
from ringtmp.runtime.checkpoint import Checkpoint, LayerTensors
from ringtmp.runtime.losses import loss_named
from ringtmp.runtime.run_directory import LayerIndex, RunDirectory
from ringtmp.strategies.ring.master import Master
from ringtmp.strategies.ring.tensor_routes import flow_of
from ringtmp.wire.messages import Crossing

#: Tokens of a prompt that travel together; several such parts are under way at once.
PART = 64
WINDOW = 8
#: How far scores may lie apart that should not depend on what comes later.
UNRELATED = 1e-3


class Reader(Protocol):
    """Reads a text from its beginning. `read` takes what comes next and gives the scores of what may follow it."""

    most: int  # tokens it can read
    bytes_per_token: int  # between nodes
    step: int

    def read(self, tokens: Sequence[int]) -> torch.Tensor: ...


# -- with keys and values on every node ---------------------------------------------------------------------------------


class DecoderWeights:
    """What the cells of a decoder begin with: the run's weights, by name and in float32 however they are kept, and for the
    rest what came with the export."""

    def __init__(self, checkpoint: Checkpoint, index: LayerIndex, layers: Sequence[Layer], prefix: str,
                 others: dict[str, torch.Tensor]) -> None:  # fmt: skip
        self._checkpoint = checkpoint
        self._layers = layers
        self._prefix = prefix
        self._others = others
        self._first = dict(index.state)
        self._where = {
            layer.full_name(each): at for at, layer in enumerate(layers) for each in layer.tensors if each.saved
        }
        self._opened = -1
        self._held: dict[str, torch.Tensor] = {}

    def layer(self, index: int, layer: Layer) -> LayerTensors:
        return [self._tensor(layer.full_name(each)) for each in layer.tensors], {}

    def frozen(self, index: int, layer: Layer) -> dict[str, torch.Tensor]:
        return {}  # nothing is kept aside

    def _tensor(self, full: str) -> torch.Tensor:
        name = full.removeprefix(self._prefix)
        name = self._first.get(name, name)
        at = self._where.get(name) if full.startswith(self._prefix) else None
        if at is None:
            return self._others[full].clone()
        if at != self._opened:
            layer = self._layers[at]
            (whole, given), self._opened = enlarged(layer, self._checkpoint.layer(at, layer)[0]), at
            self._held = {
                whole.full_name(each): each_given for each, each_given in zip(whole.tensors, given, strict=True)
            }
        return self._held[name]


@dataclass(frozen=True)
class Cached:
    """A decoder, ready to be laid out."""

    found: DecoderCells
    weights: DecoderWeights
    step: int
    most: int

    def describe(self, training: bool, value: Value) -> Crossing:
        maker, place = value
        cell = self.found.cells[maker - 1]
        return described(self.found.entering[place] if maker == 0 else cell.evaluated[place])

    @contextmanager
    def started(self, training: TrainingPart, pool: NodePool) -> Iterator[Reader]:
        layers = [each.layer for each in self.found.cells]
        layout = Layout(layers, [float(layer_bytes(each)) for each in layers], self.weights, self.step, self.describe)
        with laid_out(layout, training, pool, WINDOW) as master:
            yield _CachedReader(master, self)

    def bytes_per_token(self, route: Route) -> int:
        """Tensors between nodes, for one token."""
        facts = [self.found.entering, *(each.evaluated for each in self.found.cells)]
        total = 0.0
        for edge in flow_of([each.layer for each in self.found.cells], route):
            inside = edge.source >= 0 and edge.target <= route.last
            if not edge.training and inside and route.node(edge.source) != route.node(edge.target):
                total += sum(facts[maker][place].sample_bytes for maker, place in edge.values)
        return round(total)


class _CachedReader:
    def __init__(self, master: Master, cached: Cached) -> None:
        self._master = master
        self._read = 0
        self.most = cached.most
        self.step = cached.step
        self.bytes_per_token = cached.bytes_per_token(master.node.route)

    def read(self, tokens: Sequence[int]) -> torch.Tensor:
        parts = torch.split(torch.tensor(tokens, dtype=torch.int64), PART)
        inputs = []
        for part in parts:
            places = torch.arange(self._read, self._read + len(part))
            inputs.append({"tokens": part.clone(), "positions": places})
            self._read += len(part)
        nobody = tuple(torch.zeros(len(part)) for part in parts)
        outputs = self._master.predict([Batch(0, tuple(inputs), nobody, len(tokens))], self.step)
        scores: torch.Tensor = outputs[-1][-1]
        return scores


def misfit(decoder: nn.Module, prefix: str, index: LayerIndex, layers: Sequence[Layer]) -> str | None:
    """A parameter that one of the two has not, or in another shape."""
    shapes = {layer.full_name(each): each.shape for layer in layers for each in layer.tensors}
    trained = {layer.full_name(each) for layer in layers for each in layer.tensors if each.kind == "parameter"}
    first = dict(index.state)
    for full, parameter in decoder.named_parameters():
        name = full.removeprefix(prefix)
        if shapes.get(first.get(name, name)) != tuple(parameter.shape):
            return name
        trained.discard(first.get(name, name))
    return min(trained, default=None)


# -- with the whole text every time -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Talk:
    """How a model that was trained on token numbers is asked, and where its scores are."""

    length: int  # tokens it takes
    vocabulary: int
    output: int  # place of the scores among what it returns
    tokens: str  # name of the input; empty: the only one
    ones: tuple[str, ...] = ()  # names of the inputs that are masks

    @staticmethod
    def of(index: LayerIndex, where: str) -> Talk:
        """UsageError where the model is no language model."""
        inputs = dict(zip(index.input_names or [""] * len(index.inputs), index.inputs, strict=False))
        read = {name: each for name, each in inputs.items() if name != LABELS and not name.endswith("mask")}
        leaving = index.outputs[-1] if index.outputs else ()
        if len(read) == 1:
            ((name, tokens),) = read.items()
            whole = not tokens.dtype.startswith(("float", "bfloat")) and tokens.per_sample and len(tokens.rest) == 1
            for place, each in enumerate(leaving):
                fits = each.per_sample and len(each.rest) == 2 and each.rest[0] == tokens.rest[0]
                if whole and fits and each.dtype.startswith("float"):
                    masks = tuple(each for each in inputs if each.endswith("mask"))
                    return Talk(tokens.rest[0], each.rest[1], place, name, masks)
        takes = ", ".join(f"{name or 'a tensor'} {_text(each)}" for name, each in inputs.items()) or "what is not known"
        raise UsageError(
            f"{where} is no language model: to generate, a model must take one row of token numbers and give a score for every "
            f"token of its vocabulary at every place; this one takes {takes} and gives {', '.join(map(_text, leaving))}"
        )

    def inputs(self, rows: torch.Tensor, index: LayerIndex) -> Any:
        if not self.tokens:
            return rows
        asked = {self.tokens: rows, **{name: torch.ones_like(rows) for name in self.ones}}
        return index.without_targets(asked, len(rows))


def _text(each: Crossing) -> str:
    shape = ("samples", *each.rest) if each.per_sample else each.rest
    return f"{each.dtype}[{', '.join(map(str, shape))}]"


@dataclass(frozen=True)
class Window:
    """The run's own model, which takes as many tokens as it was trained with."""

    run: RunDirectory
    talk: Talk

    @property
    def most(self) -> int:
        return self.talk.length

    @contextmanager
    def started(self, training: TrainingPart, pool: NodePool) -> Iterator[Reader]:
        with inference(self.run, training, loss_named("mse"), pool) as ring:
            yield _WindowReader(ring, self.talk)


class _WindowReader:
    """What follows the text is filled up with zeros, on which nothing before it may depend."""

    def __init__(self, ring: Inference, talk: Talk) -> None:
        self._ring = ring
        self._talk = talk
        self._read: list[int] = []
        self.most = talk.length
        self.step = ring.step
        self.bytes_per_token = _bytes_of(ring)

    def read(self, tokens: Sequence[int]) -> torch.Tensor:
        first = not self._read
        self._read += tokens
        length, count = self._talk.length, len(self._read)
        rows = torch.zeros(2 if first and count < length else 1, length, dtype=torch.int64)
        rows[-1, count:] = 0 if len(rows) == 1 else self._talk.vocabulary - 1  # with something else behind it
        rows[:, :count] = torch.tensor(self._read)
        batch = Batch(0, (self._talk.inputs(rows, self._ring.index),), (torch.zeros(len(rows)),), len(rows))
        (outputs,) = self._ring.master.predict(self._ring.checked([batch], "the prompt"), self.step)
        scores = leaves_of(outputs)[self._talk.output][:, count - 1]
        if len(rows) > 1 and float((scores[0] - scores[1]).abs().max()) > UNRELATED * (1 + float(scores.abs().max())):
            raise UsageError(
                "the model's score for a token depends on the tokens after it (it is not causal): it cannot write a text on"
            )
        return scores[0].float()


def _bytes_of(ring: Inference) -> int:
    """Tensors between nodes, for one token."""
    route, index, total = ring.master.node.route, ring.index, 0
    flow = flow_of(ring.layers, route, index.crossing)
    edges = [
        (each.source, each.target, each.crossings)
        for each in flow
        if not each.training and each.source >= 0 and each.target <= route.last
    ]
    if not flow:
        edges = [(visit.index - 1, visit.index, index.outputs[visit.first - 1]) for visit in route.visits[1:]]
    for source, target, crossings in edges:
        if route.node(source) != route.node(target):
            total += sum(_bytes(each) for each in crossings)
    return total


def _bytes(each: Crossing) -> int:
    size = torch.empty((), dtype=getattr(torch, each.dtype)).element_size()
    for dim in each.rest:
        size *= max(1, dim)
    return size
