"""A run directory: everything a run leaves behind, and all that is needed to resume it.

config.json          the resolved settings         events.jsonl   everything that happened
layers/0003.layer    the layer as data              checkpoints/   see checkpoint.py
layers/index.json    measured costs, SHA-256s       logs/          one log per node
lock                 held while a process works here  stream/   a stream's batches since the last checkpoint, if on disk
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import msgspec
import torch

from ringtmp.config import RunConfig
from ringtmp.data.batches import Batch
from ringtmp.data.nested_inputs import arranged, leaves, map_tensors, names
from ringtmp.data.sample_or_batch import LABELS
from ringtmp.errors import CheckpointError, ProtocolError, UsageError
from ringtmp.model import portable_layer
from ringtmp.model.portable_layer import Layer
from ringtmp.model.run_graph import dtype_of
from ringtmp.plan.devices import LayerCost
from ringtmp.runtime import json_with_checksum
from ringtmp.runtime.json_with_checksum import Broken
from ringtmp.runtime.losses import LabelRange
from ringtmp.system.files import require_text, write_atomic
from ringtmp.wire.messages import Crossing, Randomness


class LayerIndex(msgspec.Struct, frozen=True):
    run: str  # a name of its own, so that a checkpoint of another run is not taken for this one's
    names: tuple[str, ...]
    costs: tuple[LayerCost, ...]
    outputs: tuple[tuple[Crossing, ...], ...] = ()  # what leaves each layer
    least_microbatch: int = 1  # samples the model needs at least to train
    inputs: tuple[Crossing, ...] = ()  # what enters the first layer; empty: not known
    checked: str = ""  # against eager mode, before the start, as in the summary
    randomness: Randomness = "layer"  # absent: of a version that seeded the generator before every layer
    aside: bool = False  # what is frozen lies beside the checkpoints and is in no snapshot
    input_names: tuple[str, ...] = ()  # where each of `inputs` lies in a batch; empty: not known
    digests: tuple[str, ...] = ()  # SHA-256 of each layer's file; empty: of a version that had none
    evaluated: tuple[tuple[Crossing, ...], ...] = ()  # what leaves each layer in evaluation; empty: as in training
    state: tuple[
        tuple[str, str], ...
    ] = ()  # the model's state_dict: every name, and that of the tensor; empty: by layers

    def crossing(self, training: bool, value: tuple[int, int]) -> Crossing:
        """A tensor on its way through the model, by what made it."""
        maker, place = value
        given = self.outputs if training or not self.evaluated else self.evaluated
        return self.inputs[place] if maker == 0 else given[maker - 1][place]

    def predicted(self, names: Sequence[str]) -> list[str]:
        """Of the model's outputs, all but one number per microbatch, such as a loss. Empty: not known."""
        given = (self.evaluated or self.outputs)[-1:]
        return [name for each in given for name, one in zip(names, each, strict=False) if one.per_sample or one.rest]

    @property
    def cost_s(self) -> tuple[float, ...]:
        """Forward and backward of the largest microbatch, by layer."""
        return tuple(each.largest_s for each in self.costs)

    def check_whole(self) -> None:
        """Refuses one whose parts are not of the same layers."""
        count = len(self.names)
        lengths = len(self.costs), len(self.outputs) or count, len(self.digests) or count
        if any(length != count for length in lengths):
            raise Broken("has {} names, {} costs, {} outputs and {} digests of layers".format(count, *lengths))
        if not count:
            raise Broken("has no layers")
        for each in self.costs:
            if not each.measured:
                raise Broken(f"has no measured cost of layer {each.name}")

    def without_targets(self, inputs: Any, samples: int) -> Any:
        """Inputs to predict from: where the model takes labels, which nobody has then, zeros stand for them."""
        if LABELS not in self.input_names or not isinstance(inputs, Mapping) or LABELS in inputs:
            return inputs
        expected = self.inputs[self.input_names.index(LABELS)]
        return {**inputs, LABELS: torch.zeros((samples, *expected.rest), dtype=dtype_of(expected.dtype))}

    def in_order(self, batch: Batch, where: str) -> Batch:
        """The batch with its inputs in the order the model takes them. Refuses other keys."""
        given = names(batch.inputs[0])
        if not self.input_names or given == self.input_names or not any(map(_is_key, (*self.input_names, *given))):
            return batch
        return replace(batch, inputs=tuple(arranged(each, self.input_names, where) for each in batch.inputs))

    def in_its_types(self, inputs: Any) -> Any:
        """Numbers of the kind the model was built for, float64 as float32 and int32 as int64; never whole numbers as others."""
        if len(leaves(inputs)) != len(self.inputs):
            return inputs
        types = iter([dtype_of(each.dtype) for each in self.inputs])

        def converted(tensor: torch.Tensor) -> torch.Tensor:
            dtype = next(types)
            if tensor.is_floating_point() != dtype.is_floating_point:
                return tensor
            found = tensor.to(dtype)
            if not dtype.is_floating_point and not found.equal(tensor):
                wrong = tensor[found != tensor].flatten()[0].item()
                raise UsageError(f"an input has the value {wrong}, which the model's {str(dtype)[6:]} cannot hold")
            return found

        return map_tensors(converted, inputs)

    def check_inputs(self, inputs: Any, where: str) -> None:
        """Refuses inputs of another shape than the model was built for."""
        given = leaves(inputs)
        if not self.inputs:
            return
        if len(given) != len(self.inputs):
            raise UsageError(f"{where} has {len(given)} tensors per sample, but the model takes {len(self.inputs)}")
        for tensor, expected in zip(given, self.inputs, strict=True):
            shape = tuple(tensor.shape[1:]) if expected.per_sample else tuple(tensor.shape)
            if shape != expected.rest:
                raise UsageError(
                    f"a sample of {where} has shape {_shape_text(shape)}, but the model was built for "
                    f"{_shape_text(expected.rest)}{_missing(shape, expected.rest)}"
                )
            if tensor.is_floating_point() != expected.dtype.startswith(("float", "bfloat")):
                raise UsageError(
                    f"{where} holds {str(tensor.dtype).removeprefix('torch.')} numbers, but the model was built for "
                    f"{expected.dtype}: convert them"
                )

    def check_batch(self, batch: Batch, loss: str | None, table: str, stream: str) -> Batch:
        """The batch, if its shapes are what the model takes, and its labels too where there is a loss."""
        batch = self.in_order(batch, stream)
        for inputs in batch.inputs:
            self.check_inputs(inputs, stream)
        if loss is not None:
            self.label_range(loss).check_batch(batch, table, stream)
        return batch

    def label_range(self, loss: str) -> LabelRange:
        """What a loss over classes takes of this model; any label where its outputs are several tensors or unknown."""
        leaving = self.outputs[-1] if self.outputs else ()
        if len(leaving) != 1 or not leaving[0].per_sample:
            return LabelRange(None)
        return LabelRange.of(loss, (0, *leaving[0].rest))


def _is_key(name: str) -> bool:
    return not name.replace(".", "").isdecimal() and bool(name)


def _shape_text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "one number"


def _missing(shape: tuple[int, ...], expected: tuple[int, ...]) -> str:
    """What to do about a dimension of one that is not there, or is too many."""
    for short, long, text in (
        (shape, expected, "add it, as in x[{}]"),
        (expected, shape, "take it out, as in x.squeeze({})"),
    ):
        for dim, size in enumerate(long):
            if size == 1 and long[:dim] + long[dim + 1 :] == short:
                how = ", ".join([":"] * (dim + 1) + ["None"]) if short is shape else str(dim + 1)
                what = "misses" if short is shape else "has"
                return f": it {what} a dimension of size 1; {text.format(how)}"
    return ""


class SavedConfig(msgspec.Struct, frozen=True):
    version: str
    config: RunConfig
    loss: str


class RunDirectory:
    def __init__(self, path: Path) -> None:
        self.path = require_text(path, "the run directory")
        self.events = path / "events.jsonl"
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self.layers = path / "layers"
        self.stream = path / "stream"
        self._lock: IO[str] | None = None
        self._mine = False  # the folder did not exist before this run
        self._started = False  # its settings were written: not for `discard`, even where somebody removed them since

    def create(self) -> None:
        """Make the folder. A folder that already holds a run is refused: nothing is overwritten."""
        if (self.path / "config.json").exists():
            raise UsageError(
                f"{self.path} already holds a run: choose another --run-dir, or resume it with --resume {self.path}"
            )
        self._mine = not self.path.exists()
        try:
            # Weights, inputs' statistics and what nodes wrote are the user's own; a folder that was there keeps its mode.
            for folder in (self.path, self.checkpoints, self.logs, self.layers):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for file in (self.events, self.path / "lock"):
                file.touch(mode=0o600)
            probe = self.path / ".write-test"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise UsageError(f"the run directory {self.path} cannot be written: {error.strerror}") from error

    def discard(self) -> None:
        """Remove a folder this run made, if the run came to nothing: its settings are written when it starts."""
        if self._mine and not self._started:
            shutil.rmtree(self.path, ignore_errors=True)

    def missing(self) -> list[str]:
        """What a run that has begun must have to be gone on with, besides a checkpoint, and is not there."""
        parts = {"config.json": self.path / "config.json", "layers": self.layers / "index.json"}
        return [name for name, path in parts.items() if not path.exists()]

    def open(self) -> None:
        if not (self.path / "config.json").is_file():
            raise UsageError(f"{self.path} is not a run directory: it has no config.json")

    def lock(self) -> None:
        """Held until `unlock` or the end of the process, however it ends."""
        try:
            file = (self.path / "lock").open("a+")
        except OSError as error:
            raise UsageError(f"the run directory {self.path} cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            file.close()
            raise UsageError(
                f"the run {self.path} is in use by process {holder}: wait for it or stop it first"
            ) from None
        except OSError as error:
            file.close()
            raise UsageError(
                f"the run {self.path} cannot be locked: {error.strerror}; the file system must support locks"
            ) from error
        self._lock = file
        with contextlib.suppress(OSError):  # on a full disk the lock holds all the same, without a name on it
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), str(os.getpid()).encode())

    def unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def write_config(self, saved: SavedConfig) -> None:
        write_atomic(self.path / "config.json", json_with_checksum.encode(saved), 0o600)
        self._started = True

    def read_config(self) -> SavedConfig:
        self.open()
        try:
            return json_with_checksum.decode((self.path / "config.json").read_bytes(), SavedConfig)
        except OSError as error:
            raise UsageError(f"{self.path}/config.json cannot be read: {error.strerror}") from error
        except Broken as error:
            raise UsageError(
                f"the settings of this run were changed or damaged: {self.path}/config.json {error}; put a copy of it back. "
                "To change settings, pass them with --resume"
            ) from error

    def write_layer(self, index: int, layer: Layer) -> str:
        """Returns the file's SHA-256."""
        encoded = portable_layer.encode(layer)
        (self.layers / _layer_file(index)).write_bytes(encoded)
        return hashlib.sha256(encoded).hexdigest()

    def write_index(self, index: LayerIndex) -> None:
        write_atomic(self.layers / "index.json", json_with_checksum.encode(index))

    def read_layers(self) -> tuple[LayerIndex, list[Layer]]:
        name = "index.json"
        try:
            index = json_with_checksum.decode((self.layers / name).read_bytes(), LayerIndex)
            index.check_whole()
            layers = []
            for place in range(len(index.names)):
                name = _layer_file(place)
                encoded = (self.layers / name).read_bytes()
                if index.digests and hashlib.sha256(encoded).hexdigest() != index.digests[place]:
                    raise Broken("is damaged (its SHA-256 does not match)")
                layers.append(portable_layer.decode(encoded))
        except OSError as error:
            raise CheckpointError(f"the layers of {self.path} cannot be read: {name}: {error.strerror}") from error
        except (Broken, ProtocolError) as error:
            said = error if isinstance(error, Broken) else f"is damaged: {error}"
            raise CheckpointError(
                f"the layers of {self.path} cannot be read: {name} {said}; put a copy of it back. The weights in "
                f"{self.checkpoints} load in plain PyTorch without it"
            ) from error
        return index, layers


def _layer_file(index: int) -> str:
    return f"{index:04d}.layer"
